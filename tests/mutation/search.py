"""Runs tests against mutants, each in a fork of a process that has collected the tests already."""

import gc
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import NoReturn

import coverage
import pytest
from mutants import Mutant, codes_in

__all__ = ["Search"]

SURVIVED, KILLED = 0, 1
BOUND_BYTES = 12 << 30  # address space of a fork: a mutant may allocate any amount of memory

Key = tuple[str, str, int]
Exchange = tuple[FunctionType, CodeType]


class Search:
    """A pytest plugin that runs each test once, then each mutant's relevant tests on the mutant.

    The relevant tests run until ``budget_seconds`` of processor time are used. Half of the time is
    for tests that run the fewest of the files, the rest for the quickest.
    """

    def __init__(
        self,
        mutants: Iterable[Mutant],
        num_processes: int,
        budget_seconds: float,
    ) -> None:
        # "killed"; "stopped", if it waited, looped or took memory without an end; "survived"; or
        # "uncovered", if no test runs its lines.
        self.outcomes: dict[Mutant, str] = {}
        self._mutants = list(mutants)
        self._num_processes = num_processes
        self._budget_seconds = budget_seconds
        self._failed = False
        self._num_files: Counter[str] = Counter()  # run by each test
        self._seconds: dict[str, float] = {}  # processor time, as the machine may be busy
        self._waits: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failed test."""
        self._failed |= report.failed
        if report.failed:
            print(f"\n{report.nodeid} failed", file=sys.__stderr__, flush=True)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replace pytest's loop over the tests."""
        covering = self._covering(session)
        self._check_forks(session)
        functions = _functions({str(mutant.file) for mutant in self._mutants})
        running: dict[int, Mutant] = {}
        for number, mutant in enumerate(self._mutants):
            _show(f"{number} of {len(self._mutants)} mutants, {self._num_survivors()} survivors")
            items = self._chosen(covering, mutant)
            if not items:
                self.outcomes[mutant] = "uncovered"
                continue
            try:
                code = mutant.code()
            except SyntaxError:
                continue
            while len(running) >= self._num_processes:
                self._wait(running)
            running[self._fork(items, _exchanges(functions, mutant, code))] = mutant
        while running:
            self._wait(running)
        return True

    def _covering(self, session: pytest.Session) -> dict[tuple[str, int], list[pytest.Item]]:
        """Run each test without a mutant; return the tests that run each line."""
        files = sorted({str(mutant.file) for mutant in self._mutants})
        watch = coverage.Coverage(data_file=None, config_file=False, include=files)
        watch.set_option("run:disable_warnings", ["no-data-collected"])  # all uncovered
        for number, item in enumerate(session.items):
            _show(f"{number} of {len(session.items)} tests")
            began, began_to_wait = time.process_time(), time.monotonic()
            watch.start()
            watch.switch_context(item.nodeid)
            self._run(item)
            watch.stop()
            self._seconds[item.nodeid] = time.process_time() - began
            self._waits[item.nodeid] = time.monotonic() - began_to_wait
            if self._failed:
                raise session.Failed(f"{item.nodeid} fails without a mutant")
        items = {item.nodeid: item for item in session.items}
        covering = {}
        for file in files:
            by_line = watch.get_data().contexts_by_lineno(file)
            self._num_files.update({name for names in by_line.values() for name in names})
            for line, names in by_line.items():
                covering[file, line] = [items[name] for name in names if name]
        return covering

    def _check_forks(self, session: pytest.Session) -> None:
        """Run all tests again in a fork: they must pass there without a mutant."""
        _show("all tests in a fork")
        _, status = os.waitpid(self._fork(session.items, []), 0)
        if os.waitstatus_to_exitcode(status) != SURVIVED:
            raise session.Failed("a test fails in a fork without a mutant")

    def _chosen(
        self, covering: dict[tuple[str, int], list[pytest.Item]], mutant: Mutant
    ) -> list[pytest.Item]:
        items = {i for line in mutant.lines for i in covering.get((str(mutant.file), line), ())}
        quickest = sorted(items, key=lambda item: (self._seconds[item.nodeid], item.nodeid))
        nearest = sorted(quickest, key=lambda item: self._num_files[item.nodeid])
        chosen: list[pytest.Item] = []
        seconds = 0.0
        for order, most in ((nearest, self._budget_seconds / 2), (quickest, self._budget_seconds)):
            for item in order:
                if item in chosen:
                    continue
                if chosen and seconds + self._seconds[item.nodeid] > most:
                    break
                seconds += self._seconds[item.nodeid]
                chosen.append(item)
        return chosen

    def _run(self, item: pytest.Item) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    def _fork(self, items: list[pytest.Item], exchanges: list[Exchange]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self._try(items, exchanges)
        finally:
            os._exit(KILLED)  # an exception escaped pytest

    def _try(self, items: list[pytest.Item], exchanges: list[Exchange]) -> NoReturn:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        if exchanges:
            os.dup2(nowhere, 2)
        gc.freeze()  # collecting would copy the parent's pages
        resource.setrlimit(resource.RLIMIT_AS, (BOUND_BYTES, BOUND_BYTES))
        for function, code in exchanges:
            function.__code__ = code
        for item in items:
            # A loop without an end.
            signal.setitimer(signal.ITIMER_PROF, 3 + 5 * self._seconds[item.nodeid])
            # A wait without an end: on a busy machine, a mutant may only be slow.
            signal.setitimer(signal.ITIMER_REAL, 60 + 20 * self._waits[item.nodeid])
            self._run(item)
            if self._failed and exchanges:
                os._exit(KILLED)
        os._exit(KILLED if self._failed else SURVIVED)

    def _wait(self, running: dict[int, Mutant]) -> None:
        pid, status = os.wait()
        ended = os.waitstatus_to_exitcode(status)
        outcome = "survived" if ended == SURVIVED else "killed" if ended == KILLED else "stopped"
        mutant = running.pop(pid)
        self.outcomes[mutant] = outcome
        if outcome == "survived" and mutant.why is None:
            _show("\n".join(["", f"{mutant.file}:{min(mutant.lines)}", *mutant.change(), ""]))

    def _num_survivors(self) -> int:
        return sum(outcome in ("survived", "uncovered") for outcome in self.outcomes.values())


def _functions(files: set[str]) -> dict[Key, list[FunctionType]]:
    """Find the functions of the files, even those held by a decorator or a class."""
    found: dict[Key, list[FunctionType]] = {}
    gc.unfreeze()  # frozen objects are listed, too
    # `isinstance` would ask some objects for their `__class__`, and they warn.
    for function in (thing for thing in gc.get_objects() if type(thing) is FunctionType):
        code = function.__code__
        if code.co_filename in files:
            found.setdefault((code.co_filename, code.co_name, code.co_firstlineno), []).append(
                function
            )
    return found


def _exchanges(
    functions: dict[Key, list[FunctionType]], mutant: Mutant, code: CodeType
) -> list[Exchange]:
    """Return the functions that get new code: a mutant's own, and its existing inner functions.

    A decorator's inner function was made when the package was imported.
    """
    name = str(mutant.file)
    exchanges = [
        (function, new)
        for new in codes_in(code)
        for function in functions.get((name, new.co_name, new.co_firstlineno), ())
        if new is code or _can_replace(function.__code__, new)
    ]
    assert any(new is code for _, new in exchanges), f"{mutant.function} was not found"
    return exchanges


def _can_replace(code: CodeType, new: CodeType) -> bool:
    return not new.co_name.startswith("<") and new.co_freevars == code.co_freevars


def _show(text: str) -> None:
    print(f"\r{text} ", end="", file=sys.__stderr__, flush=True)
