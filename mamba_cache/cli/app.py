"""The app: its commands, their options, and what becomes of errors."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from mamba_cache._version import __version__
from mamba_cache.cli.disk import add_disk_commands
from mamba_cache.cli.doctor import add_doctor
from mamba_cache.cli.plan import add_plan
from mamba_cache.cli.replay import add_replay
from mamba_cache.cli.serve import add_serve, serve
from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    MambaCacheError,
    MissingExtraError,
    UnsupportedVersionError,
)

__all__ = ["main", "run"]

_DESCRIPTION = """Prefix caching for hybrid (attention + Mamba) language models.

Exit codes: 0 if all is well, 1 if a check or a limit failed, 2 for wrong usage."""


class _Parser(ArgumentParser):
    """A parser that says in a line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help says more)\n")


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    if hasattr(signal, "SIGPIPE"):  # a reader that has seen enough, such as `head`, ends this too
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command; return its exit code."""
    parser = _Parser(prog="mamba-cache", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mamba-cache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (add_plan, add_doctor, add_replay, add_disk_commands, add_serve):
        add(commands)
    given, others = parser.parse_known_args(arguments)
    options = vars(given)
    command = options.pop("command")
    if others and command is not serve:
        commands.choices[command.__name__].error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        # The value of an option of the server would be taken for the model.
        if arguments.index(others[0]) < arguments.index(options["model"]):
            commands.choices["serve"].error(
                f"MODEL comes before all options that are passed on, got {others[0]} first"
            )
        options["others"] = others
    try:
        code: int = command(**options)
    except MambaCacheError as error:
        print(f"mamba-cache: {error}", file=sys.stderr)
        return _exit_code(error)
    return code


def _exit_code(error: MambaCacheError) -> int:
    """Return 2 if a command cannot run as it was called, 1 if it failed."""
    cannot_run = (InvalidArgumentError, MissingExtraError, UnsupportedVersionError)
    return 2 if isinstance(error, cannot_run) and not isinstance(error, BudgetError) else 1
