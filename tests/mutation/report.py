"""What came of a search for mutants that survive, as plain values and as Markdown."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # needs the extra, and this does not
    from mutants import Mutant

__all__ = ["EXPLAINED", "as_markdown", "described", "identity", "summary"]

EXPLAINED = Path(__file__).parent / "explained.json"


def described(mutant: Mutant, root: Path) -> dict[str, Any]:
    """Where a mutant is and what it changes, as plain values."""
    was, becomes = mutant.change()
    file = mutant.file.relative_to(root).as_posix()
    line = min(mutant.lines)
    return {"file": file, "line": line, "function": mutant.function, "was": was, "becomes": becomes}


def identity(description: dict[str, Any]) -> tuple[str, ...]:
    """What a mutant is known by, wherever its lines have moved to."""
    return tuple(description[key] for key in ("file", "function", "was", "becomes"))


def summary(
    outcomes: dict[Mutant, str], root: Path, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Counts outcomes by module, and lists the survivors with the reason where one is known.

    Args:
        outcomes: What became of each mutant.
        root: The project's folder.
        before: A result of which only the survivors were tried again: it counts for the others.
    """
    reasons = _reasons()
    modules: dict[str, Counter[str]] = {}
    for file, counts in (before or {"modules": {}})["modules"].items():
        modules[file] = Counter({kind: counts.get(kind, 0) for kind in ("killed", "stopped")})
    survivors = []
    for mutant, outcome in outcomes.items():
        description = described(mutant, root)
        counts = modules.setdefault(description["file"], Counter())
        if outcome in ("killed", "stopped"):
            counts["killed"] += 1
            counts["stopped"] += outcome == "stopped"
        else:
            why = reasons.get(identity(description))
            counts["explained" if why else "survived"] += 1
            survivors.append({**description, "why": why})
    tried = {identity(described(mutant, root)) for mutant in outcomes}
    for survivor in (before or {"survivors": []})["survivors"]:
        if identity(survivor) not in tried:
            modules[survivor["file"]]["explained" if survivor["why"] else "survived"] += 1
            survivors.append(survivor)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join(["python", "tests/mutation", *sys.argv[1:]]),
        "commit": _commit(root),
        "modules": dict(sorted(modules.items())),
        "survivors": sorted(survivors, key=lambda survivor: (survivor["file"], survivor["line"])),
    }


def as_markdown(result: dict[str, Any]) -> str:
    """Tables of the modules and, if there are any, of the survivors without an explanation."""
    lines = [
        "| module | mutants | killed | survived | explained | score |",
        "|---|--:|--:|--:|--:|--:|",
        *(_row(f"`{name}`", Counter(counts)) for name, counts in result["modules"].items()),
        _row("together", sum(map(Counter, result["modules"].values()), Counter())),
    ]
    whys = Counter(survivor["why"] for survivor in result["survivors"] if survivor["why"])
    if whys:
        lines += ["", "| survivors | why no test notices them |", "|--:|---|"]
        lines += [f"| {count} | {why} |" for why, count in whys.most_common()]
    unexplained = [survivor for survivor in result["survivors"] if survivor["why"] is None]
    for survivor in unexplained:
        lines += ["", f"{survivor['file']}:{survivor['line']} {survivor['function']}"]
        lines += [f"    - {survivor['was']}", f"    + {survivor['becomes']}"]
    return "\n".join(lines)


def _row(name: str, counts: Counter[str]) -> str:
    kinds = [counts[kind] for kind in ("killed", "survived", "explained")]
    score = 100 * counts["killed"] / max(counts["killed"] + counts["survived"], 1)
    return (
        f"| {name} | " + " | ".join(f"{n:,}" for n in (sum(kinds), *kinds)) + f" | {score:.1f}% |"
    )


def _reasons() -> dict[tuple[str, ...], str]:
    return {
        identity(mutant): group["why"]
        for group in json.loads(EXPLAINED.read_text(encoding="utf-8"))
        for mutant in group["mutants"]
    }


def _commit(root: Path) -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip()
