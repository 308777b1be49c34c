"""The guard of an object's calls: one at a time, and none after one that broke off half-way.

Every object that owns slots, blocks or rows has one ``CallGuard``; what belongs to such an object
shares its guard, so that their bookkeeping is proved together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar, cast
from weakref import WeakMethod

from mamba_cache.errors import ConcurrentUseError, MambaCacheError, PoisonedError

__all__ = ["CallGuard", "exclusive", "guarded", "query"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Call = tuple[int, str]
_Errors = tuple[type[BaseException], ...]

_NO_CALL: _Call = (-1, "")

_SECONDS_BETWEEN_LOOKS = 0.002
"""How long one who waits for another thread's call sleeps before looking again."""


class CallGuard:
    """Knows which call runs, and why no further one may.

    A call counts as unproved from its beginning, and only a call that ends well, or that is found
    to have left everything right, takes that back. So it does not matter where an interrupt
    strikes.

    Args:
        check: A bound method of the object that proves its bookkeeping, by raising if it
            contradicts itself. Only a weak reference is kept.
        proves_changes: Whether consistent bookkeeping is proof enough after a change that broke
            off. It is for an object that also knows what should be held; for one that hands out
            blocks or slots and cannot know who has them, a change must end well.

    Attributes:
        is_changing: Set by the running call before its first change, and cleared when it has taken
            everything back; read only where consistent bookkeeping is not proof enough.
    """

    __slots__ = (
        "_before",
        "_check",
        "_done",
        "_proves_changes",
        "_reason",
        "_running",
        "_unproved",
        "is_changing",
    )

    def __init__(self, check: Callable[[], object], *, proves_changes: bool = True) -> None:
        self._check = WeakMethod(check)
        self._proves_changes = proves_changes
        self._unproved = ""
        self._reason = ""
        self._before = ("", "")
        self._done: _Call | None = None
        # At most one entry. A dict, because setdefault is one step that no thread can divide.
        self._running: dict[str, _Call] = {}
        self.is_changing = False

    def belongs_to(self, thing: object) -> bool:
        """Say whether the guard proves the bookkeeping of ``thing``."""
        check = self._check()
        return getattr(check, "__self__", None) is thing

    @property
    def is_busy(self) -> bool:
        """Whether a call of any thread is running."""
        return bool(self._running)

    def runs_here(self) -> bool:
        """Say whether a call of this thread is running."""
        return self._running.get("call", _NO_CALL)[0] == get_ident()

    def enter(self, call: _Call, *, renews: bool = False, waits: bool = False) -> None:
        """Begin a call.

        Args:
            call: The thread and the name of the call, in a tuple of its own.
            renews: Whether the call makes everything new, so that it may follow any other.
            waits: Whether to wait for a call of another thread.

        Raises:
            ConcurrentUseError: Another call is running.
            PoisonedError: An earlier call broke off half-way.
        """
        while (running := self._running.setdefault("call", call)) is not call:
            if not _is_running(running):  # interrupted twice, it never came to its end
                self._running["call"] = call
            elif waits and running[0] != call[0]:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            else:
                raise _concurrent_use(call, running)
        if self._unproved and not renews:
            raise self._poisoned()
        self._done, self.is_changing = None, False
        self._before = self._unproved, self._reason
        self._unproved, self._reason = call[1], ""

    def succeed(self, call: _Call) -> None:
        """Record that the running call has done all of its work."""
        self._done = call
        self._unproved = ""

    def lose(self, call: _Call) -> None:
        """Record that what a call returned is lost, if it had come to its end.

        Who cannot know what was handed out must have it back, and only a reset does that.
        """
        if self._done is call and self.is_changing and not self._proves_changes:
            self._unproved, self._reason = call[1], "was interrupted when it had done its work"

    def fail(self, call: _Call, error: BaseException, *, renews: bool, trusts: _Errors) -> None:
        """Judge what a call that raised has left.

        Args:
            call: As given to ``enter``.
            error: What it raised.
            renews: As given to ``enter``; such a call must end well.
            trusts: Errors of the package which mean that nothing was changed.
        """
        if self._running.get("call") is not call:
            return
        is_trusted = isinstance(error, trusts) and not _is_foreign(error)
        if renews:
            if is_trusted and not self.is_changing and not self._proves_changes:
                self._unproved, self._reason = self._before  # refused: what was so before stays so
            return
        if isinstance(error, PoisonedError):  # of the object itself, or of one that it uses
            self._reason = self._reason or f"broke off with {error!r}"
            return
        if self.is_changing and not self._proves_changes:
            self._reason = f"broke off with {error!r} in the middle of a change"
            return
        try:
            if not is_trusted:
                self._prove()
        except Exception as breach:
            self._reason = f"broke off with {error!r} and left a contradiction ({breach})"
        else:
            self._unproved = ""

    def leave(self, call: _Call) -> None:
        """End a call, if it is the one that runs."""
        if self._running.get("call") is call:
            del self._running["call"]

    def refuse_to_read(self, name: str) -> None:
        """Refuse a query that comes while no call of its thread runs, and a call is unproved.

        Args:
            name: The query.

        Raises:
            ConcurrentUseError: A call of another thread is running.
            PoisonedError: An earlier call broke off half-way.
        """
        running = self._running.get("call")
        if running is not None and _is_running(running):
            raise _concurrent_use((get_ident(), name), running)
        raise self._poisoned()

    def _prove(self) -> None:
        check = self._check()
        if check is None:
            raise ReferenceError("what it belonged to is gone")
        check()

    def _poisoned(self) -> PoisonedError:
        why = self._reason or "was interrupted"
        return PoisonedError(f"{self._unproved} {why}; reset() makes everything new")


def guarded(
    *,
    trusts: _Errors = (MambaCacheError,),
    nests: bool = False,
    renews: bool = False,
    waits: bool = False,
) -> Callable[[_Method], _Method]:
    """Make a method run alone, and not after a call of the object that broke off.

    The object has a ``CallGuard`` as ``_guard``. An exception that is not trusted is followed by a
    proof of the object's bookkeeping. If that fails, or is interrupted itself, every later call
    raises ``PoisonedError``.

    Args:
        trusts: Errors of the package that the method raises only before it changes anything, or
            after it has taken everything back.
        nests: Whether the method may be called from within another call of the guard by the same
            thread, as a part of it; otherwise that is refused. A guard that is None lets all pass:
            the object is part of another one that is guarded.
        renews: Whether the method makes everything new, whatever happened before. That counts
            only where the guard is the object's own.
        waits: Whether to wait for a call of another thread, instead of refusing.
    """

    def decorate(method: _Method) -> _Method:
        name = method.__name__.lstrip("_")

        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard: CallGuard = self._guard
            if nests and (guard is None or (guard._unproved and guard.runs_here())):
                return method(self, *args, **kwargs)
            is_new = renews and guard.belongs_to(self)
            call = (get_ident(), name)
            try:
                try:
                    guard.enter(call, renews=is_new, waits=waits)
                    result = method(self, *args, **kwargs)
                    guard.succeed(call)
                    return result
                except BaseException as error:
                    guard.fail(call, error, renews=is_new, trusts=trusts)
                    raise
                finally:
                    guard.leave(call)
            except BaseException:
                guard.leave(call)  # once more: an interrupt may have struck the line above
                guard.lose(call)
                raise

        decorated = cast(Any, run)
        _RUNNERS.add(decorated.__code__)
        return cast(_Method, decorated)

    return decorate


exclusive = guarded()
"""Decorates a method that runs alone, and not after a call of the object that broke off."""


def query(method: _Method) -> _Method:
    """Make a method that changes nothing answer only when what it reads can be believed.

    It may be called from within a call of the same thread.
    """

    @wraps(method)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard: CallGuard | None = self._guard
        if guard is not None and guard._unproved and not guard.runs_here():
            guard.refuse_to_read(method.__name__)
        return method(self, *args, **kwargs)

    return cast(_Method, ask)


_RUNNERS: set[object] = set()
"""The code of what ``guarded`` makes, by which its frames are known."""


def _is_running(call: _Call) -> bool:
    """Say whether the frame of a call is on its thread's stack. Slow: only for calls that meet."""
    frame: FrameType | None = sys._current_frames().get(call[0])
    while frame is not None:
        if frame.f_code in _RUNNERS and frame.f_locals.get("call") is call:
            return True
        frame = frame.f_back
    return False


def _concurrent_use(call: _Call, running: _Call) -> ConcurrentUseError:
    where = "from within it" if running[0] == call[0] else "by another thread"
    return ConcurrentUseError(
        f"{call[1]} was called {where} while {running[1]} was running: one thread uses it "
        "at a time, and callbacks do not call it"
    )


def _is_foreign(error: BaseException | None) -> bool:
    """Say whether an error, or one that was being handled as it was raised, is not the package's.

    An error of the package that a handler raises while it takes things back proves nothing; one
    that is raised ``from`` another is a translation of it.
    """
    while isinstance(error, MambaCacheError):
        error = None if error.__suppress_context__ else error.__context__
    return error is not None
