"""Mutation check of the control plane: ``python tests/mutation``.

Needs the extra ``mutation``. Prints Markdown, and fails if a mutant survives that
``explained.json`` does not explain.
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
from collections.abc import Mapping
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
    *("_checks.py", "_eviction_queue.py", "_extras.py", "_guard.py"),
    *("_indices.py", "_inference_mode.py", "_precision.py", "_weak_callback.py", "events.py"),
)
TESTS = (
    "tests/conformance",
    "tests/property",
    "tests/unit",
    "tests/integration/test_disk_restart.py",
    "tests/integration/test_distributed.py",
    "tests/integration/test_state_kinds.py",
    "tests/integration/test_stores.py",
)
PARTS = {
    "slots, blocks, modules beside them": (),  # what no other part has
    "context, metadata": ("context/", "metadata/", "integrations/"),
    "tiers, stores": ("tiers/", "stores/"),
}
KINDS = ("mutants", "noticed", "explained", "neither")
# Of other packages (ZeroMQ's threads end in a fork), of the text of files, or striking everywhere,
# which takes too long.
OTHER_TESTS = (
    *("align", "bench", "extraction", "kv_events", "model_", "plan.", "prometheus", "state_copy"),
    *("docs", "property/test_faults", "figures", "layers"),
    *("mutation_page", "package", "peers", "readme", "style"),
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
    if args.again:
        mutants = _survivors_of(args.again, mutants)
    random.Random(args.seed).shuffle(mutants)
    search = Search(mutants, args.processes, args.seconds, args.minutes)
    began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*_options(), *args.tests], plugins=[search])
    if status:
        return int(status)
    result = _summary(search.outcomes, args.seed)
    result["untried"] = len(mutants) - len(search.outcomes)
    result["minutes"] = round((time.monotonic() - began) / 60, 1)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(_as_markdown(result))
    return int(any(part["neither"] for part in result["parts"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__)
    parser.add_argument("paths", nargs="*", default=CONTROL_PLANE, help="inside mamba_cache")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of tests")
    parser.add_argument("--processes", type=int, default=2, help="mutants tried at once")
    parser.add_argument("--seconds", type=float, default=20, help="of tests, at most, per mutant")
    parser.add_argument("--minutes", type=float, help="try mutants so long: a sample by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants' order")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    parser.add_argument("--again", type=Path, help="such a file: try what it does not explain")
    return parser.parse_args()


def _options() -> list[str]:
    ignored = [f"--ignore-glob=*{name}*" for name in OTHER_TESTS]
    quiet = ["-qq", "--capture=sys", "--tb=short", "-p", "no:cacheprovider"]
    return [*quiet, "--seed=0", "-k", CHOSEN, *ignored]


def _files(name: str) -> list[Path]:
    path = ROOT / "mamba_cache" / name
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


def _survivors_of(file: Path, mutants: list[Mutant]) -> list[Mutant]:
    parts = json.loads(file.read_text(encoding="utf-8"))["parts"]
    listed = {
        (one["file"], one["was"], one["becomes"])
        for part in parts
        for one in part["survivors"]
        if one["why"] is None
    }
    return [mutant for mutant in mutants if (_name(mutant), *mutant.change()) in listed]


def _name(mutant: Mutant) -> str:
    return mutant.file.relative_to(ROOT).as_posix()


def _summary(outcomes: dict[Mutant, str], seed: int) -> dict[str, Any]:
    """Counts outcomes by module and part, and lists the survivors with the reason if there is one.

    Noticed are those that were killed or stopped, explained those in ``explained.json``.
    """
    modules: dict[str, Counter[str]] = {}
    survivors: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    totals = {part: Counter(dict.fromkeys(KINDS, 0)) for part in PARTS}
    for mutant, outcome in outcomes.items():
        file = _name(mutant)
        part = _part_of(file)
        is_noticed = outcome in ("killed", "stopped")
        kind = "noticed" if is_noticed else "explained" if mutant.why else "neither"
        for counts in (modules.setdefault(file, Counter()), totals[part]):
            counts["mutants"] += 1
            counts[kind] += 1
        if not is_noticed:
            was, becomes = mutant.change()
            place = {"file": file, "line": min(mutant.lines), "function": mutant.function}
            survivors[part].append({**place, "was": was, "becomes": becomes, "why": mutant.why})
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    command = " ".join(["python", "tests/mutation", *sys.argv[1:]])
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit,
        "parts": [
            {
                "part": part,
                "seed": seed,
                "command": command,
                **totals[part],
                "survivors": sorted(found, key=lambda one: (one["file"], one["line"])),
            }
            for part, found in survivors.items()
            if totals[part]["mutants"]
        ],
        "modules": dict(sorted(modules.items())),
    }


def _part_of(file: str) -> str:
    rest, *named = PARTS
    inside = file.removeprefix("mamba_cache/")
    return next((part for part in named if inside.startswith(PARTS[part])), rest)


def _as_markdown(result: dict[str, Any]) -> str:
    """Tables of the modules and parts and, if there are any, of the survivors."""
    parts = result["parts"]
    together = sum((Counter({kind: part[kind] for kind in KINDS}) for part in parts), Counter())
    lines = [
        "| module | mutants | noticed | explained | neither | score |",
        "|---|--:|--:|--:|--:|--:|",
        *(_row(f"`{name}`", Counter(counts)) for name, counts in result["modules"].items()),
        *(_row(part["part"], part) for part in parts),
        _row("together", together),
    ]
    survivors = [survivor for part in parts for survivor in part["survivors"]]
    whys = Counter(survivor["why"] for survivor in survivors if survivor["why"])
    if whys:
        lines += ["", "| survivors | why no test notices them |", "|--:|---|"]
        lines += [f"| {count} | {why} |" for why, count in whys.most_common()]
    for survivor in survivors:
        if survivor["why"] is None:
            lines += ["", f"{survivor['file']}:{survivor['line']} {survivor['function']}"]
            lines += [f"    - {survivor['was']}", f"    + {survivor['becomes']}"]
    return "\n".join(lines)


def _row(name: str, counts: Mapping[str, int]) -> str:
    """What was noticed and what was explained count towards the score."""
    score = (counts["noticed"] + counts["explained"]) / max(counts["mutants"], 1)
    return f"| {name} | " + " | ".join(f"{counts[kind]:,}" for kind in KINDS) + f" | {score:.1%} |"


if __name__ == "__main__":
    sys.exit(main())
