"""Checks of plain arguments that several modules of this room share."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from mamba_cache.errors import InvalidArgumentError

__all__ = ["as_ints", "check_int"]


def check_int(name: str, value: object, *, minimum: int) -> None:
    """Raise unless ``value`` is an int, not a bool, and not below ``minimum``.

    Raises:
        InvalidArgumentError: It is not; the message gives ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgumentError(f"{name} must be an int >= {minimum}, got {value!r}")


def as_ints(name: str, values: Iterable[Any]) -> list[int]:
    """Return ints, numpy ints, a numpy array or a torch tensor as a list of plain ints.

    Raises:
        InvalidArgumentError: ``values`` has not one dimension, or an item is no int.
    """
    items = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(items, Iterable) or isinstance(items, str):
        raise InvalidArgumentError(f"{name} must be ints in one dimension, got {values!r}")
    ints = list(items)
    for position, item in enumerate(ints):
        if type(item) is not int:
            ints[position] = _as_int(name, item)
    return ints


def _as_int(name: str, item: Any) -> int:
    if not isinstance(item, bool):
        try:
            return index(item)
        except TypeError:
            pass
    raise InvalidArgumentError(f"{name} must be ints, got {item!r}")
