"""What a step's kernels need to know of its batch: the packed tensors, and how chunks are cut."""

from mamba_cache.metadata.chunks import compute_chunk_metadata, compute_varlen_chunk_metadata
from mamba_cache.metadata.step import PAD_SLOT_ID, StepMetadata

__all__ = [
    "PAD_SLOT_ID",
    "StepMetadata",
    "compute_chunk_metadata",
    "compute_varlen_chunk_metadata",
]
