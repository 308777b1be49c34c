"""Ids as embedders hand them over, read and checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mamba_cache._checks import as_ints
from mamba_cache.errors import InvalidArgumentError, UnknownBlockError

__all__ = ["as_block_ids", "as_hash_ids", "as_slots", "check_same_length"]

_MAX_HASH_ID = 2**63 - 1


def as_block_ids(values: Iterable[Any], num_blocks: int) -> list[int]:
    """Reads KV block ids, as ``as_ints`` does.

    Raises:
        InvalidArgumentError: One of them is no int.
        UnknownBlockError: One of them is outside [0, num_blocks).
    """
    ids = as_ints("block ids", values)
    if ids and not 0 <= min(ids) <= max(ids) < num_blocks:
        outside = [block_id for block_id in ids if not 0 <= block_id < num_blocks]
        raise UnknownBlockError(f"block ids must be in [0, {num_blocks}), got {outside}")
    return ids


def as_slots(values: Iterable[Any], max_slots: int) -> list[int]:
    """Reads slots, as ``as_ints`` does.

    Raises:
        InvalidArgumentError: One of them is no int, or outside [0, max_slots).
    """
    slots = as_ints("slots", values)
    if slots and not 0 <= min(slots) <= max(slots) < max_slots:
        outside = [slot for slot in slots if not 0 <= slot < max_slots]
        raise InvalidArgumentError(f"slots must be in [0, {max_slots}), got {outside}")
    return slots


def as_hash_ids(values: Iterable[Any]) -> list[int]:
    """Reads hash ids, as ``as_ints`` does; those that are not positive mean "none".

    Raises:
        InvalidArgumentError: One of them is no int, or does not fit an int64.
    """
    hash_ids = as_ints("hashes", values)
    if hash_ids and max(hash_ids) > _MAX_HASH_ID:
        raise InvalidArgumentError(f"a hash id must be at most {_MAX_HASH_ID}, got {max(hash_ids)}")
    return hash_ids


def check_same_length(**lists: list[int]) -> None:
    """Checks that lists which are read side by side are equally long.

    Raises:
        InvalidArgumentError: They are not.
    """
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidArgumentError(f"these must be equally long: {lengths}")
