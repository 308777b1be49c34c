"""What must hold in the books of a slot pool at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mamba_cache.errors import InvariantError

if TYPE_CHECKING:
    from mamba_cache.slots.pool import SlotPool

__all__ = ["check_slot_pool"]


def check_slot_pool(pool: SlotPool) -> None:
    """Checks that each slot is in one state, and that both directions of every tie agree.

    Raises:
        InvariantError: Something contradicts; the message says what.
    """
    _check_conservation(pool)
    _check_ties(pool)
    _check_hashes(pool)


def _check_conservation(pool: SlotPool) -> None:
    _require(0 <= pool.free_count <= pool.max_slots, f"free_count is {pool.free_count}")
    free = pool.free_slots[: pool.free_count].tolist()
    cached = np.flatnonzero(pool.slot_to_block >= 0).tolist()
    together = sorted([*free, *pool.reserved, *cached])
    _require(
        together == list(range(pool.max_slots)),
        f"{len(free)} free, {len(pool.reserved)} reserved and {len(cached)} cached slots are not "
        f"each of {pool.max_slots} slots once",
    )


def _check_ties(pool: SlotPool) -> None:
    cached = np.flatnonzero(pool.slot_to_block >= 0)
    back = pool.block_to_slot[pool.slot_to_block[cached]]
    _require(np.array_equal(back, cached), "slot_to_block and block_to_slot disagree")
    num_housed = int(np.count_nonzero(pool.block_to_slot >= 0))
    _require(num_housed == len(cached), f"{num_housed} blocks share {len(cached)} cached slots")
    blocks = list(pool.reserved.values())
    _require(len(set(blocks)) == len(blocks), "two slots are reserved for one block")
    _require(bool((pool.pin_counts >= 0).all()), "a slot has less than no readers")
    pinned = pool.pin_counts[pool.slot_to_block < 0]
    _require(not pinned.any(), "a slot that holds no state has readers")


def _check_hashes(pool: SlotPool) -> None:
    for hash_id, block_id in pool.hash_to_block_id.items():
        _require(
            pool.block_to_slot[block_id] >= 0 or pool.hashes.hash_of.get(block_id) == hash_id,
            f"hash {hash_id} finds block {block_id}, which lost its slot",
        )
    for block_id, hash_id in pool.hashes.hash_of.items():
        # An embedder may drop a hash by itself, but a hash cannot stand for two blocks.
        _require(
            pool.hash_to_block_id.get(hash_id, block_id) == block_id,
            f"block {block_id} is registered under hash {hash_id}, which finds another",
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
