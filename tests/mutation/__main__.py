"""Mutation check of the control plane: ``python tests/mutation``.

Needs the extra ``mutation``. Prints Markdown, and fails if a mutant survives that
``explained.json`` does not explain.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mutants import Mutant, mutants_of
from report import as_markdown, described, identity, summary
from search import Search

ROOT = Path(__file__).resolve().parents[2]
CONTROL_PLANE = (
    *("blocks", "slots", "context", "metadata", "integrations/vllm/mamba2_attention.py"),
    *("config.py", "errors.py", "protocols.py", "_checks.py", "_eviction_queue.py", "_guard.py"),
)
TESTS = (
    "tests/conformance",
    "tests/property",
    "tests/unit",
    "tests/integration/test_distributed.py",
)
# Of other packages, of the text of files, or striking everywhere, which takes too long.
OTHER_TESTS = (
    *("align", "bench", "engine", "extraction", "model", "plan.", "prometheus", "state_copy"),
    *("docs", "property/test_faults", "property/test_interrupts", "figures", "fuzz.", "layers"),
    *("package", "peers", "readme", "style"),
)

# Other processes know no mutant.
CHOSEN = "not all_ranks and not every_rank and not shards_join"


def main() -> int:
    """Makes the mutants, tries them, and reports."""
    args = _parse()
    if args.report:
        print(as_markdown(json.loads(args.report.read_text(encoding="utf-8"))))
        return 0
    os.chdir(ROOT)
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    before = json.loads(args.again.read_text(encoding="utf-8")) if args.again else None
    mutants = _mutants(args, before)
    search = Search(mutants, args.processes, args.seconds, args.minutes)
    began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*_options(), *args.tests], plugins=[search])
    if status:
        return int(status)
    result = summary(search.outcomes, ROOT, before)
    result["untried"] = len(mutants) - len(search.outcomes)
    result["minutes"] = round((time.monotonic() - began) / 60, 1)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(as_markdown(result))
    return int(any(survivor["why"] is None for survivor in result["survivors"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__)
    parser.add_argument("paths", nargs="*", default=CONTROL_PLANE, help="inside mamba_cache")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of tests")
    parser.add_argument("--processes", type=int, default=2, help="mutants tried at once")
    parser.add_argument("--seconds", type=float, default=20, help="of tests, at most, per mutant")
    parser.add_argument("--minutes", type=float, help="try mutants so long: a sample by chance")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants' order")
    parser.add_argument("--again", type=Path, help="result whose survivors alone to try again")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    parser.add_argument("--report", type=Path, help="print such a file as Markdown, and stop")
    return parser.parse_args()


def _options() -> list[str]:
    ignored = [f"--ignore-glob=*{name}*" for name in OTHER_TESTS]
    quiet = ["-qq", "--capture=sys", "--tb=short", "-p", "no:cacheprovider"]
    return [*quiet, "--seed=0", "-k", CHOSEN, *ignored]


def _mutants(args: argparse.Namespace, before: dict[str, Any] | None) -> list[Mutant]:
    mutants = [m for name in args.paths for file in _files(name) for m in mutants_of(file)]
    if before is not None:
        survivors = {identity(survivor) for survivor in before["survivors"]}
        mutants = [mutant for mutant in mutants if identity(described(mutant, ROOT)) in survivors]
    random.Random(args.seed).shuffle(mutants)
    return mutants


def _files(name: str) -> list[Path]:
    path = ROOT / "mamba_cache" / name
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


if __name__ == "__main__":
    sys.exit(main())
