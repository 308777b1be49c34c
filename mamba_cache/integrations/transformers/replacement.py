"""Functions of other code that are replaced for the length of a call."""

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
"""What ``original`` returns of an attribute that is only there to replace that of a class."""


@dataclass(slots=True)
class _Replacement:
    """An attribute that is replaced now."""

    owner: Any
    name: str
    original: Any
    is_own: bool  # it was an attribute of the object itself, not of its class
    substitute: Any
    # Replacements, latest last: the identity of the user, the thread, and the substitute.
    users: dict[int, tuple[object, int, _StandIn | None]] = field(default_factory=dict)


_now: dict[tuple[int, str], _Replacement] = {}
"""All that is replaced now, in whatever thread. An entry is there for longer than its substitute,
so that ``put_back`` finds what a call left behind that an interrupt broke off."""

_lock = RLock()


@contextmanager
def replaced(
    user: object,
    owner: Any,
    name: str,
    replace: Callable[[Any], Any],
    stand_in: _StandIn | None = None,
) -> Iterator[None]:
    """Replace ``owner.name`` by what ``replace`` makes of it while the body runs.

    Other threads may do the same to the same attribute meanwhile: the first one replaces it, and
    the last one puts it back. So the substitute must do for all of them. ``user`` is who replaces
    it, once at a time.
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
    """Have ``stand_in`` take this thread's calls of a function ``owner.name`` in a ``with`` block.

    It is given the function, then the arguments. The calls of other threads go to the function.
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
    """Undo what calls of ``user`` replaced that were broken off before they could undo it."""
    for key in list(_now):
        _release(key, user)


def original(namespace: Any, name: str) -> Any:
    """Return what an attribute would be if no call had replaced it.

    ``namespace`` is where the attributes of an object lie, such as ``vars(owner)``. An attribute
    that is only there to stand before that of the class is ``ABSENT``.
    """
    if _now:  # another thread may be about to replace something else
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
            delattr(now.owner, now.name)  # uncovers what the class has
        del _now[key]
