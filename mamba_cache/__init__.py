"""Prefix caching for hybrid (attention + Mamba) language models.

Start with ``DynamicInferenceContext``, which an inference engine embeds, or with
``MambaSlotAllocator`` for an engine that has a context of its own.

Names are imported at their first use, so that ``import mamba_cache`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mamba_cache._version import __version__

if TYPE_CHECKING:
    from mamba_cache.cache import (
        BlockHasher,
        BlockHashes,
        CheckpointPlacement,
        EveryNthBlock,
        KVBlockAllocator,
        LastBlock,
        LruSlotPolicy,
        MegatronPlacement,
        RefZeroSlotPolicy,
        SlotEvictionPolicy,
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
    from mamba_cache.slots import MambaSlotAllocator
    from mamba_cache.states import KVCacheSpec, LayerKind, StateSpec
else:
    # The modules whose names are offered here; those that need no torch come first.
    _HOMES = ("errors", "config", "cache", "states", "metadata", "slots", "context")

    def __getattr__(name: str) -> Any:
        """Import a name of ``__all__``, or a module that exports one, at its first use."""
        if name in _HOMES:
            return import_module(f"{__name__}.{name}")
        homes = map(import_module, (f"{__name__}.{home}" for home in _HOMES))
        for home in homes if name in __all__ else ():
            if name in home.__all__:
                value = globals()[name] = getattr(home, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List all names, imported or not."""
        return sorted({*globals(), *__all__})


__all__ = [
    "Admission",
    "BlockHasher",
    "BlockHashes",
    "CacheConfig",
    "CacheStats",
    "CapacityError",
    "CapturedExtractions",
    "CheckpointPlacement",
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
