"""What the kernels of a step read: chunks of packed sequences, and the step's tensors."""

from mamba_cache.metadata.chunks import compute_chunk_metadata, compute_varlen_chunk_metadata
from mamba_cache.metadata.step import StepMetadata
from mamba_cache.metadata.step_buffers import (
    NO_DECODES,
    CheckpointEntry,
    DecodeBatch,
    SequenceSlice,
    StepBuffers,
    StepPlan,
)

__all__ = [
    "NO_DECODES",
    "CheckpointEntry",
    "DecodeBatch",
    "SequenceSlice",
    "StepBuffers",
    "StepMetadata",
    "StepPlan",
    "compute_chunk_metadata",
    "compute_varlen_chunk_metadata",
]
