"""``python -m mamba_cache.bench``: one subcommand per benchmark."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mamba_cache.bench.align import run_align
from mamba_cache.bench.control import run_control
from mamba_cache.bench.copy import run_copy
from mamba_cache.bench.measure import Measurement, print_json, print_table
from mamba_cache.bench.quantization import run_quantization
from mamba_cache.bench.quantized_copy import run_quantized_copies
from mamba_cache.bench.ttft import add_ttft_options, run_ttft

__all__ = ["main"]

_BENCHMARKS: dict[str, tuple[str, Callable[..., list[Measurement]]]] = {
    "align": ("time of states in block tables on a GPU, beside a flat copy", run_align),
    "control": ("time of the decisions: blocks, slots, hashes, admission", run_control),
    "copy": (
        "time of state copies on a GPU, beside other ways to copy",
        lambda: [*run_copy(), *run_quantized_copies()],
    ),
    "quantization": (
        "errors of int8 slots: of states, and of logits after a hit",
        run_quantization,
    ),
    "ttft": ("time to first token of a transformers model with the cache and without", run_ttft),
}

_OPTIONS: dict[str, Callable[[Any], None]] = {"ttft": add_ttft_options}
"""What benchmarks take besides; each option is an argument of the benchmark's function."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and return 0 if all its limits were kept, else 1."""
    parser = argparse.ArgumentParser(prog="python -m mamba_cache.bench", description=__doc__)
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    for name, (summary, _) in _BENCHMARKS.items():
        command = names.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if name in _OPTIONS:
            _OPTIONS[name](command)
    options = vars(parser.parse_args(arguments))
    benchmark, as_json = options.pop("benchmark"), options.pop("json")
    measurements = _BENCHMARKS[benchmark][1](**options)
    show = print_json if as_json else print_table
    show(benchmark, measurements)
    return 0 if all(measurement.passed for measurement in measurements) else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a reader that has seen enough, such as `head`, ends this too
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
