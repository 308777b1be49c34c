"""``python -m mamba_cache.bench``: one subcommand per benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mamba_cache.bench.control import run_control
from mamba_cache.bench.copy import run_copy
from mamba_cache.bench.measure import Measurement, print_json, print_table

__all__ = ["main"]

_BENCHMARKS: dict[str, tuple[str, Callable[[], list[Measurement]]]] = {
    "control": ("time of the decisions: blocks, slots, hashes, admission", run_control),
    "copy": ("time of state copies on a GPU, beside other ways to copy", run_copy),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and return 0 if all its limits were kept, else 1."""
    parser = argparse.ArgumentParser(prog="python -m mamba_cache.bench", description=__doc__)
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    for name, (summary, _) in _BENCHMARKS.items():
        command = names.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    _, run = _BENCHMARKS[options.benchmark]
    measurements = run()
    show = print_json if options.json else print_table
    show(options.benchmark, measurements)
    return 0 if all(measurement.passed for measurement in measurements) else 1


if __name__ == "__main__":
    sys.exit(main())
