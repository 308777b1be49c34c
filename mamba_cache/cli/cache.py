"""``mamba-cache cache``: what lies on disk below a path, whether it is whole, and less of it."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mamba_cache.bench.measure import print_json
from mamba_cache.cli.output import AsJson, Command, Group, console, make_table, size_text
from mamba_cache.errors import InvalidArgumentError, TierInUseError
from mamba_cache.tiers import CacheFolder, FolderLock, count_rows, folders, inspect_rows
from mamba_cache.tiers import remove_folder as remove

__all__ = ["cache", "ls", "prune", "verify"]

cache = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="List, verify or prune a disk cache (`CacheConfig.disk_cache_path`).",
)
"""The group of commands."""

_PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="The disk cache's path.")]
_DAY = 86400.0


@cache.command(cls=Command)
def ls(path: _PathArgument, as_json: AsJson = False) -> None:
    """List what lies below PATH: one folder for each model, weights, rank and settings.

    Headers are read, payloads are not; what is in use is listed too.
    """
    listed: list[dict[str, Any]] = []
    for folder in folders(path):
        counts, _ = _count(folder, with_payloads=False)
        facts = folder.identity.facts if folder.identity else {}
        listed.append(
            {
                "folder": folder.path.name,
                "model": facts.get("model"),
                "weights": facts.get("weights"),
                "rank": folder.identity.rank if folder.identity else None,
                "states": counts["state"],
                "kv_blocks": counts["kv"],
                "bytes": folder.num_bytes,
                "opened": datetime.fromtimestamp(folder.used_at, timezone.utc).isoformat(),
                "in_use": folder.is_in_use,
            }
        )
    if as_json:
        print_json({"folders": listed})
        return
    table = make_table(
        ["folder", "model", "weights", ">rank", ">states", ">KV blocks", ">size", "opened", ""]
    )
    for each in listed:
        table.add_row(
            each["folder"],
            each["model"] or "unknown",
            (each["weights"] or "unknown")[:24],
            str(each["rank"] if each["rank"] is not None else "?"),
            f"{each['states']:,}",
            f"{each['kv_blocks']:,}",
            size_text(each["bytes"]),
            each["opened"][:16].replace("T", " "),
            "in use" if each["in_use"] else "",
        )
    console().print(table)


@cache.command(cls=Command)
def verify(
    path: _PathArgument,
    erase: Annotated[bool, typer.Option("--erase", help="Erase the entries that are bad.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every entry below PATH and compare it with its header and its digest.

    Bad entries are never restored, whether they are erased or not. The exit code is 1 if there is
    one. Folders that a process uses are left out.
    """
    checked: list[dict[str, Any]] = []
    num_bad = 0
    for folder in folders(path):
        try:
            lock = FolderLock(folder.path)
        except TierInUseError:
            checked.append({"folder": folder.path.name, "in_use": True})
            continue
        try:
            counts, bad = _count(folder, with_payloads=True, erase=erase)
        finally:
            lock.release()
        num_bad += bad.total()
        checked.append(
            {
                "folder": folder.path.name,
                "in_use": False,
                "states": counts["state"],
                "kv_blocks": counts["kv"],
                "bad": {reason: bad[reason] for reason in sorted(bad)},
            }
        )
    if as_json:
        print_json({"passed": not num_bad, "erased": erase, "folders": checked})
    else:
        table = make_table(["folder", ">good states", ">good KV blocks", "bad"])
        for each in checked:
            if each["in_use"]:
                table.add_row(each["folder"], "", "", "in use, left out")
                continue
            said = ", ".join(f"{count} {reason}" for reason, count in each["bad"].items())
            table.add_row(
                each["folder"], f"{each['states']:,}", f"{each['kv_blocks']:,}", said or "none"
            )
        console().print(table)
    if num_bad:
        raise typer.Exit(1)


@cache.command(cls=Command)
def prune(
    path: _PathArgument,
    *,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Those not opened for so long.")
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(min=0, metavar="GIB", help="The least recently opened beyond so much."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete folders below PATH that no process uses: by age, by size, or all."""
    _check_says_what(everything or older_than is not None or keep is not None)
    found = folders(path)
    left, now = sum(folder.num_bytes for folder in found), datetime.now(timezone.utc).timestamp()
    gone, freed = [], 0
    for folder in found:
        is_old = older_than is not None and now - folder.used_at > older_than * _DAY
        is_beyond = keep is not None and left > keep * 2**30
        if folder.is_in_use or not (everything or is_old or is_beyond):
            continue
        if not dry_run:
            try:
                remove(folder)
            except TierInUseError:  # since it was looked at
                continue
        left -= folder.num_bytes
        freed += folder.num_bytes
        gone.append(folder.path.name)
    if as_json:
        print_json({"dry_run": dry_run, "deleted": gone, "bytes": freed, "left_bytes": left})
        return
    what = "would be deleted" if dry_run else "deleted"
    console().print(
        f"{len(gone)} of {len(found)} folders {what}: {size_text(freed)}; {size_text(left)} left"
    )


def _check_says_what(is_said: bool) -> None:
    """Check that somebody who deletes has said what."""
    if not is_said:
        raise InvalidArgumentError("say what to delete: --older-than DAYS, --keep GIB or --all")


def _count(
    folder: CacheFolder, *, with_payloads: bool, erase: bool = False
) -> tuple[Counter[str], Counter[str]]:
    """Count a folder's good entries by kind, and the bad ones by reason, behind a bar."""
    good: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    digest = folder.identity.digest if folder.identity else None
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        bar = progress.add_task(folder.path.name[:16], total=count_rows(folder.path))
        reports = inspect_rows(folder.path, digest, with_payloads=with_payloads, erase=erase)
        for report in reports:
            progress.advance(bar)
            if report.refusal is not None:
                bad[report.refusal.value] += 1
            elif report.header is not None:
                good[report.kind.name.lower()] += 1
    return good, bad
