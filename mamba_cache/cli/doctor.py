"""``mamba-cache doctor``: is all that the cache needs here, and does it work?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich.table import Table
from rich.text import Text

from mamba_cache.cli.checks import Check, run_checks
from mamba_cache.cli.output import AsJson, console, make_table, print_json

__all__ = ["doctor"]

_STYLES = {"ok": "green", "slow": "yellow", "failed": "bold red", "absent": "dim"}


def doctor(as_json: AsJson = False) -> None:
    """Check versions, the GPU, that kernels are exact, and what is slow.

    A GPU is not needed. What is slow or absent is shown with what to do about it; only what is
    wrong makes the exit code 1.
    """
    with console(stderr=True).status("looking at this machine"):
        checks = list(run_checks())
    counts = Counter(check.status for check in checks)
    if as_json:
        print_json({"passed": not counts["failed"], "checks": [asdict(one) for one in checks]})
    else:
        out = console()
        out.print(_table(checks))
        out.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if counts["failed"]:
        raise typer.Exit(1)


def _table(checks: Sequence[Check]) -> Table:
    table = make_table(["check", "", "found"])
    for check in checks:
        found = f"{check.detail}\n-> {check.advice}" if check.advice else check.detail
        style = _STYLES[check.status]
        table.add_row(Text(check.name), Text(check.status, style=style), Text(found))
    return table
