"""``python -m mamba_cache.bench``: one subcommand per benchmark."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mamba_cache.bench.align import run_align
from mamba_cache.bench.control import run_control
from mamba_cache.bench.copy import run_copy
from mamba_cache.bench.extraction import run_extraction
from mamba_cache.bench.measure import Measurement, print_json, print_table
from mamba_cache.bench.quantization import run_quantization
from mamba_cache.bench.quantized_copy import run_quantized_copies
from mamba_cache.bench.replay import add_replay_options, print_replay, run_replay
from mamba_cache.bench.soak import add_soak_options, print_soak, run_soak
from mamba_cache.bench.step import run_step
from mamba_cache.bench.ttft import add_ttft_options, print_ttft, run_ttft
from mamba_cache.errors import InvalidArgumentError, MissingExtraError, UnsupportedVersionError

__all__ = ["main"]

_BENCHMARKS: dict[str, tuple[str, Callable[..., list[Measurement]]]] = {
    "align": ("time of states in block tables on a GPU, beside a flat copy", run_align),
    "control": ("time of the decisions: blocks, slots, hashes, admission", run_control),
    "copy": (
        "time of state copies on a GPU, beside other ways to copy",
        lambda: [*run_copy(), *run_extraction(), *run_quantized_copies()],
    ),
    "quantization": (
        "errors of int8 slots: of states, and of logits after a hit",
        run_quantization,
    ),
    "step": ("time of a step's bookkeeping beside a plain loop, and of a prompt's life", run_step),
}


class _Report(NamedTuple):
    """A benchmark that returns more than measurements: a dict, as ``--json`` prints it."""

    summary: str
    add_options: Callable[[Any], None]
    run: Callable[..., dict[str, Any]]
    show: Callable[[dict[str, Any]], None]


_REPORTS = {
    "replay": _Report(
        "what a trace of requests hits, under budgets, policies and placements",
        add_replay_options,
        run_replay,
        print_replay,
    ),
    "soak": _Report(
        "requests for minutes or hours: what leaks, slows down or goes wrong",
        add_soak_options,
        run_soak,
        print_soak,
    ),
    "ttft": _Report(
        "time to first token of a transformers model with the cache and without",
        add_ttft_options,
        run_ttft,
        print_ttft,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark.

    Returns:
        0 if all its limits were kept, 1 if one was missed, 2 if it cannot run: stderr says why.
    """
    parser = argparse.ArgumentParser(prog="python -m mamba_cache.bench", description=__doc__)
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    summaries = {name: summary for name, (summary, _) in _BENCHMARKS.items()}
    summaries |= {name: report.summary for name, report in _REPORTS.items()}
    for name, summary in sorted(summaries.items()):
        command = names.add_parser(name, help=summary, description=summary)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        if name in _REPORTS:
            _REPORTS[name].add_options(command)
    options = vars(parser.parse_args(arguments))
    benchmark, as_json = options.pop("benchmark"), options.pop("json")
    run = _report if benchmark in _REPORTS else _measure
    try:
        return 0 if run(benchmark, options, as_json=as_json) else 1
    except (InvalidArgumentError, MissingExtraError, UnsupportedVersionError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _measure(benchmark: str, options: dict[str, Any], *, as_json: bool) -> bool:
    measurements = _BENCHMARKS[benchmark][1](**options)
    show = print_json if as_json else print_table
    show(benchmark, measurements)
    return all(measurement.passed for measurement in measurements)


def _report(benchmark: str, options: dict[str, Any], *, as_json: bool) -> bool:
    report = _REPORTS[benchmark]
    result = report.run(**options)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        report.show(result)
    return bool(result["passed"])


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a reader that has seen enough, such as `head`, ends this too
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
