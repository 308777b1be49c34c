"""Checks of arguments that every room makes."""

from __future__ import annotations

import operator

from mamba_cache.errors import InvalidArgumentError

__all__ = ["check_int"]


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
