"""Output of commands, tables for people and JSON for machines; and the options of a command."""

from __future__ import annotations

import inspect
import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["describe_command", "print_json", "print_table", "size_text"]

_JSON = {"dest": "as_json", "action": "store_true", "help": "print one JSON object, no table"}


def describe_command(
    parser: ArgumentParser,
    command: Callable[..., int],
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    """Add a command's options; its docstring describes it, and its signature has the defaults.

    Args:
        parser: The command's own.
        command: Takes the options by name and returns the exit code.
        options: The arguments of ``add_argument`` for each.
    """
    parser.description, parameters = command.__doc__, inspect.signature(command).parameters
    if "as_json" in parameters:
        options = {**options, "--json": _JSON}
    for name, settings in options.items():
        action = parser.add_argument(name, **settings)
        default = parameters[action.dest].default
        if isinstance(default, (str, int, float)) and not isinstance(default, bool):
            action.type = action.type or type(default)
            action.help = f"{action.help} (default: {default})"


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns whose header begins with ">" are figures, on the right."""
    texts = [[name.removeprefix(">") for name in header], *rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if name.startswith(">") else text.ljust(width)
            for name, text, width in zip(header, row, widths, strict=True)
        )
        for row in texts
    ]
    lines.insert(1, "─" * len(lines[0]))
    print("", *(f" {line.rstrip()}" for line in lines), "", sep="\n")


def print_json(result: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(result, indent=2))


def size_text(num_bytes: int) -> str:
    """Return a size as people read it, in powers of 1024: "97.9 MiB", "1.25 GiB"."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes:,} bytes"
