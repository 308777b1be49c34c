"""Options and reports of commands: one JSON object for machines, text with tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Option", "Report", "size_text", "table"]


Option: TypeAlias = tuple[str, str, Any, str]
"""An option of a command: name, unit, default and help. A name without dashes is an argument."""


class Report(NamedTuple):
    """The result of a command; the app prints either ``data`` or ``text``."""

    data: Mapping[str, Any]
    text: str
    passed: bool = True


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; columns whose header begins with ">" are aligned to the right."""
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
    return "\n".join(["", *(f" {line.rstrip()}" for line in lines), ""])


def size_text(num_bytes: int) -> str:
    """Return a size as people read it, in powers of 1024: "97.9 MiB", "1.25 GiB"."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes:,} bytes"
