"""Clears the memory of a context that neither a running request nor a cached prefix needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mamba_cache.context.memory import CacheMemory
from mamba_cache.context.requests import ActiveRequest
from mamba_cache.slots import scrub_free_slots

__all__ = ["scrub_memory"]


def scrub_memory(
    memory: CacheMemory,
    requests: Sequence[ActiveRequest],
    rows_in_use: Sequence[int],
    cursors: torch.Tensor | None,
) -> None:
    """Zero all that the next step does not read: states, keys, values and tokens.

    Slots that hold no cached state, KV blocks that are neither used nor cached, what requests have
    not computed of their own blocks yet, live states of no request, and of a request with drafts
    all of its live states but the current one. The tensors of the last step's metadata are zeroed
    too, for they hold tokens.

    Args:
        memory: The memory, between two steps.
        requests: Those that hold memory.
        rows_in_use: The rows of those of them that have a live state by now.
        cursors: With drafts, [max_requests] int32 on the device: which of a request's live states
            is the current one.
    """
    # No step is in flight, so what is reserved is not written yet.
    scrub_free_slots(memory.slot_allocator, reserved=True)
    if memory.kv_cache is not None:
        _scrub_blocks(memory, memory.kv_cache, requests)
    _scrub_live_states(memory, rows_in_use, cursors)
    memory.step_buffers.zero_()


def _scrub_blocks(
    memory: CacheMemory, kv_cache: torch.Tensor, requests: Sequence[ActiveRequest]
) -> None:
    kv_blocks, block_size = memory.kv_block_allocator, memory.block_size_tokens
    # The dummy block counts as free: padding is written to it.
    unwritten = [*kv_blocks.free_block_ids, kv_blocks.dummy_block_id]
    for active in requests:
        # Blocks that it shares are full, also where it computes their tokens again.
        written = max(active.num_computed, active.num_shared_tokens)
        first, offset = divmod(written, block_size)
        if offset:
            kv_cache[:, :, active.block_ids[first], offset:] = 0
            first += 1
        unwritten += active.block_ids[first:]
    kv_cache[:, :, unwritten] = 0


def _scrub_live_states(
    memory: CacheMemory, rows_in_use: Sequence[int], cursors: torch.Tensor | None
) -> None:
    ring = memory.config.live_rows_per_request
    is_needed = torch.zeros(memory.max_requests, ring, dtype=torch.bool, device=memory.device)
    is_needed[list(rows_in_use)] = True
    if cursors is not None:
        rows = torch.arange(ring, device=memory.device)
        is_needed &= rows == cursors[:, None]
    for tensor in memory.live_states.tensors.values():
        tensor[:, ~is_needed.flatten()] = 0
