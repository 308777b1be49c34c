"""Hybrid models of transformers on a GPU, with sizes that GPU kernels accept."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra transformers")

from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BLOCK = 64
_SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
_SSD = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 64}
_GRANITE = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 128, "mamba_chunk_size": BLOCK, **_SSD,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
FAMILIES = {
    "mamba2": {
        "num_hidden_layers": 3, "state_size": 64, "num_heads": 8, "head_dim": 32, "n_groups": 1,
        "chunk_size": BLOCK,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "ssm_state_size": 64,
        "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "chunk_size": BLOCK,
    },
    "granitemoehybrid": {"num_local_experts": 4, "num_experts_per_tok": 2, **_GRANITE},
    "granitemoehybrid without experts": {
        "num_local_experts": 0, "num_experts_per_tok": 0, **_GRANITE,
    },
    "qwen3_next": {
        **_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_5_text": _DELTA,
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 256, "mamba_chunk_size": BLOCK, **_SSD},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip
"""Settings by transformers' name of the model, sometimes with a remark."""


def make_model(family: str, dtype: torch.dtype = torch.bfloat16):
    """A model with fixed random weights; skip the test if transformers lacks the model."""
    model_type = family.partition(" ")[0]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}: needs the extra transformers")
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**_SIZES, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype).eval()
