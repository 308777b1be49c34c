"""Functions of other code that are replaced for the length of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mamba_cache._guard import CallGuard, guarded

__all__ = ["ABSENT", "original", "put_back", "replaced"]

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
    users: dict[int, object] = field(default_factory=dict)  # who wants it replaced, by identity


class _Replacements:
    """All that is replaced now, in whatever thread.

    A call that an interrupt breaks off leaves an attribute replaced or not, and its entry says how
    to put it back: ``put_back`` does so, or the next call for the same attribute goes on with it.
    """

    def __init__(self) -> None:
        self._now: dict[tuple[int, str], _Replacement] = {}
        self._guard = CallGuard(self)

    @guarded(waits=True)
    def add(self, user: object, owner: Any, name: str, replace: Callable[[Any], Any]) -> None:
        """Replace an attribute for one more user."""
        key = id(owner), name
        if key not in self._now:
            original = getattr(owner, name)
            is_own = name in vars(owner)
            self._now[key] = _Replacement(owner, name, original, is_own, replace(original))
        now = self._now[key]
        now.users[id(user)] = user
        if getattr(owner, name) is not now.substitute:
            setattr(owner, name, now.substitute)

    @guarded(waits=True)
    def release(self, key: tuple[int, str], user: object) -> None:
        """Put an attribute back, unless somebody else still wants it replaced."""
        now = self._now.get(key)
        if now is None:
            return
        now.users.pop(id(user), None)
        if now.users:
            return
        if now.is_own:
            setattr(now.owner, key[1], now.original)
        elif key[1] in vars(now.owner):
            delattr(now.owner, key[1])  # uncovers what the class has
        del self._now[key]

    def original(self, namespace: Any, name: str) -> Any:
        """Return what an attribute would be if no call had replaced it.

        ``namespace`` is where the attributes of an object lie, such as ``vars(owner)``. An
        attribute that is only there to stand before that of the class is ``ABSENT``.
        """
        if self._now:  # another thread may be about to replace something else
            for now in list(self._now.values()):
                if now.name == name and vars(now.owner) is namespace:
                    return now.original if now.is_own else ABSENT
        return namespace[name]

    def put_back(self, user: object) -> None:
        """Undo what calls of ``user`` replaced that were broken off before they could undo it."""
        for key in list(self._now):
            self.release(key, user)


_replacements = _Replacements()
original = _replacements.original
put_back = _replacements.put_back


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
    try:
        _replacements.add(user, owner, name, replace)
        yield
    finally:
        _replacements.release((id(owner), name), user)
