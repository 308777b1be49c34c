"""Timing and JSON for the benchmarks: medians, and one way to print and keep them.

A benchmark is a script: ``python tests/benchmarks/bench_copy.py --json out.json``. It prints its
figures and decides nothing. Import this module first: it finds the package of the checkout.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

_BUSY_CYCLES = 20_000_000  # about ten milliseconds: time to queue the runs
_HOST_RUNS = 20
_CALLS_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure: a median, or a ratio of medians."""

    name: str
    value: float
    unit: str  # "us", "ms", "/s", "GB/s", "GiB", "bytes", "%" or "x" (a ratio)
    runs: int = 1  # number of runs under the median
    detail: str = ""  # the source of the value


def median_us(function, *, runs):
    """Return the median time of ``function()`` over ``runs`` calls, in microseconds."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def device_us(calls, *, runs=15):
    """Return the median GPU time of one of ``calls``, in microseconds.

    Runs are queued behind one another: the device never waits for the host. The calls take turns,
    so that no run finds the last run's data in a hardware cache.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY_CYCLES)
    events = []
    for run in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[run % len(calls)]()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def host_us(call):
    """Return the median time that ``call`` takes on the host, in microseconds.

    Calls are queued a few at a time, few enough that no call waits for the device.
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


def progress(message):
    """Print the current measurement to stderr."""
    print(message, file=sys.stderr, flush=True)


def usable_device(name=None):
    """Return a device that PyTorch finds here; default: a GPU, else the CPU."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.zeros(1, device=device).item()
    return device


def need_gpu():
    """Exit if there is no GPU to time."""
    if not torch.cuda.is_available():
        sys.exit("this benchmark times a GPU, and PyTorch finds none")


def assert_same_bits(tensor, expected):
    """Assert that two tensors are equal bit for bit, before one is timed."""
    pair = [each.contiguous().view(torch.uint8) for each in (tensor, expected)]
    assert torch.equal(*pair)


def parser_for(about):
    """Return a parser with the option that every benchmark has."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the result there, too")
    return parser


def report(benchmark, measurements, json_path=None, **more):
    """Print a result as JSON, and write it to ``json_path``; return it."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    result = {
        "benchmark": benchmark,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs{gpu}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **more,
        "measurements": [asdict(one) for one in measurements],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if json_path:
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    return result
