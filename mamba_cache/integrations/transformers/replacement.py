"""Functions of other code that are replaced for the length of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from threading import RLock, get_ident
from typing import Any

__all__ = ["ABSENT", "intercepted", "original", "replaced"]

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
    # In which threads it is replaced, and by what, the latest last.
    users: list[tuple[int, _StandIn | None]] = field(default_factory=list)


_now: dict[tuple[int, str], _Replacement] = {}
"""All that is replaced now, in whatever thread."""

_lock = RLock()


@contextmanager
def replaced(
    owner: Any, name: str, replace: Callable[[Any], Any], stand_in: _StandIn | None = None
) -> Iterator[None]:
    """Replace ``owner.name`` by what ``replace`` makes of it while the body runs.

    Other threads may do the same to the same attribute meanwhile: the first one replaces it, and
    the last one puts it back. So the substitute must do for all of them.
    """
    key, user = (id(owner), name), (get_ident(), stand_in)
    with _lock:
        now = _now.get(key)
        if now is None:
            before, is_own = getattr(owner, name), name in vars(owner)
            now = _now[key] = _Replacement(owner, name, before, is_own, replace(before))
        now.users.append(user)
        if getattr(owner, name) is not now.substitute:
            setattr(owner, name, now.substitute)
    try:
        yield
    finally:
        with _lock:
            now.users.remove(user)
            if not now.users:
                if now.is_own:
                    setattr(owner, name, now.original)
                elif name in vars(owner):
                    delattr(owner, name)  # uncovers what the class has
                del _now[key]


def intercepted(owner: Any, name: str, stand_in: _StandIn) -> AbstractContextManager[None]:
    """Have ``stand_in`` take this thread's calls of a function ``owner.name`` in a ``with`` block.

    It is given the function, then the arguments. The calls of other threads go to the function.
    """
    return replaced(owner, name, partial(_dispatching, (id(owner), name)), stand_in)


def _dispatching(key: tuple[int, str], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        now, own = _now.get(key), get_ident()
        for thread, stand_in in reversed([*now.users]) if now else ():
            if thread == own and stand_in is not None:
                return stand_in(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


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
