"""Readers of options: what ``ArgumentParser`` takes as ``type``, with messages that help.

Each raises ``ArgumentTypeError`` for what it cannot read.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from difflib import get_close_matches
from math import isfinite

__all__ = ["UNLIMITED", "budget", "count", "one_of", "positive", "share", "wrong_name"]

UNLIMITED = "unlimited"
"""What stands for a budget that never runs out."""


def count(text: str) -> int:
    """Read a number of things, at least 1."""
    if not (text.isdecimal() and int(text)):
        raise ArgumentTypeError(f"must be an int >= 1, got {text!r}")
    return int(text)


def budget(text: str) -> int | None:
    """Read a budget; None if it never runs out."""
    if text == UNLIMITED:
        return None
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a number or {UNLIMITED!r}, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Read a number above 0."""
    number = _number(text)
    if number is None or number <= 0:
        raise ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def share(text: str) -> float:
    """Read a share, from 0 to 1."""
    number = _number(text)
    if number is None or not 0 <= number <= 1:
        raise ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return number


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Return what reads one of ``names``."""

    def read(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(wrong_name(text, names))
        return text

    return read


def wrong_name(given: str, names: Collection[str]) -> str:
    """Say what was allowed, and which of it may have been meant."""
    near = get_close_matches(given.lower(), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"must be one of {', '.join(names)}, got {given!r}{hint}"
