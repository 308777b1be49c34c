"""Calls to observers: all of them are called, whatever one of them raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mamba_cache.errors import InvalidArgumentError, PoisonedError

__all__ = ["call_all", "check_observer"]


def check_observer(observer: object) -> None:
    """Check that an observer can be called.

    Raises:
        InvalidArgumentError: It cannot.
    """
    if not callable(observer):
        raise InvalidArgumentError(f"an observer must be callable, got {observer!r}")


def call_all(calls: Iterable[tuple[Callable[..., object], tuple[object, ...]]]) -> Exception | None:
    """Call each function with its arguments, in order.

    Returns:
        The first error that one raised. An observer that is poisoned does not count: it finds
        nothing any more until its reset.
    """
    failure: Exception | None = None
    for function, arguments in calls:
        try:
            function(*arguments)
        except PoisonedError:  # noqa: PERF203 - the others must run
            continue
        except Exception as error:
            failure = failure or error
    return failure
