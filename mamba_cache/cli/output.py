"""Output of commands: tables for people, JSON for machines.

Results go to stdout, everything else to stderr. rich leaves out colour and bars where the stream is
no terminal, and colour where ``NO_COLOR`` is set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

__all__ = ["AsJson", "Command", "Group", "console", "make_table", "print_json", "size_text"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, no table.")]
"""The option that every command has."""


def _hide_types_of_flags(params: list[Any]) -> list[Any]:
    """Leave out the "<bool>" that typer shows behind a flag, which takes no value."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows flags as what they are."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, ``--help`` among them."""
        return _hide_types_of_flags(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands, likewise."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, ``--help`` among them."""
        return _hide_types_of_flags(super().get_params(ctx))


_PIPE_WIDTH = 160  # columns where nobody's window limits them


def console(*, stderr: bool = False) -> Console:
    """Return a console for results, or for what goes beside them."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False, emoji=False
    )


def make_table(columns: Sequence[str]) -> Table:
    """Return an empty table; columns whose header begins with ">" are figures, on the right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        is_figure = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if is_figure else "left")
    return table


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(result, indent=2))


def size_text(num_bytes: int) -> str:
    """Return a size as people read it, in powers of 1024: "97.9 MiB", "1.25 GiB"."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes:,} bytes"
