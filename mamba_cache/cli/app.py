"""The app: its commands, their options, and exit codes."""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from mamba_cache._version import __version__
from mamba_cache.cli.output import Option, Report
from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    MambaCacheError,
    MissingExtraError,
    UnsupportedVersionError,
)

__all__ = ["COMMANDS", "add_options", "main", "run"]

COMMANDS = {
    "plan": "Suggest budgets: how many slots and KV blocks, and how large a block.",
    "doctor": "Check versions, extras, the GPU, and that a hit equals a miss.",
    "replay": "Replay a trace of requests: its hit rate with each policy and number of slots.",
    "serve": "Serve a model by OpenAI's API: `transformers serve`, with a prefix cache behind it.",
}
"""Commands, with the first lines of their docstrings; each command has a module of its name."""

_CANNOT_RUN = (InvalidArgumentError, MissingExtraError, UnsupportedVersionError)
"""Errors of exit code 2: the command was called wrongly. A ``BudgetError`` has exit code 1."""

_DESCRIPTION = """Prefix caching for hybrid (attention + Mamba) language models.

Exit codes: 0 if all is well, 1 if a check or a limit failed, 2 for wrong usage."""


class _Parser(ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help says more)\n")


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    if hasattr(signal, "SIGPIPE"):  # end without a traceback when `head` closes the pipe
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command; return its exit code."""
    parser = _Parser(prog="mamba-cache", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mamba-cache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    parsers = {
        name: commands.add_parser(name, help=line, allow_abbrev=False)
        for name, line in COMMANDS.items()
    }
    # Only the command that is named is imported: most need torch, which takes seconds.
    name = next((each for each in arguments if each in COMMANDS), None)
    if name is not None:
        module = import_module(f"mamba_cache.cli.{name}")
        command = getattr(module, name)
        parsers[name].description = command.__doc__
        add_options(parsers[name], getattr(module, "OPTIONS", ()))
        if name != "serve":
            parsers[name].add_argument(
                "--json", action="store_true", help="print one JSON object, no table"
            )
    options, others = parser.parse_known_args(arguments)
    own = parsers[options.command]
    if others and options.command != "serve":
        own.error(f"unrecognized arguments: {' '.join(others)}")
    # Otherwise the value of a server's option would be parsed as the model.
    if others and arguments.index(others[0]) < arguments.index(options.model):
        own.error(f"MODEL comes before all options that are passed on, got {others[0]} first")
    options.others = others
    try:
        report: Report | None = command(options)
    except MambaCacheError as error:
        print(f"mamba-cache: {error}", file=sys.stderr)
        return 2 if isinstance(error, _CANNOT_RUN) and not isinstance(error, BudgetError) else 1
    if report is None:  # a server that has ended
        return 0
    print(json.dumps(report.data, indent=2) if options.json else report.text)
    return 0 if report.passed else 1


def add_options(parser: ArgumentParser, options: Iterable[Option]) -> None:
    """Add the options of a command, a tuple ``OPTIONS`` of its module."""
    types = {"GIB": float, "N": int}
    for name, unit, default, what in options:
        text = what if default is None else f"{what} (default: {default})"
        kind = types.get(unit, str)
        parser.add_argument(name, metavar=unit, type=kind, default=default, help=text)
