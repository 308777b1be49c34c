"""The reference model's configuration: what it refuses, and the specs that it gives the caches."""

import dataclasses

import pytest
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import HybridModel, HybridModelConfig

CONFIG = HybridModelConfig(
    layer_pattern="M*M-",
    hidden_size=24,
    num_attention_heads=4,
    num_kv_heads=2,
    attention_head_dim=6,
    mamba_num_heads=4,
    mamba_head_dim=5,
    ssm_state_size=7,
    num_groups=2,
    ssm_chunk_size=4,
    mlp_size=16,
)


def test_ssm_state_is_kept_in_the_dtype_of_the_scan():
    """A pool narrower than its kernel made hits differ from misses elsewhere."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        conv, ssm = CONFIG.state_spec(dtype).tensors
        assert (conv.num_layers, conv.shape, conv.dtype) == (2, (48, 3), dtype)
        assert (ssm.num_layers, ssm.shape) == (2, (4, 5, 7))
        assert ssm.dtype == torch.promote_types(dtype, torch.float32)
        assert HybridModel(CONFIG, dtype=dtype).layers[0].a.dtype == ssm.dtype
    kv = CONFIG.kv_spec(torch.bfloat16)
    assert (kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.dtype) == (1, 2, 6, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_pattern": ""}, "layer_pattern must be one or more of 'M', '\\*' and '-', got ''"),
        ({"layer_pattern": "M*X"}, "got 'M\\*X'"),
        ({"hidden_size": 0}, "hidden_size must be an int in .1, .*, got 0"),
        ({"vocab_size": 2.5}, "vocab_size must be an int in .1, .*, got 2.5"),
        ({"mlp_size": True}, "mlp_size must be an int in .1, .*, got True"),
        ({"conv_kernel": 1}, "conv_kernel must be an int in .2, .*, got 1"),
        ({"num_kv_heads": 3}, "must be a multiple of num_kv_heads \\(3\\), got 4"),
        ({"num_groups": 3}, "mamba_num_heads must be a multiple of num_groups \\(3\\), got 4"),
        ({"norm_eps": 0.0}, "norm_eps must be finite and > 0, got 0.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be finite and > 0, got nan"),
    ],
)  # fmt: skip
def test_config_refuses_what_does_not_fit(changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_model_refuses_integer_weights():
    with pytest.raises(InvalidArgumentError, match=r"floating-point type, got torch\.int32"):
        HybridModel(CONFIG, dtype=torch.int32)
