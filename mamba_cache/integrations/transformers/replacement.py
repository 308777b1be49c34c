"""Functions of other code that are replaced for the length of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["put_back", "replaced"]


@dataclass(slots=True)
class _Replacement:
    """An attribute that is replaced now.

    Attributes:
        owner: Whose it is.
        original: What was there.
        is_own: It was an attribute of the object itself, not of its class.
        substitute: What stands in its place.
        users: Who wants it replaced, by identity.
    """

    owner: Any
    original: Any
    is_own: bool
    substitute: Any
    users: dict[int, object] = field(default_factory=dict)


_lock = threading.Lock()
_now: dict[tuple[int, str], _Replacement] = {}


@contextmanager
def replaced(user: object, owner: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``owner.name`` while the body runs.

    Other threads may do the same to the same attribute meanwhile: the first one replaces it, and
    the last one puts it back. So what stands in its place must do for all of them, and find out by
    itself for whom it is called.

    Args:
        user: Who does it, once at a time; ``put_back`` undoes what it left behind.
        owner: A module, or an object.
        name: The attribute's.
        replace: Makes what stands in its place, given what is there.
    """
    key = id(owner), name
    with _lock:
        if key not in _now:
            original = getattr(owner, name)
            _now[key] = _Replacement(owner, original, name in vars(owner), replace(original))
        now = _now[key]
        now.users[id(user)] = user
        if getattr(owner, name) is not now.substitute:
            setattr(owner, name, now.substitute)
    try:
        yield
    finally:
        _release(key, user)


def put_back(user: object) -> None:
    """Undo what calls of ``user`` replaced that were broken off before they could undo it."""
    for key in list(_now):
        _release(key, user)


def _release(key: tuple[int, str], user: object) -> None:
    with _lock:
        now = _now.get(key)
        if now is None or now.users.pop(id(user), None) is None or now.users:
            return
        if now.is_own:
            setattr(now.owner, key[1], now.original)
        elif key[1] in vars(now.owner):
            delattr(now.owner, key[1])  # uncovers what the class has
        del _now[key]
