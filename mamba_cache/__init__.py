"""Prefix caching for hybrid (attention + Mamba) language models.

Start with ``DynamicInferenceContext``, which an inference engine embeds, or with
``MambaSlotAllocator`` for an engine that has a context of its own.
"""

from mamba_cache._version import __version__
from mamba_cache.blocks import (
    BlockHasher,
    BlockHashes,
    KVBlockAllocator,
    compute_block_hashes,
)
from mamba_cache.config import CacheConfig, EvictionPolicy
from mamba_cache.context import (
    Admission,
    CacheStats,
    DynamicInferenceContext,
    MissReason,
    PrefixMatch,
    PreparedRequest,
    Request,
    RequestStatus,
    ScheduledRequest,
    Step,
)
from mamba_cache.errors import (
    BlockCapacityError,
    BudgetError,
    CapacityError,
    DivergenceError,
    DoubleFreeError,
    HashConflictError,
    InvalidArgumentError,
    InvariantError,
    MambaCacheError,
    MambaSlotCapacityError,
    MissingExtraError,
    MissingStateError,
    ModelChangedError,
    RequestCapacityError,
    SequenceLengthError,
    StepOrderError,
    TokenCapacityError,
    UnknownBlockError,
    UnknownRequestError,
    UnresumableModelError,
    UnsupportedVersionError,
)
from mamba_cache.metadata import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
    StepMetadata,
    compute_varlen_chunk_metadata,
)
from mamba_cache.slots import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST, MambaSlotAllocator
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = [
    "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST",
    "Admission",
    "BlockCapacityError",
    "BlockHasher",
    "BlockHashes",
    "BudgetError",
    "CacheConfig",
    "CacheStats",
    "CapacityError",
    "DivergenceError",
    "DoubleFreeError",
    "DynamicInferenceContext",
    "EvictionPolicy",
    "HashConflictError",
    "InvalidArgumentError",
    "InvariantError",
    "KVBlockAllocator",
    "KVCacheSpec",
    "Mamba2AttentionBackend",
    "Mamba2AttentionMetadata",
    "Mamba2AttentionMetadataBuilder",
    "MambaCacheError",
    "MambaSlotAllocator",
    "MambaSlotCapacityError",
    "MissReason",
    "MissingExtraError",
    "MissingStateError",
    "ModelChangedError",
    "PrefixMatch",
    "PreparedRequest",
    "Request",
    "RequestCapacityError",
    "RequestStatus",
    "ScheduledRequest",
    "SequenceLengthError",
    "StateSpec",
    "Step",
    "StepMetadata",
    "StepOrderError",
    "TokenCapacityError",
    "UnknownBlockError",
    "UnknownRequestError",
    "UnresumableModelError",
    "UnsupportedVersionError",
    "__version__",
    "compute_block_hashes",
    "compute_varlen_chunk_metadata",
]
