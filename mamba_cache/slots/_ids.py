"""Ids as embedders hand them over, read and checked."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from mamba_cache.errors import InvalidArgumentError, UnknownBlockError

__all__ = ["as_block_ids", "as_ints", "as_slots", "check_same_length"]


def as_ints(name: str, values: Iterable[Any]) -> list[int]:
    """Reads integers out of a list, a set, a numpy array or a CPU tensor.

    Args:
        name: What the values are, for the message.
        values: Integers of any kind.

    Raises:
        InvalidArgumentError: One of them is no integer.
    """
    plain = values.tolist() if hasattr(values, "tolist") else values
    try:
        return [index(value) for value in plain]
    except TypeError:
        raise InvalidArgumentError(f"{name} must be integers, got {values!r}") from None


def as_block_ids(values: Iterable[Any], num_blocks: int) -> list[int]:
    """Reads KV block ids, as ``as_ints`` does.

    Raises:
        InvalidArgumentError: One of them is no integer.
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
        InvalidArgumentError: One of them is no integer, or outside [0, max_slots).
    """
    slots = as_ints("slots", values)
    if slots and not 0 <= min(slots) <= max(slots) < max_slots:
        outside = [slot for slot in slots if not 0 <= slot < max_slots]
        raise InvalidArgumentError(f"slots must be in [0, {max_slots}), got {outside}")
    return slots


def check_same_length(**lists: list[int]) -> None:
    """Checks that lists which are read side by side are equally long.

    Raises:
        InvalidArgumentError: They are not.
    """
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidArgumentError(f"these must be equally long: {lengths}")
