"""``python docs/figures/tables.py`` writes measured times to first token into the pages.

A run with kernels is kept as ``ttft-FAMILY-kernels-GPU-DATE.json``, or with a word more before the
GPU where a family has several (``-kernels-conv-``). Runs of the reference path have no such word.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
GUIDE = ROOT / "docs" / "how-to" / "transformers.md"
README = ROOT / "README.md"
EXPECT = RESULTS / "expect.md"

COLUMNS = ("plain transformers", "miss", "second sighting", "hit", "next turn")
BARE = "the new tokens alone"
BEGIN, END = (
    "<!-- times with kernels, written by docs/figures/tables.py -->",
    "<!-- end of times -->",
)
SHOWN_FAMILY, SHOWN_PREFIX = "nemotron-h-8b", "16,128"


def kernel_runs(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the runs of the benchmark with kernels, by name."""
    paths = sorted(results.glob("ttft-*-kernels-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) | {"path": path} for path in paths]


def figures(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a run's measurements by name."""
    return {one["name"]: one for one in run["measurements"]}


def kernels(run: dict[str, Any]) -> str:
    """Return the packages that a run had kernels from."""
    sources = {source for source in run["kernels"].values() if "reference" not in source}
    return ", ".join(sorted(sources))


def rows(run: dict[str, Any]) -> list[str]:
    """Return a run's rows: family, kernels, tokens, and the times."""
    found = figures(run)
    lengths = [re.fullmatch(r"hit, (.*) tokens", name) for name in found]
    return [
        f"| {run['family']} | {kernels(run)} | {tokens[1]} | "
        + " | ".join(_time(found, f"{way}, {tokens[1]} tokens") for way in (*COLUMNS, BARE))
        + " |"
        for tokens in lengths
        if tokens and tokens[1][0].isdigit()
    ]


def chat_row(run: dict[str, Any]) -> str:
    """Return the row of a run's chat: the times to its first tokens together."""
    found = {
        name.partition("first tokens, ")[2]: one["value"]
        for name, one in figures(run).items()
        if "first tokens, " in name
    }
    plain, cached, bare = (found[way] for way in ("plain transformers", "through the cache", BARE))
    return (
        f"| {run['family']} | {kernels(run)} | {plain:,.0f} ms | {cached:,.0f} ms | "
        f"{bare:,.0f} ms | {cached / bare:.2f}x |"
    )


def block(runs: list[dict[str, Any]]) -> str:
    """Return what the guide says of runs with kernels; nothing if there are none."""
    if not runs:
        return ""
    settings = sorted({_setting(run) for run in runs})
    lines = [
        f"With kernels ({'; '.join(settings)}), medians of interleaved runs:",
        "",
        f"| family | kernels | cached + new tokens | {' | '.join(COLUMNS)} | {BARE} |",
        "|---" * (len(COLUMNS) + 4) + "|",
        *(row for run in runs for row in rows(run)),
    ]
    for run in runs:
        if one := figures(run).get("break-even"):
            lines += [
                "",
                f"{run['family']} with {kernels(run)}: hits win from {one['value']:,.0f} ",
            ]
            lines[-1] += f"cached tokens on ({one['detail']})."
    chats = [run for run in runs if "chat" in run]
    if chats:
        chat = chats[0]["chat"]
        lines += [
            "",
            f"A chat of {chat['users']} users who take {chat['turns']} turns each behind the same "
            f"{chat['system_tokens']:,}-token system prompt, all first tokens together:",
            "",
            f"| family | kernels | plain | through the cache | {BARE} | over those |",
            "|---|---|---|---|---|---|",
            *map(chat_row, chats),
        ]
    return "\n".join(lines) + "\n"


def expected_block(runs: list[dict[str, Any]]) -> str:
    """Return what the page about expectations says of runs with kernels."""
    ways = ("plain transformers", "miss", "hit", "next turn", "identical prompt")
    lines = [
        f"Time to first token with kernels ({'; '.join(sorted({_setting(run) for run in runs}))}):",
        "",
        f"| model | cached + new tokens | {' | '.join(ways)} | hit over plain |",
        "|---" * (len(ways) + 3) + "|",
    ]
    for run in runs:
        found = figures(run)
        for name in found:
            if tokens := re.fullmatch(r"hit, (\d.*) tokens", name):
                times = [_time(found, f"{way}, {tokens[1]} tokens") for way in ways]
                faster = found[f"hit, faster than plain, {tokens[1]} tokens"]["value"]
                cells = [run["family"], tokens[1], *times, f"{faster:.1f}x"]
                lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| model | kernels | a hit wins from | |", "|---|---|---|---|"]
    for run in runs:
        one = figures(run)["break-even"]
        lines.append(
            f"| {run['family']} | {kernels(run)} | {one['value']:,.0f} cached tokens "
            f"| {one['detail']} |"
        )
    return "\n".join(lines)


def shown_run(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the run that stands in the README: the one of the most kernels; None without any."""
    shown = [
        run
        for run in runs
        if run["family"] == SHOWN_FAMILY and f"hit, {SHOWN_PREFIX} + 256 tokens" in figures(run)
    ]
    return max(shown, key=lambda run: kernels(run).count(","), default=None)


def readme_row(run: dict[str, Any]) -> str:
    """Return the README's row: hit, plain and miss of the longest prefix."""
    found = figures(run)
    plain, hit, miss = (
        found[f"{way}, {SHOWN_PREFIX} + 256 tokens"]["value"]
        for way in ("plain transformers", "hit", "miss")
    )
    prefix = SHOWN_PREFIX.replace(",", "")
    return (
        f"| Time to first token, {SHOWN_PREFIX} cached + 256 new tokens, Nemotron-H-8B's shape in "
        f"bf16, transformers with kernels of {kernels(run)} "
        f"| {hit:,.0f} ms instead of {plain:,.0f} ms; a miss takes {miss / plain:.2f}x of that "
        f"| `python tests/benchmarks/bench_ttft.py --family {SHOWN_FAMILY} --prefix {prefix}` |"
    )


def write_tables() -> None:
    """Write the runs with kernels into the guide and the README, if there are any."""
    runs = kernel_runs()
    guide = GUIDE.read_text(encoding="utf-8")
    before, rest = guide.split(BEGIN)
    text = f"{before}{BEGIN}\n\n{block(runs)}\n{END}{rest.split(END)[1]}".replace("\n\n\n", "\n\n")
    GUIDE.write_text(text, encoding="utf-8")
    before, rest = EXPECT.read_text(encoding="utf-8").split(BEGIN)
    text = f"{before}{BEGIN}\n\n{expected_block(runs)}\n\n{END}{rest.split(END)[1]}"
    EXPECT.write_text(text, encoding="utf-8")
    if run := shown_run(runs):
        readme = README.read_text(encoding="utf-8")
        readme = re.sub(r"^\| Time to first token.*$", readme_row(run), readme, flags=re.MULTILINE)
        README.write_text(readme, encoding="utf-8")


def _time(found: dict[str, dict[str, Any]], name: str) -> str:
    return f"{found[name]['value']:,.0f} ms" if name in found else "out of memory"


def _setting(run: dict[str, Any]) -> str:
    gpu = run["machine"].rpartition(", ")[2]
    versions = run["versions"]
    date = run["path"].stem[-len("2026-01-01") :]
    return (
        f"one {gpu}, PyTorch {versions['torch']}, Triton {versions['triton']}, "
        f"transformers {versions['transformers']}, {date}"
    )


if __name__ == "__main__":
    write_tables()
