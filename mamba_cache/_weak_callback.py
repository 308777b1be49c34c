"""Callbacks to upper layers that hold their object by a weak reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

__all__ = ["weak_callback"]


def weak_callback(method: Callable[..., object]) -> Callable[..., Any]:
    """Return what calls a bound method while its object is there, and returns None afterwards.

    Objects that refer to each other go only when the garbage collector finds them, and until then
    so does the device memory of their tensors.
    """
    find_method = WeakMethod(method)

    def call(*args: Any) -> Any:
        found = find_method()
        return None if found is None else found(*args)

    return call
