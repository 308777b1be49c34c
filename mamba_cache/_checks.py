"""Checks of arguments that every room makes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, Final

from mamba_cache.errors import InvalidArgumentError

__all__ = ["INT32_MAX", "as_ints", "check_int", "check_number"]

INT32_MAX: Final = 2**31 - 1
"""The most of anything that is numbered: blocks, slots, rows, tokens. Tables of them are int32."""


def check_int(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` as a plain int.

    Args:
        name: What the caller calls the argument.
        value: An int, or what stands for one, such as a numpy integer; a bool does not.
        minimum: The least that is allowed.
        maximum: The most; None: no bound.

    Raises:
        InvalidArgumentError: It is no int, or out of range.
    """
    allowed = f"an int >= {minimum}" if maximum is None else f"an int in [{minimum}, {maximum}]"
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < minimum or (maximum is not None and number > maximum):
        raise InvalidArgumentError(f"{name} must be {allowed}, got {value!r}")
    return number


def check_number(name: str, value: Any, *, maximum: float) -> float:
    """Return ``value`` as a float.

    Args:
        name: What the caller calls the argument.
        value: A number >= 0 of any kind but bool.
        maximum: The most that is allowed.

    Raises:
        InvalidArgumentError: It is no number, or out of range.
    """
    # Compared before it is converted: no float is as large as an int may be.
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= maximum:
        raise InvalidArgumentError(f"{name} must be a number in [0, {maximum:g}], got {value!r}")
    return float(value)


def as_ints(name: str, values: Iterable[Any]) -> list[int]:
    """Return ints of any kind as a list of plain ints.

    Args:
        name: What the values are, for the message.
        values: One dimension of ints, numpy ints or both; or an array or tensor on any device.

    Raises:
        InvalidArgumentError: ``values`` has not one dimension, or an item is no int; a bool is not.
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
            return operator.index(item)
        except TypeError:
            pass
    raise InvalidArgumentError(f"{name} must be ints, got {item!r}")
