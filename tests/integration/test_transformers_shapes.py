"""What a plan expects a model to keep is what the model's transformers cache holds."""

import json

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers_rig import FAMILIES as SERVED
from transformers_rig import make_model

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.model_shapes import load_shape
from mamba_cache.integrations.transformers.layers import read_layers
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.tensors import PrefixLayout

BLOCK = 16
ATTENTION = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
PUBLISHED = {
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*-M",
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "granitemoehybrid": MAMBA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "falcon_h1": MAMBA
    | {"num_hidden_layers": 2, "head_dim": 16, "mamba_d_ssm": 96, "mamba_n_heads": 6},
    "zamba2": {
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
    },
    "bamba": MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "mamba_d_state": 24,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "use_mamba_kernels": False,
    },
}

LATENT = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
PUBLISHED |= {
    "mamba2": {
        "num_hidden_layers": 2,
        "state_size": 24,
        "num_heads": 8,
        "head_dim": 16,
        "expand": 2,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "mamba": {"num_hidden_layers": 2, "state_size": 8, "expand": 2, "conv_kernel": 4},
    "lfm2": {"num_hidden_layers": 3, "full_attn_idxs": [1], "conv_L_cache": 3},
    "lfm3": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "conv_L_cache": 5,
        "head_dim": 16,
        "sliding_window": 12,
    },
    "kimi_linear": LATENT
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2],
            "head_dim": 16,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
    },
    "bailing_hybrid": LATENT
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_group_size": 2,
        "head_dim": 24,
        "short_conv_kernel_size": 3,
        "num_expert_group": 1,
        "topk_group": 1,
    },
    "inkling_text": {
        "num_hidden_layers": 3,
        "local_layer_ids": [0, 1],
        "sconv_kernel_size": 3,
        "head_dim": 16,
        "sliding_window_size": 12,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 96,
    },
    "zaya": {"num_hidden_layers": 2, "head_dim": 16, "cca_time0": 3, "cca_time1": 2},
}
PURE = ("mamba", "mamba2")
"""They have no attention, and their files say nothing of it."""

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def measure(model):
    """What ``PrefixCache`` measures of a model: its bytes per state and per block."""
    runner = ModelRunner(model)
    cache = runner.new_cache()
    runner.forward([0, 1, 2], cache, 0)
    layers = runner.learn(cache)
    memory = read_layers(cache, layers, 3)
    layout = PrefixLayout(layers, memory, BLOCK)
    return layout.bytes_per_state, layout.bytes_per_block


def planned(folder, config, dtype):
    """What a plan reads of a configuration's file."""
    config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = load_shape(str(folder))
    return shape.state_spec.bytes_per_slot, shape.kv_spec.bytes_per_block(BLOCK)


@both_dtypes
@pytest.mark.parametrize("model_type", [t for t in PUBLISHED if t in CONFIG_MAPPING])
def test_a_plan_counts_the_bytes_that_the_model_keeps(model_type, dtype, tmp_path):
    """The names that transformers gives to sizes and layers are others than those of files."""
    published = ATTENTION | PUBLISHED[model_type]
    if model_type in PURE:
        published = {"vocab_size": 64, "hidden_size": 64} | PUBLISHED[model_type]
    published |= {"pad_token_id": 0, "model_type": model_type}
    config = transformers.AutoConfig.for_model(**published)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    kept = measure(model)
    assert planned(tmp_path, published, dtype) == kept
    assert planned(tmp_path, model.config.to_dict(), dtype) == kept


@both_dtypes
@pytest.mark.parametrize("name", SERVED)
def test_a_plan_reads_every_family_that_the_cache_serves(name, dtype, tmp_path):
    model = make_model(name).to(dtype)
    assert planned(tmp_path, model.config.to_dict(), dtype) == measure(model)


def test_the_text_model_of_a_multimodal_one_is_read(tmp_path):
    model = make_model("qwen3_5")
    text = model.config.to_dict()
    kept = measure(model)
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
    assert planned(tmp_path, config | {"architectures": None}, torch.float32) == kept


def test_weights_are_counted_where_there_are_no_files(tmp_path):
    model = make_model("granite 4")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict() | {"dtype": "float32"}))
    assert load_shape(str(tmp_path)).weight_bytes == 4 * sum(p.numel() for p in model.parameters())


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA, "the model must have linear-attention layers"),
        ({"hidden_size": 32}, "must be a config.json that transformers reads"),
        ({"model_type": "no-such-type"}, "must be a config.json that transformers reads"),
        ({"model_type": "bamba", "mamba_n_heads": 7}, "must be a config.json|cannot be built"),
        ({"model_type": "nemotron_h", "hidden_size": -4}, "cannot be built on the meta device"),
        ([1, 2], "must be a config.json that transformers reads"),
    ],
)
def test_what_cannot_be_read_is_named(config, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=said):
        load_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "chunk"), [("mamba2", 16), ("qwen3_next", 64), ("mamba", 1), ("lfm2", 1)]
)
def test_the_chunk_is_the_kernels(model_type, chunk, tmp_path):
    published = ({} if model_type in PURE else ATTENTION) | PUBLISHED[model_type]
    config = {"vocab_size": 64, "hidden_size": 64, "pad_token_id": 0, "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config | published), encoding="utf-8")
    assert load_shape(str(tmp_path)).ssm_chunk_size == chunk
