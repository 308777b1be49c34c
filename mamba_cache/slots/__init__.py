"""Slots for saved states: the pool, eviction policies, checkpoint placement, the allocator."""

from mamba_cache.slots.allocator import MambaSlotAllocator, scrub_free_slots
from mamba_cache.slots.events import StateEvent, StateObserver, StatesRemoved, StatesStored
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
    RefZeroSlotPolicy,
    ScoreSlotPolicy,
    SlotEvictionPolicy,
)
from mamba_cache.slots.pool import SlotLease, SlotPool

__all__ = [
    "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST",
    "BranchPoint",
    "CheckpointPlacement",
    "ConsumedSlotPolicy",
    "EveryNthBlock",
    "LastBlock",
    "LruSlotPolicy",
    "MambaSlotAllocator",
    "MegatronPlacement",
    "PlacementFacts",
    "RefZeroSlotPolicy",
    "ScoreSlotPolicy",
    "SlotEvictionPolicy",
    "SlotLease",
    "SlotPool",
    "StateEvent",
    "StateObserver",
    "StatesRemoved",
    "StatesStored",
    "scrub_free_slots",
]
