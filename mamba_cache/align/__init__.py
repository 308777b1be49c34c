"""States in block tables, for engines that address them as KV blocks and decode with drafts."""

from mamba_cache.align.buffers import CpuGpuBuffer, MambaCopyBuffers
from mamba_cache.align.decisions import StateMove
from mamba_cache.align.gpu_context import MambaBuffers, MambaSpecDecodeGPUContext
from mamba_cache.align.host import (
    cleanup_mamba_state_idx,
    postprocess_mamba,
    postprocess_mamba_align_gpu,
    postprocess_mamba_all,
    preprocess_mamba,
)
from mamba_cache.align.memory import (
    MambaCopySpec,
    get_conv_copy_spec,
    get_conv_copy_spec_ds,
    get_temporal_copy_spec,
)
from mamba_cache.align.resident import MambaHybridAttnMetadata, MambaHybridModelState
from mamba_cache.align.spec import MambaSpec, get_mamba_groups
from mamba_cache.align.staging import (
    stage_mamba_state_idx_to_gpu,
    stage_postprocess_inputs_to_gpu,
    stage_postprocess_metadata_to_gpu,
)

__all__ = [
    "CpuGpuBuffer",
    "MambaBuffers",
    "MambaCopyBuffers",
    "MambaCopySpec",
    "MambaHybridAttnMetadata",
    "MambaHybridModelState",
    "MambaSpec",
    "MambaSpecDecodeGPUContext",
    "StateMove",
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
