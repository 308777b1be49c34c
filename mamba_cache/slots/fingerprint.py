"""A digest of bookkeeping, by which processes prove that they have decided alike."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from mamba_cache.slots.policies import SlotEvictionPolicy
from mamba_cache.slots.pool import SlotPool

__all__ = ["fingerprint_of", "slot_fingerprint"]


def fingerprint_of(*parts: npt.ArrayLike) -> int:
    """Digests numbers; equal ones give equal results in every process.

    Args:
        parts: Integers, or arrays or lists of them. Where one part ends and the next begins counts.

    Returns:
        From 0 to 2**63 - 1, so that it fits an int64 tensor.
    """
    digest = blake2b(digest_size=8)
    for part in parts:
        array = np.asarray(part, np.int64)
        digest.update(array.size.to_bytes(8, "little"))
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def slot_fingerprint(pool: SlotPool, policy: SlotEvictionPolicy) -> int:
    """Digests all that decides who gets which slot next, and what is found.

    Linear in the slots and hashes, not in the KV blocks: of ``block_to_slot`` it reads what the
    slots point at. Counters that decide nothing are left out.
    """
    cached = pool.slot_to_block >= 0
    return fingerprint_of(
        pool.slot_to_block,
        pool.block_to_slot.take(pool.slot_to_block[cached]),
        pool.pin_counts[cached],
        pool.free_slots[: pool.free_count],
        _by_key(pool.reserved),
        _by_key(pool.hash_to_block_id),
        policy.state(),
    )


def _by_key(table: Mapping[int, int]) -> npt.NDArray[Any]:
    """Returns [2, n] int64: keys in ascending order, and their values."""
    pairs = np.array([list(table.keys()), list(table.values())], np.int64)
    return pairs[:, pairs[0].argsort()]
