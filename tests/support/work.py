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

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return count


def calls_made(call: Callable[[], object]) -> int:
    """Functions of the package that a call enters, comprehensions among them before Python 3.12."""
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return count
