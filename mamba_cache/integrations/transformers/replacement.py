"""Functions of other code that are replaced for the length of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["replaced"]

_Function = Callable[..., Any]


@dataclass(slots=True)
class _Replacement:
    """An attribute that is replaced now.

    Attributes:
        original: What was there.
        is_own: It was an attribute of the object itself, not of its class.
        users: How many calls want it replaced.
    """

    original: _Function
    is_own: bool
    users: int = 0


_lock = threading.Lock()
_now: dict[tuple[int, str], _Replacement] = {}


@contextmanager
def replaced(owner: Any, name: str, replace: Callable[[_Function], _Function]) -> Iterator[None]:
    """Replace ``owner.name`` while the body runs.

    Other threads may do the same to the same attribute meanwhile: the first one replaces it, and
    the last one puts it back. So what stands in its place must do for all of them, and find out by
    itself for whom it is called.

    Args:
        owner: A module, or an object.
        name: Of a function.
        replace: Makes what stands in its place, given the function itself.
    """
    key = id(owner), name
    with _lock:
        if key not in _now:
            now = _now[key] = _Replacement(getattr(owner, name), name in vars(owner))
            setattr(owner, name, replace(now.original))
        _now[key].users += 1
    try:
        yield
    finally:
        with _lock:
            now = _now[key]
            now.users -= 1
            if not now.users:
                del _now[key]
                if now.is_own:
                    setattr(owner, name, now.original)
                else:
                    delattr(owner, name)  # uncovers what the class has
