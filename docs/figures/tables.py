"""``python docs/figures/tables.py`` writes measured times to first token into the README.

The build of the pages writes the same figures, and more, to ``docs/benchmarks/tables``, which pages
include. A run with kernels is kept as ``ttft-FAMILY-kernels-GPU-DATE.json``; a run of the reference
path has no such word.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
BEGIN = "<!-- times to first token, written by docs/figures/tables.py -->"
END = "<!-- end of times -->"

WAYS = ("plain transformers", "miss", "second sighting", "hit", "next turn", "identical prompt")
BARE = "the new tokens alone"


def runs(*, with_kernels: bool) -> list[dict[str, Any]]:
    """Return the runs of the benchmark with kernels, or of the reference path, by name."""
    paths = sorted(RESULTS.glob("ttft-*.json"))
    chosen = [path for path in paths if ("-kernels-" in path.name) == with_kernels]
    return [json.loads(path.read_text(encoding="utf-8")) | {"path": path} for path in chosen]


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times(ways: tuple[str, ...]) -> str:
    """Return the times with kernels: a row for each family and number of cached tokens."""
    rows = []
    for run in runs(with_kernels=True):
        found = _figures(run)
        for tokens in _lengths(found):
            faster = found[f"hit, faster than plain, {tokens}"]["value"]
            cells = [_time(found, f"{way}, {tokens}") for way in ways]
            gpu = run["machine"].rpartition("NVIDIA ")[2].split()[0]
            if "causal_conv1d" in run["kernels"]["convolution"]:
                gpu += ", causal_conv1d"
            of_run = [f"{faster:.1f}x", f"{gpu}, {_date(run)}"]
            rows.append([run["family"], _bare_number(tokens), *cells, *of_run])
    return table(["model", "cached + new tokens", *ways, "plain over hit", "GPU, date"], rows)


def setting() -> str:
    """Return what the runs with kernels were made on, in a sentence."""
    gpus: dict[str, set[str]] = {}
    for run in runs(with_kernels=True):
        versions, gpu = run["versions"], run["machine"].rpartition(", ")[2]
        software = (
            f"PyTorch {versions['torch']}, Triton {versions['triton']}, transformers "
            f"{versions['transformers']}"
        )
        gpus.setdefault(software, set()).add(f"one {gpu}")
    return "; ".join(f"{' or '.join(sorted(each))}, {name}" for name, each in gpus.items())


def break_even() -> str:
    """Return from how many cached tokens on a hit wins, for each run with kernels."""
    rows = []
    for run in runs(with_kernels=True):
        one = _figures(run)["break-even"]
        sources = {source for source in run["kernels"].values() if "reference" not in source}
        won_from = f"{one['value']:,.0f} cached tokens"
        rows.append([run["family"], ", ".join(sorted(sources)), won_from, one["detail"]])
    return table(["model", "kernels", "a hit wins from", ""], rows)


def chats() -> str:
    """Return the times of chats: all first tokens of a run together."""
    rows = []
    for run in runs(with_kernels=True):
        if chat := run.get("chat"):
            found = {
                name.partition("first tokens, ")[2]: one["value"]
                for name, one in _figures(run).items()
                if "first tokens, " in name
            }
            ways = ("plain transformers", "through the cache", BARE)
            what = f"{chat['users']} users, {chat['turns']} turns, {chat['system_tokens']:,} shared"
            rows.append([run["family"], what, *(f"{found[way]:,.0f} ms" for way in ways)])
    return table(["model", "chat", "plain transformers", "through the cache", BARE], rows)


def reference() -> str:
    """Return the times of the reference path, which has no kernels."""
    rows = []
    for run in runs(with_kernels=False):
        found = _figures(run)
        family = re.fullmatch(r"ttft-(.*?)(-\d+k)?-h200-.*", run["path"].stem)
        for tokens in _lengths(found):
            cells = [_time(found, f"{way}, {tokens}") for way in WAYS[:2]]
            hit, alone = _time(found, f"hit, {tokens}"), _time(found, "forward of 256 tokens alone")
            rows.append([family[1], _bare_number(tokens), *cells, hit, alone])
    rows.sort(key=lambda row: (row[0], int(row[1].split()[0].replace(",", ""))))
    return table(["model", "cached + new tokens", *WAYS[:2], "hit", "256 tokens alone"], rows)


def fragments() -> dict[str, str]:
    """Return what pages include, by name."""
    made_on = f"Times to first token with kernels ({setting()}):"
    return {
        "ttft": f"{made_on}\n\n{times((*WAYS[:5], BARE))}",
        "expect": f"{made_on}\n\n{times(WAYS)}\n\n{break_even()}\n\n{chats()}",
        "reference": reference(),
        "whole_engine": whole_engine(),
    }


def whole_engine() -> str:
    """Return what was skipped by a whole engine and by this package, and how many answers agree."""
    (path,) = RESULTS.glob("whole-engine-*.json")
    run = json.loads(path.read_text(encoding="utf-8"))
    columns = list(run["records"][0])
    rows = [[f"{cell:,}" if type(cell) is int else cell for cell in record.values()]
            for record in run["records"]]  # fmt: skip
    kinds = [f"{name} {version}" for name, version in run["versions"].items()]
    blocks = f"blocks of {run['block_size_tokens']} tokens"
    made_on = "; ".join((run["machine"], ", ".join(kinds), blocks, _date({"path": path})))
    return f"{table(columns, rows)}\n\n({made_on})"


def readme_block() -> str:
    """Return what the README shows: each family and length."""
    return (
        f"{times(('plain transformers', 'miss', 'hit'))}\n\n({setting()}; random weights in bf16)"
    )


def write_readme() -> None:
    """Put the times where the README has them."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n\n{readme_block()}\n\n{END}{after}", encoding="utf-8")


def _figures(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in run["measurements"]}


def _lengths(found: dict[str, dict[str, Any]]) -> list[str]:
    matches = [re.fullmatch(r"hit, (\d.*tokens)", name) for name in found]
    return [match[1] for match in matches if match]


def _bare_number(tokens: str) -> str:
    return tokens.removesuffix(" tokens")


def _date(run: dict[str, Any]) -> str:
    return run["path"].stem[-len("2026-01-01") :]


def _time(found: dict[str, dict[str, Any]], name: str) -> str:
    return f"{found[name]['value']:,.0f} ms" if name in found else "out of memory"


if __name__ == "__main__":
    write_readme()
