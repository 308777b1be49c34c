"""Wrong usage in a line: what was given, and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["usage_line"]


def usage_line(error: Any, arguments: Sequence[str]) -> str:
    """Return what is wrong with a command line.

    Args:
        error: What typer raised of it.
        arguments: The command line, which has what was given: the error does not say it.
    """
    context = error.ctx
    prog = context.command_path if context else "mamba-cache"
    said = " ".join(error.format_message().split()).rstrip(".")
    given = _given(getattr(error, "param", None), arguments)
    if given is not None and given not in said:
        said += f", got {given!r}"
    if context and (options := _options(context.command, said)):
        said += f"; it has {', '.join(options)}"
    return f"{prog}: {said} ({prog} --help says more)"


def _given(param: Any, arguments: Sequence[str]) -> str | None:
    """Return the value of the option that an error is about, if it is about one that has one."""
    for name in getattr(param, "opts", ()):
        for place, word in enumerate(arguments):
            if word == name and place + 1 < len(arguments):
                return arguments[place + 1]
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
    return None


def _options(command: Any, said: str) -> list[str]:
    """Return what a command has, if it was given a name that it has not and is like none."""
    if said.startswith("No such command") and "?" not in said:
        return sorted(command.commands)
    if said.startswith("No such option") and "(" not in said:
        return [param.opts[0] for param in command.params if param.opts[0].startswith("-")]
    return []
