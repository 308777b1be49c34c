"""Slots for saved states: the pool, eviction policies, checkpoint placement, the allocator."""

from collections.abc import Callable
from typing import Final

from mamba_cache.slots.adaptive import AdaptiveSlotPolicy
from mamba_cache.slots.allocator import MambaSlotAllocator
from mamba_cache.slots.megatron_scratch import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST
from mamba_cache.slots.placement import (
    BranchPoint,
    CheckpointPlacement,
    EveryNthBlock,
    LastBlock,
    MegatronPlacement,
    PlacementFacts,
)
from mamba_cache.slots.policies import (
    ConsumedSlotPolicy,
    LruSlotPolicy,
    PrefixSlotPolicy,
    PromptFacts,
    RefZeroSlotPolicy,
    ScoreSlotPolicy,
    SlotEvictionPolicy,
    SlotPlan,
    StateProposal,
)
from mamba_cache.slots.pool import SlotLease, SlotPool

__all__ = [
    "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST",
    "SLOT_POLICIES",
    "AdaptiveSlotPolicy",
    "BranchPoint",
    "CheckpointPlacement",
    "ConsumedSlotPolicy",
    "EveryNthBlock",
    "LastBlock",
    "LruSlotPolicy",
    "MambaSlotAllocator",
    "MegatronPlacement",
    "PlacementFacts",
    "PrefixSlotPolicy",
    "PromptFacts",
    "RefZeroSlotPolicy",
    "ScoreSlotPolicy",
    "SlotEvictionPolicy",
    "SlotLease",
    "SlotPlan",
    "SlotPool",
    "StateProposal",
]

SLOT_POLICIES: Final[dict[str, Callable[[], SlotEvictionPolicy]]] = {
    "adaptive": AdaptiveSlotPolicy,
    "lru": LruSlotPolicy,
    "consumed": ConsumedSlotPolicy,
    "score": ScoreSlotPolicy,
}
"""What makes each slot policy, by the name that settings and commands give it."""
