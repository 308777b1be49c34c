"""The work of a call, counted instead of timed, so that a busy machine changes nothing."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mamba_cache

PACKAGE = str(Path(mamba_cache.__file__).parent) + os.sep


def lines_executed(call: Callable[[], object]) -> int:
    """Lines of the package that a call executes; a loop over its input multiplies them."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        count += event == "line"
        return trace

    _observe(sys.gettrace, sys.settrace, trace, call)
    return count


def calls_made(call: Callable[[], object]) -> int:
    """Functions of the package that a call enters, comprehensions among them before Python 3.12."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    _observe(sys.getprofile, sys.setprofile, profile, call)
    return count


def _observe(
    current: Callable[[], Any],
    install: Callable[[Any], None],
    observer: Callable[[FrameType, str, Any], Any],
    call: Callable[[], object],
) -> None:
    """Make a call under a trace or profile function, and restore the previous one."""
    previous = current()
    install(observer)
    try:
        call()
    finally:
        install(previous)
