"""The app: its commands, and what becomes of errors."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from mamba_cache._version import __version__
from mamba_cache.cli.disk import du, rm
from mamba_cache.cli.doctor import doctor
from mamba_cache.cli.output import Command, Group
from mamba_cache.cli.plan import plan
from mamba_cache.cli.replay import replay
from mamba_cache.cli.serve import serve
from mamba_cache.cli.usage import usage_line
from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    MambaCacheError,
    MissingExtraError,
    UnsupportedVersionError,
)

__all__ = ["app", "main_options", "run"]

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""The command line."""

for _command in (plan, doctor, replay, du, rm):
    app.command(cls=Command)(_command)

app.command(
    cls=Command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(serve)


_UsageError: Any = typer.BadParameter.__base__  # its home differs between versions of typer


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mamba-cache {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Prefix caching for hybrid (attention + Mamba) language models.

    Exit codes: 0 if all is well, 1 if a check or a limit failed, 2 for wrong usage.
    """


def run() -> int:
    """Run a command; return its exit code."""
    try:
        code = app(prog_name="mamba-cache", standalone_mode=False)
    except MambaCacheError as error:
        print(f"mamba-cache: {error}", file=sys.stderr)
        return _exit_code(error)
    except _UsageError as error:
        print(usage_line(error, sys.argv[1:]), file=sys.stderr)
        return 2
    return int(code or 0)


def _exit_code(error: MambaCacheError) -> int:
    """Return 2 if a command cannot run as it was called, 1 if it failed."""
    cannot_run = (InvalidArgumentError, MissingExtraError, UnsupportedVersionError)
    return 2 if isinstance(error, cannot_run) and not isinstance(error, BudgetError) else 1
