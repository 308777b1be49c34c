"""Commands in ``tests/`` write what they printed as docs/benchmarks keeps it."""

import json
from pathlib import Path

import pytest
from kept_runs import keep


@pytest.mark.parametrize("given", [["--json", "out.json"], ["--json=out.json"]])
def test_a_run_says_how_to_repeat_it_and_whether_it_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    arguments = ["--only", "two words", *given, "--count", "3"]
    monkeypatch.setattr("sys.argv", ["tests/table.py", *arguments])
    rows = [("a call", 7)]
    keep(tmp_path / "out.json", ("call", "wrong"), rows, none_of={"wrong": 7, "hung": 0}, more=1)
    kept = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert kept["benchmark"] == "table"
    assert kept["command"] == 'python tests/table.py --only "two words" --count 3'
    assert kept["records"] == [{"call": "a call", "wrong": 7}]
    assert [one["passed"] for one in kept["measurements"]] == [False, True]
    assert (kept["passed"], kept["more"]) == (False, 1)


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keep(None, ("call",), [("a call",)])
    assert not list(tmp_path.iterdir())
