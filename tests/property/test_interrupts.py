"""Calls that are interrupted: nothing wrong is told or found, nothing hangs, nothing leaks.

At some moments of each call, the same in each run; ``python tests/interrupt_table.py`` tries all.
"""

import os
import subprocess
import sys

import pytest
from injectors import Interrupt, LineInterrupt
from interrupt_rig import BARE_CALLS, ENGINE_CALLS, Search
from sources import ROOT


@pytest.mark.parametrize("name", BARE_CALLS)
def test_an_interrupted_allocator_is_whole_or_says_that_it_is_not(name):
    """Removed to see it fail: each ``is_changing = True`` in the allocators."""
    search = Search(BARE_CALLS[name], Interrupt)
    assert search.survey(search.moments(100))[1] == []


@pytest.mark.parametrize("name", ENGINE_CALLS)
def test_an_interrupted_engine_tells_every_token_once(name):
    search = Search(ENGINE_CALLS[name], LineInterrupt)
    assert search.survey(search.moments(16))[1] == []


class _LinesOfStream(LineInterrupt):
    """A moment is before each line of ``Engine.stream`` itself."""

    def _trace(self, frame, event, argument):
        is_stream = frame.f_code.co_name == "stream"
        return super()._trace(frame, event, argument) if is_stream else None


def test_a_stream_interrupted_before_any_of_its_own_lines_tells_every_token_once():
    """Before the first event of a step, too, when the step has ended and nobody has its events."""
    search = Search(ENGINE_CALLS["Engine.stream"], _LinesOfStream)
    assert search.survey(search.moments())[1] == []


def test_an_engine_tells_every_token_once_under_real_signals(seed):
    """In a process of its own: a signal may strike a tool that holds a lock, such as coverage."""
    command = [sys.executable, "tests/interrupt_table.py", "--only=none of the calls"]
    command += ["--signals=120", f"--seed={seed}"]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("COV")}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "'struck': 120" in run.stderr
