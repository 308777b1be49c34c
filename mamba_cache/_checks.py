"""Checks of arguments, shared by all packages."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any, Final

from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    InvariantError,
    MambaCacheError,
)

__all__ = [
    "INT32_MAX",
    "INT64_MAX",
    "as_ids",
    "as_ints",
    "as_items",
    "check_choice",
    "check_clock",
    "check_hashable",
    "check_int",
    "check_kind",
    "check_names",
    "check_number",
    "check_room",
    "check_secret",
    "is_unreadable",
    "require_all",
]

INT32_MAX: Final = 2**31 - 1
"""Maximum number of blocks, slots, rows and tokens: tables of them are int32."""

INT64_MAX: Final = 2**63 - 1
"""The largest hash id."""

_ONLY_INTS: Final = frozenset({int})
_PLAIN: Final = (list, tuple)

_UNREADABLE: Final = (TypeError, ValueError, RuntimeError, NotImplementedError)


def check_int(
    name: str, value: object, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return ``value`` as a plain int."""
    number = value if type(value) is int else _as_int(value)
    too_low = number is not None and minimum is not None and number < minimum
    too_high = number is not None and maximum is not None and number > maximum
    if number is None or too_low or too_high:
        allowed = _range_of_ints(minimum, maximum)
        raise InvalidArgumentError(f"{name} must be {allowed}, got {value!r}")
    return number


def check_number(name: str, value: Any, *, maximum: float) -> float:
    """Return ``value`` as a float."""
    # Compared before the conversion: an int may be too large for a float.
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= maximum:
        raise InvalidArgumentError(f"{name} must be a number in [0, {maximum:g}], got {value!r}")
    return float(value)


def check_room(
    num_bytes: int,
    settings: Mapping[str, object],
    *,
    room: int | None = None,
    place: str = "this machine",
) -> None:
    """Check that ``num_bytes`` for these settings fit into ``room``, or the machine's memory."""
    if room is None:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > room:
        given = " and ".join(
            f"{name}={each}" for name, each in settings.items() if each is not None
        )
        raise BudgetError(
            f"{given} must fit into the memory of {place}: {num_bytes / 2**30:,.2f} GiB are "
            f"needed, and {room / 2**30:,.2f} GiB are there"
        )


def require_all(statements: Mapping[str, bool], what: str = "does not hold") -> None:
    """Raise ``InvariantError`` with the statements that are false, if any."""
    breaches = [statement for statement, holds in statements.items() if not holds]
    if breaches:
        raise InvariantError(f"{what}: {'; '.join(breaches)}")


def check_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Return ``value``, one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {list(choices)}, got {value!r}")
    return value


def check_clock(clock: object) -> None:
    """Check that ``clock`` is callable."""
    if not callable(clock):
        raise InvalidArgumentError(f"clock must return seconds when it is called, got {clock!r}")


def check_secret(name: str, secret: object) -> bytes | None:
    """Return ``secret``, which is bytes that are not empty, or None."""
    if secret is None or (isinstance(secret, bytes) and secret):
        return secret
    got = "none" if isinstance(secret, bytes) else type(secret).__name__
    raise InvalidArgumentError(f"{name} must be bytes, at least one of them, or None, got {got}")


def check_names(name: str, values: Any) -> tuple[str, ...]:
    """Return ``values`` as a tuple of different names, at least one."""
    names = [] if isinstance(values, (str, bytes)) else as_items(name, values, "names")
    if not names or not all(isinstance(one, str) and one for one in names):
        raise InvalidArgumentError(f"{name} must be one or more names, got {values!r}")
    if len(set(names)) < len(names):
        raise InvalidArgumentError(f"{name} must be different names, got {values!r}")
    return tuple(names)


def check_hashable(name: str, value: object) -> None:
    """Check that ``value`` is hashable, for which a tuple's items must be hashable."""
    try:
        hash(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} must be hashable, got {value!r}") from None


def check_kind(name: str, value: object, kind: type) -> Any:
    """Return ``value``, an instance of ``kind``."""
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{name} must be a {kind.__name__}, got {value!r}")
    return value


def as_items(name: str, values: Any, what: str) -> list[Any]:
    """Return the items of a collection of any kind."""
    try:
        return list(values)
    except Exception as error:
        if is_unreadable(error):
            raise InvalidArgumentError(
                f"{name} must be a collection of {what}, got {values!r}"
            ) from error
        raise


def as_ints(name: str, values: Iterable[Any]) -> list[int]:
    """Return ints of any kind as a list of plain ints."""
    if type(values) in _PLAIN and _ONLY_INTS.issuperset(map(type, values)):
        return list(values)
    try:
        ints = list(values.tolist() if hasattr(values, "tolist") else values)
    except Exception as error:
        if is_unreadable(error):
            raise InvalidArgumentError(
                f"{name} must be ints in one dimension, got {values!r}"
            ) from error
        raise
    if _ONLY_INTS.issuperset(map(type, ints)):
        return ints
    for position, item in enumerate(ints):
        number = _as_int(item)
        if number is None:
            raise InvalidArgumentError(f"{name} must be ints, got {item!r}")
        ints[position] = number
    return ints


def as_ids(
    name: str,
    values: Iterable[Any],
    stop: int,
    *,
    start: int = 0,
    error: type[MambaCacheError] = InvalidArgumentError,
) -> list[int]:
    """Return ints of any kind as a list of plain ints, each in [start, stop)."""
    ids = as_ints(name, values)
    if ids and (min(ids) < start or max(ids) >= stop):
        wrong = [number for number in ids if not start <= number < stop]
        raise error(f"{name} must be in [{start}, {stop}), got {wrong}")
    return ids


def is_unreadable(error: Exception) -> bool:
    """Return whether an error means that an array or tensor cannot be read as the given type.

    Such an array has too many values, none, or no data. Errors of other classes, such as that of
    short memory, do not mean that the value is wrong.
    """
    return type(error) in _UNREADABLE


def _range_of_ints(minimum: int | None, maximum: int | None) -> str:
    if maximum is not None:
        return f"an int in [{minimum}, {maximum}]"
    return "an int" if minimum is None else f"an int >= {minimum}"


def _as_int(value: Any) -> int | None:
    """Return ``value`` as a plain int, or None if it is no int."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except Exception as error:
        if is_unreadable(error):
            return None
        raise
