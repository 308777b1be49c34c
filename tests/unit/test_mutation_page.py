"""The page on mutants quotes the run beside it, and what is explained is still there."""

import json

import pytest
from mutation.report import EXPLAINED, as_markdown
from sources import ROOT

FOLDER = ROOT / "docs" / "explanation"
GROUPS = json.loads(EXPLAINED.read_text(encoding="utf-8"))


def test_the_page_quotes_its_run() -> None:
    [run] = FOLDER.glob("mutation-*.json")
    result = json.loads(run.read_text(encoding="utf-8"))
    page = (FOLDER / "mutation.md").read_text(encoding="utf-8")
    tables = [line for line in as_markdown(result).splitlines() if line.startswith("|")]
    assert [line for line in tables if line not in page.splitlines()] == []
    for said in (result["machine"], result["python"], result["date"], result["commit"]):
        assert said in page


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["why"][:40])
def test_explained_mutants_change_lines_that_are_there(group: dict) -> None:
    for mutant in group["mutants"]:
        source = " ".join((ROOT / mutant["file"]).read_text(encoding="utf-8").split())
        assert mutant["was"] in source
