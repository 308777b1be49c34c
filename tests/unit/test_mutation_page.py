"""The page on mutants quotes the sample beside it."""

import json
from collections import Counter

from sources import ROOT

FOLDER = ROOT / "docs" / "explanation"


def test_the_page_quotes_its_sample() -> None:
    [run] = FOLDER.glob("mutation-*.json")
    result = json.loads(run.read_text(encoding="utf-8"))
    page = (FOLDER / "mutation.md").read_text(encoding="utf-8")
    total = sum(map(Counter, result["modules"].values()), Counter())
    explained, killed, survived = (total[kind] for kind in ("explained", "killed", "survived"))
    number = killed + survived + explained
    assert len(result["survivors"]) == explained + survived
    for said in (
        *(result[key] for key in ("machine", "python", "date", "commit")),
        f"Of {number:,} mutants {killed:,} were noticed",
        f"{explained} were explained: {(killed + explained) / number:.1%} of all",
        f"the other {survived} ",
    ):
        assert said in page
