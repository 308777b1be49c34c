"""The page on mutants quotes the sample beside it."""

import json

from sources import ROOT

FOLDER = ROOT / "docs" / "explanation"
KINDS = ("mutants", "noticed", "explained", "neither")


def test_the_page_quotes_its_sample() -> None:
    [run] = FOLDER.glob("mutation-*.json")
    result = json.loads(run.read_text(encoding="utf-8"))
    page = (FOLDER / "mutation.md").read_text(encoding="utf-8")
    parts = result["parts"]
    for part in parts:
        whys = [survivor["why"] for survivor in part["survivors"]]
        assert part["neither"] == whys.count(None)
        assert part["explained"] == len(whys) - part["neither"]
        assert part["mutants"] == part["noticed"] + len(whys)
    together = {kind: sum(part[kind] for part in parts) for kind in KINDS}
    for said in (
        *(result[key] for key in ("machine", "python", "date", "commit")),
        *(f"seed {part['seed']}" for part in parts),
        *(_row(part["part"], part) for part in parts),
        _row("together", together),
    ):
        assert said in page


def _row(name: str, counts: dict[str, int]) -> str:
    score = (counts["noticed"] + counts["explained"]) / counts["mutants"]
    return f"| {name} | {' | '.join(f'{counts[kind]:,}' for kind in KINDS)} | {score:.1%} |"
