"""Clears what nobody owns any more: a freed slot keeps its last state until it is used again."""

from __future__ import annotations

from mamba_cache.slots.allocator import MambaSlotAllocator

__all__ = ["scrub_free_slots"]


def scrub_free_slots(slots: MambaSlotAllocator, *, reserved: bool = False) -> None:
    """Zeroes the states of all free slots, and the scratch.

    Cached slots are left alone. For an operator's calls, not for the path of a step:
    it takes as long as writing that memory does.

    Args:
        slots: The slots, between two steps.
        reserved: Reserved slots too, for callers who know that nobody has written them yet.
    """
    free = slots.pool.free_slots[: slots.free_count].tolist()
    free = sorted(free + list(slots.pool.reserved) if reserved else free)
    tensors = [slots.conv_states, slots.ssm_states, slots.ssm_scales]
    for tensor in tensors:
        if tensor is not None and free:
            tensor[:, free] = 0
    slots.intermediate_conv_out.zero_()
    slots.intermediate_ssm_out.zero_()
