"""Slots for saved states with their tensors: the allocator, and Megatron Core's scratch."""

from mamba_cache.config import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST
from mamba_cache.slots.allocator import MambaSlotAllocator

__all__ = ["MAX_INTERMEDIATE_OFFSETS_PER_REQUEST", "MambaSlotAllocator"]
