"""What a plan expects a model to keep is what the model's transformers cache holds."""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
import transformers

from mamba_cache.cli.model_shapes import shape_of
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
FAMILIES = {
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


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_plan_counts_the_bytes_that_the_model_keeps(model_type):
    published = ATTENTION | FAMILIES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **published)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    layout = probe(ModelRunner(model), BLOCK).layout
    # The names that transformers gives to layers are others than those of published files.
    for source in (published, model.config.to_dict()):
        shape = shape_of({**source, "dtype": "float32"}, name=model_type)
        assert shape.state_spec.bytes_per_slot == layout.bytes_per_state
        assert shape.kv_spec.bytes_per_block(BLOCK) == layout.bytes_per_block
