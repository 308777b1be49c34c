"""The check that all settings of the engine share."""

from __future__ import annotations

from mamba_cache.errors import InvalidArgumentError

__all__ = ["check_int"]


def check_int(name: str, value: object, *, minimum: int) -> None:
    """Check that a setting is an int, no bool, and not too small.

    Raises:
        InvalidArgumentError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidArgumentError(f"{name} must be an int >= {minimum}, got {value!r}")
