"""Replacing attributes of other code, such as a model's forward, during a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from threading import RLock, get_ident
from typing import Any

__all__ = ["ABSENT", "intercepted", "original", "put_back", "replaced"]

_StandIn = Callable[..., Any]

ABSENT = object()
"""``original`` returns this if the object itself has no such attribute without a replacement."""


@dataclass(slots=True)
class _Replacement:
    """A replaced attribute."""

    owner: Any
    name: str
    original: Any
    is_own: bool  # the original is an attribute of the object itself, not of its class
    substitute: Any
    # By id of the user, latest last: the user, its thread, and its stand-in.
    users: dict[int, tuple[object, int, _StandIn | None]] = field(default_factory=dict)


_now: dict[tuple[int, str], _Replacement] = {}
"""Replaced attributes of all threads. An entry is added before its substitute is set and removed
after it, so that ``put_back`` finds replacements left by an interrupted call."""

_lock = RLock()


@contextmanager
def replaced(
    user: object,
    owner: Any,
    name: str,
    replace: Callable[[Any], Any],
    stand_in: _StandIn | None = None,
) -> Iterator[None]:
    """Replace ``owner.name`` by the result of ``replace(owner.name)`` while the body runs.

    Several threads may replace the same attribute at once: the first sets its substitute, and the
    last restores the original. So one substitute must serve all of them. ``user`` identifies one
    replacement: the same user cannot replace an attribute twice at once.
    """
    try:
        with _lock:
            now = _now.get((id(owner), name))
            if now is None:
                before, is_own = getattr(owner, name), name in vars(owner)
                now = _Replacement(owner, name, before, is_own, replace(before))
                _now[id(owner), name] = now
            now.users[id(user)] = user, get_ident(), stand_in
            if getattr(owner, name) is not now.substitute:
                setattr(owner, name, now.substitute)
        yield
    finally:
        _release((id(owner), name), user)


def intercepted(
    user: object, owner: Any, name: str, stand_in: _StandIn
) -> AbstractContextManager[None]:
    """Redirect this thread's calls of ``owner.name`` to ``stand_in`` in a ``with`` block.

    ``stand_in`` gets the function, then the arguments. Calls of other threads are unchanged.
    """
    return replaced(user, owner, name, partial(_dispatching, (id(owner), name)), stand_in)


def _dispatching(key: tuple[int, str], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        now, own = _now.get(key), get_ident()
        for _, thread, stand_in in reversed([*now.users.values()]) if now else ():
            if thread == own and stand_in is not None:
                return stand_in(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def put_back(user: object) -> None:
    """Undo replacements by ``user`` that interrupted calls have left."""
    for key in list(_now):
        _release(key, user)


def original(namespace: Any, name: str) -> Any:
    """Return the value of an attribute without replacements.

    ``namespace`` has the attributes of an object, as ``vars(owner)`` does. Return ``ABSENT`` if the
    replacement hides an attribute of the class.
    """
    if _now:  # copied below, because other threads may change it
        for now in list(_now.values()):
            if now.name == name and vars(now.owner) is namespace:
                return now.original if now.is_own else ABSENT
    return namespace[name]


def _release(key: tuple[int, str], user: object) -> None:
    with _lock:
        now = _now.get(key)
        if now is None:
            return
        now.users.pop(id(user), None)
        if now.users:
            return
        if now.is_own:
            setattr(now.owner, now.name, now.original)
        elif now.name in vars(now.owner):
            delattr(now.owner, now.name)  # the attribute of the class is visible again
        del _now[key]
