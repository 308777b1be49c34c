"""Callbacks to upper layers that hold their object by a weak reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

__all__ = ["WeakCallback"]


class WeakCallback:
    """Calls a bound method as long as its object is there, and does nothing afterwards.

    Objects that refer to each other go only when the garbage collector finds them, and until then
    so does the device memory of their tensors.
    """

    __slots__ = ("_method",)

    def __init__(self, method: Callable[..., object]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        """Call the method; return None if its object is gone."""
        method = self._method()
        return None if method is None else method(*args)
