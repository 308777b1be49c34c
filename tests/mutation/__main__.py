"""Mutation check of the control plane: ``python tests/mutation``.

Needs the extra ``mutation``. Prints Markdown, and fails if a mutant survives that no comment
explains.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant, mutants_of
from search import Search

ROOT = Path(__file__).resolve().parents[2]
CONTROL_PLANE = (
    *("blocks", "slots", "stores", "tiers", "context", "metadata"),
    *("integrations/vllm/mamba2_attention.py", "config.py", "errors.py", "protocols.py"),
    *("_checks.py", "_eviction_queue.py", "_extras.py", "_guard.py", "_in_flight.py"),
    *("_indices.py", "_inference_mode.py", "_observers.py", "_weak_callback.py"),
)
TESTS = (
    "tests/conformance",
    "tests/property",
    "tests/unit",
    "tests/integration/test_distributed.py",
    "tests/integration/test_state_kinds.py",
    "tests/integration/test_stores.py",
)
# Of other packages, of the text of files, or striking everywhere, which takes too long.
OTHER_TESTS = (
    *("align", "bench", "extraction", "model_", "plan.", "prometheus", "state_copy"),
    *("docs", "property/test_faults", "interrupts.py", "figures", "layers"),
    *("package", "peers", "readme", "style"),
)

# Other processes know no mutant; and a test that puts a fault in by itself says what tests notice.
LEFT_OUT = (
    *("test_all_ranks", "test_every_rank", "shards_join", "hold_other_things"),
    *("ranks_that_do_not_agree", "a_fault_of_the_tiers", "decide_alone_diverge"),
)
CHOSEN = " and ".join(f"not {name}" for name in LEFT_OUT)


def main() -> int:
    """Makes the mutants, tries them, and reports."""
    args = _parse()
    os.chdir(ROOT)
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    mutants = [
        mutant for name in args.paths for file in _files(name) for mutant in mutants_of(file)
    ]
    random.Random(args.seed).shuffle(mutants)
    search = Search(mutants, args.processes, args.seconds, args.minutes)
    began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*_options(), *args.tests], plugins=[search])
    if status:
        return int(status)
    result = _summary(search.outcomes)
    result["untried"] = len(mutants) - len(search.outcomes)
    result["minutes"] = round((time.monotonic() - began) / 60, 1)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(_as_markdown(result))
    return int(any(survivor["why"] is None for survivor in result["survivors"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__)
    parser.add_argument("paths", nargs="*", default=CONTROL_PLANE, help="inside mamba_cache")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of tests")
    parser.add_argument("--processes", type=int, default=2, help="mutants tried at once")
    parser.add_argument("--seconds", type=float, default=20, help="of tests, at most, per mutant")
    parser.add_argument("--minutes", type=float, help="try mutants so long: a sample by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants' order")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    return parser.parse_args()


def _options() -> list[str]:
    ignored = [f"--ignore-glob=*{name}*" for name in OTHER_TESTS]
    quiet = ["-qq", "--capture=sys", "--tb=short", "-p", "no:cacheprovider"]
    return [*quiet, "--seed=0", "-k", CHOSEN, *ignored]


def _files(name: str) -> list[Path]:
    path = ROOT / "mamba_cache" / name
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


def _summary(outcomes: dict[Mutant, str]) -> dict[str, Any]:
    """Counts outcomes by module, and lists the survivors with the reason if a comment has one."""
    modules: dict[str, Counter[str]] = {}
    survivors = []
    for mutant, outcome in outcomes.items():
        file = mutant.file.relative_to(ROOT).as_posix()
        counts = modules.setdefault(file, Counter())
        if outcome in ("killed", "stopped"):
            counts["killed"] += 1
            counts["stopped"] += outcome == "stopped"
            continue
        counts["explained" if mutant.why else "survived"] += 1
        was, becomes = mutant.change()
        place = {"file": file, "line": min(mutant.lines), "function": mutant.function}
        survivors.append({**place, "was": was, "becomes": becomes, "why": mutant.why})
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join(["python", "tests/mutation", *sys.argv[1:]]),
        "commit": commit,
        "modules": dict(sorted(modules.items())),
        "survivors": sorted(survivors, key=lambda survivor: (survivor["file"], survivor["line"])),
    }


def _as_markdown(result: dict[str, Any]) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
