"""Functions for states in block tables, as vLLM stores them; they take vLLM's objects."""

from mamba_cache.integrations.vllm.hybrid_model_state import (
    MambaHybridAttnMetadata,
    MambaHybridModelState,
)
from mamba_cache.integrations.vllm.mamba2_attention import (
    CommonAttentionMetadata,
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
)
from mamba_cache.integrations.vllm.mamba_spec import (
    MambaCopySpec,
    MambaSpec,
    get_conv_copy_spec,
    get_conv_copy_spec_ds,
    get_mamba_groups,
    get_temporal_copy_spec,
)
from mamba_cache.integrations.vllm.mamba_utils import (
    CpuGpuBuffer,
    MambaBuffers,
    MambaCopyBuffers,
    MambaSpecDecodeGPUContext,
    cleanup_mamba_state_idx,
    postprocess_mamba,
    postprocess_mamba_align_gpu,
    postprocess_mamba_all,
    preprocess_mamba,
    stage_mamba_state_idx_to_gpu,
    stage_postprocess_inputs_to_gpu,
    stage_postprocess_metadata_to_gpu,
)

__all__ = [
    "CommonAttentionMetadata",
    "CpuGpuBuffer",
    "Mamba2AttentionBackend",
    "Mamba2AttentionMetadata",
    "Mamba2AttentionMetadataBuilder",
    "MambaBuffers",
    "MambaCopyBuffers",
    "MambaCopySpec",
    "MambaHybridAttnMetadata",
    "MambaHybridModelState",
    "MambaSpec",
    "MambaSpecDecodeGPUContext",
    "cleanup_mamba_state_idx",
    "get_conv_copy_spec",
    "get_conv_copy_spec_ds",
    "get_mamba_groups",
    "get_temporal_copy_spec",
    "postprocess_mamba",
    "postprocess_mamba_align_gpu",
    "postprocess_mamba_all",
    "preprocess_mamba",
    "stage_mamba_state_idx_to_gpu",
    "stage_postprocess_inputs_to_gpu",
    "stage_postprocess_metadata_to_gpu",
]
