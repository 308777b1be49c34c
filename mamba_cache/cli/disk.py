"""``mamba-cache du`` and ``rm``: the size of a disk cache, and its removal."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from mamba_cache.cli.output import AsJson, console, make_table, print_json, size_text
from mamba_cache.errors import TierInUseError
from mamba_cache.tiers import folders, remove_folder

__all__ = ["du", "rm"]

_PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="The disk cache's path (`disk_cache_path`).")
]


def du(path: _PathArgument, as_json: AsJson = False) -> None:
    """Show what a disk cache takes: one folder for each model, weights, rank and settings."""
    found = folders(path)
    listed: list[dict[str, Any]] = [
        {
            "folder": folder.path.name,
            "model": folder.identity.facts["model"],
            "rank": folder.identity.rank,
            "bytes": folder.num_bytes,
            "opened": datetime.fromtimestamp(folder.used_at, timezone.utc).isoformat(),
            "in_use": folder.is_in_use,
        }
        for folder in found
    ]
    total = sum(folder.num_bytes for folder in found)
    if as_json:
        print_json({"bytes": total, "folders": listed})
        return
    table = make_table(["folder", "model", ">rank", ">size", "opened", ""])
    for each in listed:
        table.add_row(
            each["folder"],
            each["model"],
            str(each["rank"]),
            size_text(each["bytes"]),
            each["opened"][:16].replace("T", " "),
            "in use" if each["in_use"] else "",
        )
    console().print(table)
    console().print(f"{len(listed)} folders, {size_text(total)}")


def rm(path: _PathArgument, as_json: AsJson = False) -> None:
    """Delete a disk cache. Folders that a process uses stay, and the exit code is 1."""
    deleted, kept, freed = [], [], 0
    for folder in folders(path):
        try:
            remove_folder(folder)
        except TierInUseError:
            kept.append(folder.path.name)
            continue
        deleted.append(folder.path.name)
        freed += folder.num_bytes
    if as_json:
        print_json({"bytes": freed, "deleted": deleted, "in_use": kept})
    else:
        in_use = f"; {len(kept)} are in use and stay" if kept else ""
        console().print(f"{len(deleted)} folders deleted: {size_text(freed)}{in_use}")
    if kept:
        raise typer.Exit(1)
