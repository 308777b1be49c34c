"""What the kernels of a step read: chunks of packed sequences, and the step's tensors."""

from mamba_cache.metadata.chunks import compute_chunk_metadata, compute_varlen_chunk_metadata
from mamba_cache.metadata.step import StepMetadata

__all__ = ["StepMetadata", "compute_chunk_metadata", "compute_varlen_chunk_metadata"]
