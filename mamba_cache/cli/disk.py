"""``mamba-cache du`` and ``rm``: the size of a disk cache, and its removal."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from datetime import datetime, timezone
from pathlib import Path

from mamba_cache.cli.output import print_json, print_table, size_text
from mamba_cache.errors import TierInUseError
from mamba_cache.tiers.directory import folders, remove_folder

__all__ = ["add_options", "du", "rm"]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of both commands."""
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="the disk cache's path (`disk_cache_path`)"
    )


def du(options: Namespace) -> int:
    """Show what a disk cache takes: one folder for each model, weights, rank and settings."""
    found = [
        {
            "folder": folder.path.name,
            "model": folder.identity.facts["model"],
            "rank": folder.identity.rank,
            "bytes": folder.num_bytes,
            "opened": datetime.fromtimestamp(folder.used_at, timezone.utc).isoformat(),
            "in_use": folder.is_in_use,
        }
        for folder in folders(options.path)
    ]
    total = sum(each["bytes"] for each in found)
    if options.json:
        print_json({"bytes": total, "folders": found})
        return 0
    print_table(
        ["folder", "model", ">rank", ">size", "opened", ""],
        [
            (
                each["folder"],
                each["model"],
                str(each["rank"]),
                size_text(each["bytes"]),
                each["opened"][:16].replace("T", " "),
                "in use" if each["in_use"] else "",
            )
            for each in found
        ],
    )
    print(f"{len(found)} folders, {size_text(total)}")
    return 0


def rm(options: Namespace) -> int:
    """Delete a disk cache. Folders that a process uses stay, and the exit code is 1."""
    deleted, kept, freed = [], [], 0
    for folder in folders(options.path):
        try:
            remove_folder(folder)
        except TierInUseError:
            kept.append(folder.path.name)
            continue
        deleted.append(folder.path.name)
        freed += folder.num_bytes
    if options.json:
        print_json({"bytes": freed, "deleted": deleted, "in_use": kept})
    else:
        in_use = f"; {len(kept)} are in use and stay" if kept else ""
        print(f"{len(deleted)} folders deleted: {size_text(freed)}{in_use}")
    return 1 if kept else 0
