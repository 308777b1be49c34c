"""Clears the memory of a context that belongs to no request and holds no cached prefix."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mamba_cache.context.memory import CacheMemory
from mamba_cache.slots import scrub_free_slots

__all__ = ["scrub_memory"]


def scrub_memory(memory: CacheMemory, rows_in_use: Collection[int]) -> None:
    """Zero free slots, KV blocks that are neither used nor cached, and unused live states.

    The tensors of the last step's metadata are zeroed too, for they hold tokens.

    Args:
        memory: The memory, between two steps.
        rows_in_use: Rows that belong to requests.
    """
    scrub_free_slots(memory.slot_allocator)
    kv_blocks = memory.kv_block_allocator
    # The dummy block counts as free: padding is written to it.
    is_free = np.asarray(kv_blocks.block_ref_counts) == 0
    is_free &= np.asarray(kv_blocks.block_hashes) < 0
    if memory.kv_cache is not None:
        memory.kv_cache[:, :, np.flatnonzero(is_free).tolist()] = 0
    per_request = memory.config.live_rows_per_request
    unused = np.setdiff1d(np.arange(memory.max_requests), list(rows_in_use))
    rows = unused[:, None] * per_request + np.arange(per_request)
    memory.live_states.zero_(rows.ravel().tolist())
    memory.step_buffers.zero_()
