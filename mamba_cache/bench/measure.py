"""Measurements: how they are taken, held to limits, and shown."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mamba_cache.errors import InvalidArgumentError

__all__ = [
    "Measurement",
    "as_dicts",
    "assert_same_bits",
    "check_device",
    "check_gpu",
    "describe_run",
    "device_us",
    "host_us",
    "median_us",
    "print_json",
    "print_rows",
    "print_table",
    "progress",
    "progress_bar",
]

_BUSY_CYCLES = 20_000_000  # about ten milliseconds: time to queue the runs
_HOST_RUNS = 20
_CALLS_AHEAD = 8
_SECONDS_PER_LINE = 20.0  # of progress that is not shown on a terminal


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure beside the limit that it must keep, if it has one.

    Attributes:
        name: What was measured.
        value: The figure: a median, or a ratio of medians.
        unit: "us", "ms", "/s", "GB/s", "GiB", "bytes", "%" or "x" (a ratio).
        limit: The least or most that ``value`` may be; None: it is there to compare with.
        at_least: Whether ``limit`` is a minimum rather than a maximum.
        runs: How many runs the median is over.
        detail: What ``value`` was derived from.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_least: bool = False
    runs: int = 1
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the limit is kept."""
        if self.limit is None:
            return True
        # A figure of NumPy's compares to a bool of NumPy's, which no JSON has.
        return bool(self.value >= self.limit if self.at_least else self.value <= self.limit)


def median_us(function: Callable[[], object], *, runs: int) -> float:
    """Return the median time of ``function()`` over ``runs`` calls, in microseconds."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def device_us(calls: Sequence[Callable[[], object]], *, runs: int = 15) -> float:
    """Return the median time on the GPU of one of ``calls``, in microseconds.

    Runs are queued behind one another, so that the device never waits for the host.

    Args:
        calls: Taken in turn, so that no run finds in a cache what the one before has left there.
        runs: Over how many.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    events = []
    for run in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        calls[run % len(calls)]()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    milliseconds: list[float] = [start.elapsed_time(end) for start, end in events]
    return statistics.median(milliseconds) * 1e3


def host_us(call: Callable[[], object]) -> float:
    """Return the median time that ``call`` takes on the host, in microseconds.

    Calls are queued a few at a time: as many as never wait for the device.
    """
    call()
    seconds = []
    for _ in range(_HOST_RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS_AHEAD):
            call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / _CALLS_AHEAD * 1e6


def progress(message: str) -> None:
    """Say on stderr what is being measured, so that stdout holds the result alone."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, total: float) -> Iterator[Callable[[float, str], None]]:
    """Show on stderr how far a benchmark is while the context manager is open.

    On a terminal with rich as a bar, else as a line every 20 seconds.

    Yields:
        A function to call with how much of ``total`` is done, and a remark.
    """
    try:
        from rich import progress as bars  # noqa: PLC0415 - an optional extra
        from rich.console import Console  # noqa: PLC0415

        console = Console(stderr=True)
    except ImportError:
        console = None
    if console is None or not console.is_terminal:
        yield _progress_lines(title, total)
        return
    remarks = bars.TextColumn("{task.fields[remark]}")
    columns = *bars.Progress.get_default_columns(), remarks
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, remark="")
        yield lambda done, remark: bar.update(task, completed=done, remark=remark)


def check_device(device: str) -> torch.device:
    """Return a device that a benchmark can compute on.

    Raises:
        InvalidArgumentError: PyTorch does not know it, or does not find it here.
    """
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError) as error:  # an assertion: PyTorch without CUDA
        reason = str(error).strip().partition("\n")[0]
        raise InvalidArgumentError(
            f"device must be one that PyTorch finds here, such as 'cpu', got {device!r}: {reason}"
        ) from error
    return found


def check_gpu(benchmark: str) -> None:
    """Check that there is a GPU to time.

    Raises:
        InvalidArgumentError: There is none.
    """
    if not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"the {benchmark} benchmark times a GPU, and PyTorch finds none: run it where "
            "`mamba-cache doctor` shows one"
        )


def describe_run(benchmark: str) -> dict[str, Any]:
    """Return what every result begins with: the benchmark, and the machine that it holds for."""
    return {"benchmark": benchmark, "machine": _machine(), "python": platform.python_version()}


def as_dicts(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return measurements as ``--json`` prints them."""
    return [asdict(one) | {"passed": one.passed} for one in measurements]


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(result, indent=2))


def print_table(result: Mapping[str, Any]) -> None:
    """Print the measurements of a result as a table for people."""
    names = Measurement.__dataclass_fields__
    rows = [_row(Measurement(**{n: one[n] for n in names})) for one in result["measurements"]]
    print_rows((result["benchmark"], "median", "limit", "", "detail"), rows)


def assert_same_bits(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two tensors are equal bit for bit, as they must be before one is timed."""
    pair = [each.contiguous().view(torch.uint8) for each in (tensor, expected)]
    assert torch.equal(*pair)


def print_rows(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table for people: through rich if it is installed, else in plain text."""
    try:
        from rich.console import Console  # noqa: PLC0415 - an optional extra
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        _print_plain([header, *rows])
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _progress_lines(title: str, total: float) -> Callable[[float, str], None]:
    """Return what prints a line of progress now and then, whoever reads it: a file, a pager."""
    last = time.monotonic()

    def show(done: float, remark: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_PER_LINE:
            last = now
            progress(f"{title}: {done / total:.0%}, {remark}")

    return show


def _print_plain(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        cells = [name.ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(figures, widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def _machine() -> str:
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{platform.machine()}, {os.cpu_count()} CPUs{gpu}"


def _row(measurement: Measurement) -> tuple[str, ...]:
    limit = verdict = ""
    if measurement.limit is not None:
        limit = f"{'>=' if measurement.at_least else '<='} {measurement.limit:g} {measurement.unit}"
        verdict = "ok" if measurement.passed else "MISSED"
    value = f"{measurement.value:,.2f} {measurement.unit}"
    return measurement.name, value, limit, verdict, measurement.detail
