"""The guard of an object's calls: one call at a time, and no call after an interrupted change.

docs/explanation/guarantees.md describes what callers can rely on. Every object that owns blocks,
slots or rows has one ``CallGuard``, which its parts share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakMethod, ref

from mamba_cache.errors import ConcurrentUseError, MambaCacheError, PoisonedError

if TYPE_CHECKING:
    from mamba_cache.events import Listeners

__all__ = ["CallGuard", "guarded", "mark_outside", "outside", "query", "weak_callback"]

_Method = TypeVar("_Method", bound=Callable[..., Any])

_OUTSIDE = "_mamba_cache_outside"  # the attribute that ``mark_outside`` sets


class CallGuard:
    """Records which call runs, and whether a change was interrupted.

    A call sets ``is_changing`` before its first change. Success clears it, and so does an error of
    the package, which is raised only if nothing is changed or all changes are undone. After any
    other exception every call raises ``PoisonedError`` until a reset.
    """

    def __init__(
        self,
        owner: object,
        *,
        take_back: Callable[[], object] | None = None,
        heal: Callable[[], object] | None = None,
    ) -> None:
        self._owner = ref(owner)
        self._take_back = None if take_back is None else weak_callback(take_back)
        self._heal = None if heal is None else weak_callback(heal)
        self._lock = RLock()  # a nested call of the same thread must raise, not deadlock
        self._call, self._thread, self._last_thread = "", 0, 0
        self.is_changing, self.poison = False, ""
        self.first: Callable[[], object] | None = None
        self.held: Listeners | None = None  # the listeners that an ending has held last

    @property
    def is_busy(self) -> bool:
        """Whether a call of any thread is running."""
        return bool(self._call)

    def enter(self, name: str, *, waits: bool) -> None:
        """Begin a call; ``waits``: wait for a call of another thread instead of raising."""
        if self._thread == get_ident():
            raise self._concurrent_use(name, "from within it")
        try:
            if not self._lock.acquire(blocking=waits):
                raise self._concurrent_use(name, "by another thread")
            self._call, self._thread = name, get_ident()
        except BaseException:
            if not self._call:
                with suppress(RuntimeError):  # another thread holds the lock
                    self._lock.release()  # an interrupt came right after acquiring it
            raise

    def check(self) -> None:
        """Raise ``PoisonedError`` if a change was interrupted."""
        if self.poison:
            raise PoisonedError(f"{self.poison}; reset() makes everything new")

    def tidy(self) -> None:
        """Call ``first`` before a read that is no guarded call, if that is safe.

        A read in a thread different from the last call's does not call it: a call that the other
        thread begins meanwhile would be refused.
        """
        is_free = not self.is_busy and not self.poison
        if self.first is not None and is_free and self._last_thread == get_ident():
            self.first()

    def fail(self, name: str, error: BaseException, *, is_nested: bool) -> None:
        """Poison the object if a call that raised was interrupted, and undo what it held."""
        is_poisoned = isinstance(error, PoisonedError) and not hasattr(error, _OUTSIDE)
        if is_poisoned or (self.is_changing and _may_have_interrupted(error)):
            self.poison = self.poison or f"{name} broke off with {error!r}"
        if self.held is not None and not is_nested:
            self.held.is_held = False  # if interrupted at the start of _Ending.__exit__
        if self._take_back is not None and not is_nested:
            with suppress(Exception), self.ending():  # the first error is raised
                self._take_back()

    def ending(self, listeners: Listeners | None = None, *, renews: bool = False) -> _Ending:
        """Guard a part of a call in which every exception poisons the object."""
        return _Ending(self, listeners, renews)

    def _concurrent_use(self, name: str, where: str) -> ConcurrentUseError:
        return ConcurrentUseError(
            f"{name} was called {where} while {self._call or 'another call'} was running: one "
            "thread uses it at a time, and callbacks do not call it"
        )


class _Ending:
    """The context manager of ``CallGuard.ending``; a generator would take twice as long."""

    __slots__ = ("_guard", "_listeners", "_renews", "_was_held")

    def __init__(self, guard: CallGuard, listeners: Listeners | None, renews: bool) -> None:
        self._guard, self._listeners, self._renews = guard, listeners, renews

    def __enter__(self) -> None:
        guard, listeners = self._guard, self._listeners
        guard.is_changing = True
        if listeners is not None:
            guard.held = listeners
            self._was_held, listeners.is_held = listeners.is_held, True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        guard, listeners = self._guard, self._listeners
        if listeners is not None:
            listeners.is_held = self._was_held
        if error is not None:
            guard.poison = guard.poison or f"{guard._call} broke off with {error!r}"
            return
        guard.is_changing = False
        if self._renews:
            guard.poison = ""
        if listeners is not None and listeners.waiting:
            listeners.tell()


def guarded(
    *, nests: bool = False, changes: bool = False, renews: bool = False, waits: bool = False
) -> Callable[[_Method], _Method]:
    """Make a method run alone, and refuse it after an interrupted change.

    ``nests``: other calls of the same thread may call it. ``changes``: it changes from its start.
    ``renews``: it runs after interrupted changes, too. ``waits``: it waits for other threads.
    """

    def decorate(method: _Method) -> _Method:
        name = method.__name__.lstrip("_")

        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            guard: CallGuard = self._guard
            is_nested = nests and guard._thread == get_ident()
            was_changing = is_nested and guard.is_changing
            if was_changing and not renews:  # the outer call handles all exceptions
                return method(self, *args, **kwargs)
            if not is_nested:
                guard.enter(name, waits=waits)
            try:
                if guard.poison and not is_nested and not (renews and guard._owner() is self):
                    (guard._heal or guard.check)()
                guard.is_changing = was_changing or changes
                if guard.first is not None and not is_nested and not renews:
                    guard.first()
                return method(self, *args, **kwargs)
            except BaseException as error:
                guard.fail(name, error, is_nested=is_nested)
                raise
            finally:
                guard.is_changing = was_changing
                if not is_nested:
                    # Inline: an interrupt may come at the start of a function.
                    guard._call, guard._thread, guard._last_thread = "", 0, guard._thread
                    guard._lock.release()

        return cast(_Method, run)

    return decorate


def query(method: _Method) -> _Method:
    """Refuse a method that only reads, during another thread's call and after interrupted changes.

    It may be called within a call of the same thread.
    """

    @wraps(method)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard: CallGuard = self._guard
        if guard._thread != get_ident():
            if guard.is_busy:
                raise guard._concurrent_use(method.__name__, "by another thread")
            guard.check()
            guard.tidy()
        return method(self, *args, **kwargs)

    return cast(_Method, ask)


class _Outside:
    """Marks exceptions of callbacks and launches as outside of changes, which the caller undoes."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            mark_outside(error)


outside = _Outside()


def mark_outside(error: BaseException) -> None:
    """Mark an exception as raised outside of all changes."""
    setattr(error, _OUTSIDE, True)


def _may_have_interrupted(error: BaseException | None) -> bool:
    """Return whether an exception may have interrupted a change.

    An error of the package that was raised while handling another exception counts like the other
    exception. An error that was raised ``from`` another one only translates it.
    """
    if hasattr(error, _OUTSIDE):
        return False
    while isinstance(error, MambaCacheError):
        error = None if error.__suppress_context__ else error.__context__
    return error is not None


def weak_callback(method: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object exists, and then returns None.

    A strong reference would make a cycle, whose device memory only the garbage collector frees.
    """
    find_method = WeakMethod(method)

    def call(*args: Any) -> Any:
        found = find_method()
        return None if found is None else found(*args)

    return call
