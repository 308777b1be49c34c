"""Models whose sizes are known without a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BUILT_IN"]

BUILT_IN: dict[str, tuple[float, Mapping[str, Any]]] = {
    "nemotron-h-8b": (
        8.1,
        {
            "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
        },
    ),
    "nemotron-nano-9b-v2": (
        8.9,
        {
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "hidden_size": 4480,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "chunk_size": 128,
        },
    ),
    "granite-4.0-h-tiny": (
        6.9,
        {
            "layer_types": 4 * (5 * ["mamba"] + ["attention"] + 4 * ["mamba"]),
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
        },
    ),
    "qwen3-next-80b-a3b": (
        81.3,
        {
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
    ),
    "falcon-h1-7b": (
        7.6,
        {
            "num_hidden_layers": 44,
            "hidden_size": 3072,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
        },
    ),
    "zamba2-7b": (
        7.4,
        {
            "layers_block_type": [
                "hybrid" if layer in (6, *range(11, 78, 6)) else "mamba" for layer in range(81)
            ],
            "hidden_size": 3584,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "attention_head_dim": 224,
            "n_mamba_heads": 112,
            "mamba_headdim": 64,
            "mamba_d_state": 64,
            "mamba_ngroups": 2,
            "mamba_d_conv": 4,
            "chunk_size": 256,
        },
    ),
}
"""Billions of parameters, and what the published configurations say, by name."""
