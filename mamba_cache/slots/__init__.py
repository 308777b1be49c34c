"""Slots for saved states with their tensors: the allocator, and Megatron Core's scratch."""

from mamba_cache.slots.allocator import MambaSlotAllocator
from mamba_cache.slots.megatron_scratch import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST

__all__ = ["MAX_INTERMEDIATE_OFFSETS_PER_REQUEST", "MambaSlotAllocator"]
