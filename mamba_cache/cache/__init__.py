"""Decisions of a cache, without tensors: hashes, KV blocks, slots, eviction, placement.

This package needs numpy and xxhash. Listeners (``KVBlockAllocator.listeners``) get an event when a
block or state is published or removed.
"""

from collections.abc import Callable
from typing import Final

from mamba_cache.cache.adaptive import AdaptiveSlotPolicy
from mamba_cache.cache.hashing import (
    MAX_TOKEN_ID,
    BlockHashChain,
    BlockHasher,
    BlockHashes,
    ExtraKey,
    as_token_array,
    compute_block_hashes,
    hash_id_of,
)
from mamba_cache.cache.kv_block_allocator import KVBlockAllocator
from mamba_cache.cache.placement import (
    BranchPoint,
    CheckpointPlacement,
    EveryNthBlock,
    LastBlock,
    MegatronPlacement,
    PlacementFacts,
)
from mamba_cache.cache.policies import (
    LruSlotPolicy,
    PrefixSlotPolicy,
    PromptFacts,
    RefZeroSlotPolicy,
    SlotEvictionPolicy,
    SlotPlan,
    StateProposal,
)
from mamba_cache.cache.rows import Rows
from mamba_cache.cache.slot_pool import SlotLease, SlotPool

__all__ = [
    "MAX_TOKEN_ID",
    "SLOT_POLICIES",
    "AdaptiveSlotPolicy",
    "BlockHashChain",
    "BlockHasher",
    "BlockHashes",
    "BranchPoint",
    "CheckpointPlacement",
    "EveryNthBlock",
    "ExtraKey",
    "KVBlockAllocator",
    "LastBlock",
    "LruSlotPolicy",
    "MegatronPlacement",
    "PlacementFacts",
    "PrefixSlotPolicy",
    "PromptFacts",
    "RefZeroSlotPolicy",
    "Rows",
    "SlotEvictionPolicy",
    "SlotLease",
    "SlotPlan",
    "SlotPool",
    "StateProposal",
    "as_token_array",
    "compute_block_hashes",
    "hash_id_of",
]

SLOT_POLICIES: Final[dict[str, Callable[[], SlotEvictionPolicy]]] = {
    "adaptive": AdaptiveSlotPolicy,
    "lru": LruSlotPolicy,
}
"""Slot policies by their names in settings and commands."""
