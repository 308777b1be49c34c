"""The command ``mamba-cache bench``: every benchmark with its options, results and errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from mamba_cache.bench.align import run_align
from mamba_cache.bench.control import run_control
from mamba_cache.bench.copy import run_copy
from mamba_cache.bench.measure import as_dicts, describe_run, print_json, print_table
from mamba_cache.bench.options import wrong_name
from mamba_cache.bench.quantization import run_quantization
from mamba_cache.bench.replay import add_replay_options, print_replay, run_replay
from mamba_cache.bench.serve import add_serve_options, run_serve
from mamba_cache.bench.soak import add_soak_options, print_soak, run_soak
from mamba_cache.bench.step import run_step
from mamba_cache.bench.store import add_store_options, run_store
from mamba_cache.bench.tiers import add_tiers_options, run_tiers
from mamba_cache.bench.ttft import add_ttft_options, run_ttft
from mamba_cache.bench.ttft_model import print_run
from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    MambaCacheError,
    MissingExtraError,
    UnsupportedVersionError,
)

__all__ = ["BENCHMARKS", "Benchmark", "exit_code", "main"]


class Benchmark(NamedTuple):
    """A benchmark as the command knows it.

    Attributes:
        summary: What it measures, in a line.
        run: Measures; takes the options that were given, as keywords, and has the defaults of all
            others. Returns measurements, or, if there is a ``show``, a dict as ``--json`` prints
            it, of which "passed" sets the exit code.
        show: Prints such a dict for people.
        add_options: Adds options to an ``ArgumentParser``.
    """

    summary: str
    run: Callable[..., Any]
    show: Callable[[dict[str, Any]], None] | None = None
    add_options: Callable[[argparse.ArgumentParser], None] | None = None


BENCHMARKS: dict[str, Benchmark] = {
    "align": Benchmark("time states in block tables on a GPU, beside a flat copy", run_align),
    "control": Benchmark("time the decisions: blocks, slots, hashes, admission", run_control),
    "copy": Benchmark("time state copies on a GPU, beside other ways to copy", run_copy),
    "quantization": Benchmark(
        "measure the errors of int8 slots: of states, and of logits after a hit", run_quantization
    ),
    "replay": Benchmark(
        "replay a trace of requests under budgets, policies and placements",
        run_replay,
        print_replay,
        add_replay_options,
    ),
    "serve": Benchmark(
        "time many requests through a transformers model: one by one, in static batches, batched",
        run_serve,
        print_run,
        add_serve_options,
    ),
    "soak": Benchmark(
        "serve requests for minutes or hours: what leaks, slows down or goes wrong?",
        run_soak,
        print_soak,
        add_soak_options,
    ),
    "step": Benchmark("time a step beside a plain loop, and a prompt's life", run_step),
    "store": Benchmark(
        "time a store: moving entries, resuming in another process, steps of four beside it",
        run_store,
        add_options=add_store_options,
    ),
    "tiers": Benchmark(
        "time spilling to host memory and loading from it, beside plain copies",
        run_tiers,
        add_options=add_tiers_options,
    ),
    "ttft": Benchmark(
        "time the first token of a transformers model, with the cache and without",
        run_ttft,
        print_run,
        add_ttft_options,
    ),
}
"""Every benchmark by its name; this is the only place where one is entered."""


def main(arguments: Sequence[str] | None = None, *, prog: str = "mamba-cache bench") -> int:
    """Run one benchmark.

    Args:
        arguments: Its name and its options; None: those of the process.
        prog: How the command was called, for messages.

    Returns:
        0 if all its limits were kept, 1 if one was missed, 2 if it cannot run: stderr says why.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(prog)
    if not given:
        parser.print_help(sys.stderr)
        return 2
    if not given[0].startswith("-") and given[0] not in BENCHMARKS:
        parser.error(f"NAME {wrong_name(given[0], BENCHMARKS)}")
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        parser.error(
            f"{given[0]} takes no {unknown[0]!r}; {prog} {given[0]} --help lists its options"
        )
    options = vars(parsed)
    name, as_json = options.pop("benchmark"), options.pop("json")
    try:
        passed = _run(name, BENCHMARKS[name], options, as_json=as_json)
    except MambaCacheError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return exit_code(error)
    return 0 if passed else 1


def exit_code(error: MambaCacheError) -> int:
    """Return what a command exits with: 2 if it cannot run as it was called, 1 if it failed."""
    cannot_run = (InvalidArgumentError, MissingExtraError, UnsupportedVersionError)
    return 2 if isinstance(error, cannot_run) and not isinstance(error, BudgetError) else 1


class _Parser(argparse.ArgumentParser):
    """A parser that says in a line what is wrong."""

    def error(self, message: str) -> NoReturn:
        more = "" if "--help" in message else f" ({self.prog} --help says more)"
        self.exit(2, f"{self.prog}: {message}{more}\n")


def _parser(prog: str) -> argparse.ArgumentParser:
    about = "Measure this machine; exit with 1 if a limit is missed."
    parser = _Parser(prog=prog, description=about)
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        summary = benchmark.summary
        command = names.add_parser(
            name,
            help=summary,
            description=_sentence(summary),
            argument_default=argparse.SUPPRESS,
        )
        help_ = "print one JSON object, no table"
        command.add_argument("--json", action="store_true", default=False, help=help_)
        if benchmark.add_options is not None:
            benchmark.add_options(command)
    return parser


def _sentence(summary: str) -> str:
    """Return a summary with a capital and a stop."""
    return summary[0].upper() + summary[1:] + ("" if summary.endswith("?") else ".")


def _run(name: str, benchmark: Benchmark, options: dict[str, Any], *, as_json: bool) -> bool:
    """Measure and print; return whether all limits were kept."""
    result = benchmark.run(**options)
    if benchmark.show is None:
        passed = all(measurement.passed for measurement in result)
        result = describe_run(name) | {"passed": passed, "measurements": as_dicts(result)}
    (print_json if as_json else benchmark.show or print_table)(result)
    return bool(result["passed"])
