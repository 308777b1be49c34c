"""Mutation check of the control plane: ``python tests/mutation``.

Needs the extra ``mutation``. Prints Markdown, and fails if a mutant survives that
``explained.json`` does not explain.
"""

import argparse
import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from mutants import Mutant, mutants_of
from search import Search

ROOT = Path(__file__).resolve().parents[2]
CONTROL_PLANE = (
    *("cache", "slots", "stores", "tiers", "context", "metadata"),
    *("integrations/vllm/mamba2_attention.py", "config.py", "errors.py", "protocols.py"),
    *("_checks.py", "_extras.py", "_guard.py", "_torch.py", "events.py"),
)
TESTS = (
    "tests/conformance",
    "tests/property",
    "tests/unit",
    "tests/integration/test_engine.py",
    "tests/integration/test_restarts.py",
    "tests/integration/test_distributed.py",
    "tests/integration/test_state_kinds.py",
    "tests/integration/test_stores.py",
)
KINDS = ("mutants", "noticed", "explained", "neither")
# Tests of other packages (ZeroMQ's threads end in a fork), or of the text of files.
OTHER_TESTS = (
    *("align", "bench", "extraction", "kv_events", "model_", "plan.", "prometheus", "state_copy"),
    *("docs", "figures", "layers"),
    *("package", "peers", "readme", "style"),
)

# Tests in other processes, which run without the mutant.
LEFT_OUT = ("test_all_ranks", "test_every_rank", "shards_join", "ranks_that_do_not_agree")
CHOSEN = " and ".join(f"not {name}" for name in LEFT_OUT)


def main() -> int:
    """Make the mutants, try them, and report."""
    args = _parse()
    os.chdir(ROOT)
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    mutants = [
        mutant for name in args.paths for file in _files(name) for mutant in mutants_of(file)
    ]
    random.Random(args.seed).shuffle(mutants)
    search = Search(mutants, args.processes, args.seconds)
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*_options(), *args.tests], plugins=[search])
    return int(status) or _report(search.outcomes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__)
    parser.add_argument("paths", nargs="*", default=CONTROL_PLANE, help="inside mamba_cache")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of tests")
    parser.add_argument("--processes", type=int, default=2, help="mutants tried at once")
    parser.add_argument("--seconds", type=float, default=20, help="of tests, at most, per mutant")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants' order")
    return parser.parse_args()


def _options() -> list[str]:
    ignored = [f"--ignore-glob=*{name}*" for name in OTHER_TESTS]
    quiet = ["-qq", "--capture=sys", "--tb=short", "-p", "no:cacheprovider"]
    return [*quiet, "--seed=0", "-k", CHOSEN, *ignored]


def _files(name: str) -> list[Path]:
    path = ROOT / "mamba_cache" / name
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


def _report(outcomes: dict[Mutant, str]) -> int:
    """Print counts by module, reasons of explained survivors, and unexplained survivors."""
    modules: dict[str, Counter[str]] = {}
    whys: Counter[str] = Counter()
    unexplained = []
    for mutant, outcome in outcomes.items():
        is_noticed = outcome in ("killed", "stopped")
        kind = "noticed" if is_noticed else "explained" if mutant.why else "neither"
        name = mutant.file.relative_to(ROOT).as_posix()
        modules.setdefault(name, Counter()).update(("mutants", kind))
        if kind == "explained":
            whys[str(mutant.why)] += 1
        elif kind == "neither":
            was, becomes = mutant.change()
            place = f"{name}:{min(mutant.lines)} {mutant.function}"
            unexplained.append(f"\n{place}\n    - {was}\n    + {becomes}")
    print("| module | mutants | noticed | explained | neither | score |\n|---|--:|--:|--:|--:|--:|")
    for name, counts in sorted(modules.items()):
        print(_row(f"`{name}`", counts))
    print(_row("together", sum(modules.values(), Counter())))
    if whys:
        print("\n| survivors | why no test notices them |\n|--:|---|")
    for why, count in whys.most_common():
        print(f"| {count} | {why} |")
    print("\n".join(sorted(unexplained)))
    return int(bool(unexplained))


def _row(name: str, counts: Mapping[str, int]) -> str:
    """Return a row of the table. Noticed and explained mutants count towards the score."""
    score = (counts["noticed"] + counts["explained"]) / max(counts["mutants"], 1)
    return f"| {name} | " + " | ".join(f"{counts[kind]:,}" for kind in KINDS) + f" | {score:.1%} |"


if __name__ == "__main__":
    sys.exit(main())
