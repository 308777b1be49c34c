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
    CapturedExtractions,
    DeviceTokens,
    DynamicInferenceContext,
    Forks,
    MissReason,
    PrefixMatch,
    PreparedRequest,
    Request,
    RequestStatus,
    ScheduledRequest,
    Step,
)
from mamba_cache.errors import (
    CapacityError,
    InvalidArgumentError,
    MambaCacheError,
    PoisonedError,
    StepOrderError,
    UnknownRequestError,
)
from mamba_cache.metadata import StepMetadata, compute_varlen_chunk_metadata
from mamba_cache.slots import (
    CheckpointPlacement,
    ConsumedSlotPolicy,
    EveryNthBlock,
    LastBlock,
    LruSlotPolicy,
    MambaSlotAllocator,
    MegatronPlacement,
    RefZeroSlotPolicy,
    ScoreSlotPolicy,
    SlotEvictionPolicy,
)
from mamba_cache.states import KVCacheSpec, LayerKind, StateSpec

__all__ = [
    "Admission",
    "BlockHasher",
    "BlockHashes",
    "CacheConfig",
    "CacheStats",
    "CapacityError",
    "CapturedExtractions",
    "CheckpointPlacement",
    "ConsumedSlotPolicy",
    "DeviceTokens",
    "DynamicInferenceContext",
    "EveryNthBlock",
    "EvictionPolicy",
    "Forks",
    "InvalidArgumentError",
    "KVBlockAllocator",
    "KVCacheSpec",
    "LastBlock",
    "LayerKind",
    "LruSlotPolicy",
    "MambaCacheError",
    "MambaSlotAllocator",
    "MegatronPlacement",
    "MissReason",
    "PoisonedError",
    "PrefixMatch",
    "PreparedRequest",
    "RefZeroSlotPolicy",
    "Request",
    "RequestStatus",
    "ScheduledRequest",
    "ScoreSlotPolicy",
    "SlotEvictionPolicy",
    "StateSpec",
    "Step",
    "StepMetadata",
    "StepOrderError",
    "UnknownRequestError",
    "__version__",
    "compute_block_hashes",
    "compute_varlen_chunk_metadata",
]
