"""What the kernels of a step read: chunks of packed sequences, and the step's tensors."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from mamba_cache.metadata.chunks import compute_chunk_metadata, compute_varlen_chunk_metadata
from mamba_cache.metadata.step import StepMetadata
from mamba_cache.metadata.step_buffers import (
    CheckpointEntry,
    DecodeBatch,
    SequenceSlice,
    StepBuffers,
    StepPlan,
)

__all__ = [
    "CheckpointEntry",
    "DecodeBatch",
    "SequenceSlice",
    "StepBuffers",
    "StepMetadata",
    "StepPlan",
    "compute_chunk_metadata",
    "compute_varlen_chunk_metadata",
]

if not TYPE_CHECKING:  # pragma: no branch - mypy would take any name for one of these

    def __getattr__(name: str) -> object:
        """Look up a name that has moved to ``mamba_cache.integrations.vllm``, or has another."""
        if name == "BoundaryEntry":
            message = f"{__name__}.BoundaryEntry is an old name of CheckpointEntry"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return CheckpointEntry
        if name not in (
            "CommonAttentionMetadata",
            "Mamba2AttentionBackend",
            "Mamba2AttentionMetadata",
            "Mamba2AttentionMetadataBuilder",
        ):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new = "mamba_cache.integrations.vllm"
        message = f"{__name__}.{name} is an old path: import it from {new}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)
