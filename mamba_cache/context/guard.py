"""One call at a time, and none after one that broke off and left what cannot be proved right."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any, TypeVar, cast

from mamba_cache.errors import ConcurrentUseError, MambaCacheError, PoisonedError

__all__ = ["CallGuard", "exclusive", "healing"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Call = tuple[int, str]


class CallGuard:
    """Knows which call runs, and why no further one may.

    A call is guilty until proved innocent: from its beginning the object counts as poisoned, and
    only a call that ends well, or that is found to have left everything right, takes that back. So
    it does not matter where an interrupt strikes.

    Args:
        check: Proves the object's books; raises if they contradict each other.
    """

    __slots__ = ("_check", "_culprit", "_reason", "_running")

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self._culprit = ""
        self._reason = ""
        # At most one entry. A dict, because setdefault is one step that no thread can divide.
        self._running: dict[str, _Call] = {}

    def enter(self, call: _Call, *, heals: bool) -> None:
        """Begin a call.

        Args:
            call: The thread and the name of the call, in a tuple of its own.
            heals: Whether the call makes everything new, so that it may follow any other.

        Raises:
            ConcurrentUseError: Another call is running.
            PoisonedError: An earlier call broke off half-way.
        """
        running = self._running.setdefault("call", call)
        if running is not call:
            where = "from within it" if running[0] == call[0] else "by another thread"
            raise ConcurrentUseError(
                f"{call[1]} was called {where} while {running[1]} was running: one thread uses a "
                "context at a time, and callbacks do not call it"
            )
        if self._culprit and not heals:
            why = self._reason or "was interrupted"
            raise PoisonedError(f"{self._culprit} {why}; reset() makes everything new")
        self._culprit, self._reason = call[1], ""

    def succeed(self) -> None:
        """Note that the running call has done all of its work."""
        self._culprit = ""

    def fail(self, call: _Call, error: BaseException, *, heals: bool) -> None:
        """Judge what a call that raised has left.

        Args:
            call: As given to ``enter``.
            error: What it raised. An error of this package means that nothing was changed.
            heals: As given to ``enter``; such a call must end well.
        """
        if self._running.get("call") is not call or isinstance(error, PoisonedError) or heals:
            return  # what was so before stays so
        try:
            if _is_foreign(error):
                self._check()
        except Exception as breach:
            self._reason = f"broke off with {error!r} and left a contradiction ({breach})"
        else:
            self._culprit = ""

    def leave(self, call: _Call) -> None:
        """End a call, if it is the one that runs."""
        if self._running.get("call") is call:
            del self._running["call"]


def exclusive(method: _Method) -> _Method:
    """Make a method run alone, and not after a call of the object that broke off.

    The object has a ``CallGuard`` as ``_guard``.

    An exception that is not the package's own is followed by a proof of the object's books. If
    that fails, or is interrupted itself, every later call raises ``PoisonedError``.
    """
    return _guard(method, heals=False)


def healing(method: _Method) -> _Method:
    """Like ``exclusive``, for a method that makes everything new, whatever happened before."""
    return _guard(method, heals=True)


def _guard(method: _Method, *, heals: bool) -> _Method:
    name = method.__name__.lstrip("_")

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard: CallGuard = self._guard
        call = (get_ident(), name)
        try:
            try:
                guard.enter(call, heals=heals)
                result = method(self, *args, **kwargs)
                guard.succeed()
                return result
            except BaseException as error:
                guard.fail(call, error, heals=heals)
                raise
            finally:
                guard.leave(call)
        finally:
            guard.leave(call)  # once more: an interrupt may have struck the line above

    return cast(_Method, run)


def _is_foreign(error: BaseException | None) -> bool:
    """Say whether an error, or one that was being handled as it was raised, is not the package's.

    An error of the package that a handler raises while it takes things back proves nothing; one
    that is raised ``from`` another is a translation of it.
    """
    while isinstance(error, MambaCacheError):
        error = None if error.__suppress_context__ else error.__context__
    return error is not None
