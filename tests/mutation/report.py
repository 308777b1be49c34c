"""What came of a search for mutants that survive, as plain values and as Markdown."""

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mutants import Mutant

__all__ = ["EQUIVALENT", "as_markdown", "summary"]

EQUIVALENT = Path(__file__).parent / "equivalent.json"


def summary(outcomes: dict[Mutant, str], root: Path) -> dict[str, Any]:
    """Counts outcomes by module, and lists the survivors with the reason where one is known."""
    reasons = _reasons()
    modules: dict[str, Counter[str]] = {}
    survivors = []
    for mutant, outcome in outcomes.items():
        was, becomes = mutant.change()
        file = mutant.file.relative_to(root).as_posix()
        why = reasons.get((file, mutant.function, was, becomes))
        counts = modules.setdefault(file, Counter())
        if outcome == "killed":
            counts["killed"] += 1
        else:
            counts["equivalent" if why else "survived"] += 1
            names = {"file": file, "line": min(mutant.lines), "function": mutant.function}
            survivors.append({**names, "was": was, "becomes": becomes, "why": why})
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join(["python", "tests/mutation", *sys.argv[1:]]),
        "commit": _commit(root),
        "modules": modules,
        "survivors": survivors,
    }


def as_markdown(result: dict[str, Any]) -> str:
    """Tables of the modules and, if there are any, of the survivors without an explanation."""
    lines = [
        "| module | mutants | killed | survived | equivalent | score |",
        "|---|--:|--:|--:|--:|--:|",
        *(_row(f"`{name}`", Counter(counts)) for name, counts in result["modules"].items()),
        _row("together", sum(map(Counter, result["modules"].values()), Counter())),
    ]
    unexplained = [survivor for survivor in result["survivors"] if survivor["why"] is None]
    for survivor in unexplained:
        lines += ["", f"{survivor['file']}:{survivor['line']} {survivor['function']}"]
        lines += [f"    - {survivor['was']}", f"    + {survivor['becomes']}"]
    return "\n".join(lines)


def _row(name: str, counts: Counter[str]) -> str:
    kinds = [counts[kind] for kind in ("killed", "survived", "equivalent")]
    score = 100 * counts["killed"] / max(sum(kinds), 1)
    return (
        f"| {name} | " + " | ".join(f"{n:,}" for n in (sum(kinds), *kinds)) + f" | {score:.1f}% |"
    )


def _reasons() -> dict[tuple[str, str, str, str], str]:
    """Why each equivalent mutant is one, by its file, its function and its change."""
    return {
        (mutant["file"], mutant["function"], mutant["was"], mutant["becomes"]): group["why"]
        for group in json.loads(EQUIVALENT.read_text(encoding="utf-8"))
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
