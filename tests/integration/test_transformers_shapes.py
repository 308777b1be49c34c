"""What a plan expects a model to keep is what the model's transformers cache holds."""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers_rig import FAMILIES as SERVED
from transformers_rig import make_model

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.model_shapes import shape_of
from mamba_cache.integrations.transformers.probe import probe
from mamba_cache.integrations.transformers.runner import ModelRunner

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

REFUSED = {
    *("glm5_next", "glm5_next_text", "qwen4_exp", "qwen4_exp_text"),  # indexed attention
    *("minimax", "rwkv", "xlstm", "recurrent_gemma"),  # states outside transformers' cache layers
}
"""Types whose layers keep a state and that neither ``PrefixCache`` nor a plan serves, and why."""

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def measure(model):
    """What ``PrefixCache`` measures of a model: its bytes per slot and per block."""
    layout = probe(ModelRunner(model), BLOCK).layout
    return layout.bytes_per_state, layout.bytes_per_block


def planned(config, dtype):
    """What a plan reads of its configuration."""
    shape = shape_of({**config, "dtype": str(dtype)}, name="a model")
    return shape.state_spec.bytes_per_slot, shape.kv_spec.bytes_per_block(BLOCK)


@both_dtypes
@pytest.mark.parametrize("model_type", [t for t in PUBLISHED if t in CONFIG_MAPPING])
def test_a_plan_counts_the_bytes_that_the_model_keeps(model_type, dtype):
    """The names that transformers gives to sizes and layers are others than those of files."""
    published = ATTENTION | PUBLISHED[model_type]
    if model_type in PURE:
        published = {"vocab_size": 64, "hidden_size": 64} | PUBLISHED[model_type]
    config = transformers.AutoConfig.for_model(model_type, pad_token_id=0, **published)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    kept = measure(model)
    assert planned(published, dtype) == kept
    assert planned(model.config.to_dict(), dtype) == kept


@both_dtypes
@pytest.mark.parametrize("name", SERVED)
def test_a_plan_reads_every_family_that_the_cache_serves(name, dtype):
    model = make_model(name).to(dtype)
    assert planned(model.config.to_dict(), dtype) == measure(model)


def kinds_of_layers(config):
    """How many layers of a cache keep a state, and how many all keys and values."""
    layers = transformers.DynamicCache(config=config).layers
    states = sum(isinstance(x, transformers.cache_utils.LinearAttentionLayer) for x in layers)
    tokens = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer")
    return states, sum(type(layer).__name__ in tokens for layer in layers)


def test_every_configuration_of_transformers_with_states_is_read_or_refused_by_name():
    """With the sizes that transformers itself gives it, multimodal ones among them."""
    read, refused = [], set()
    for model_type in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[model_type]()
            decoder = config.get_text_config(decoder=True)
            states, tokens = kinds_of_layers(decoder)
        except Exception:
            continue  # it needs arguments, or has no decoder
        if not states and model_type not in REFUSED:
            continue
        try:
            shape = shape_of(config.to_dict(), name=model_type)
        except InvalidArgumentError:
            refused.add(model_type)
            continue
        assert (shape.state_spec.tensors[0].num_layers, shape.kv_spec.num_layers) == (
            states,
            tokens,
        ), model_type
        read.append(model_type)
    assert refused == REFUSED & set(CONFIG_MAPPING)
    assert len(read) >= 20
