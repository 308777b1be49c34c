"""How threads of a tier answer those who gave them work."""

from __future__ import annotations

import sys
import threading

from mamba_cache.tiers.entry import Refusal
from mamba_cache.tiers.protocols import Done

__all__ = ["report_error", "tell"]


def tell(done: Done, refusal: Refusal | None) -> None:
    """Call back; an error of the caller's must not end the thread that others wait for."""
    try:
        done(refusal)
    except Exception:
        report_error()


def report_error() -> None:
    """Show the exception that is being handled where those of threads are shown."""
    kind, error, trace = sys.exc_info()
    threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
