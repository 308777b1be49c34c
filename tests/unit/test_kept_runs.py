"""Commands in ``tests/`` write what they printed as docs/benchmarks keeps it."""

import json

from kept_runs import keep


def test_a_run_says_what_it_was_called_with_and_what_it_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["tests/table.py", "--count", "3"])
    keep(tmp_path / "out.json", ("call", "wrong"), [("a call", 7)], none_of={"wrong": 7})
    keep(None, ("call",), [("a call",)])
    kept = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (kept["benchmark"], kept["arguments"]) == ("table", ["--count", "3"])
    assert kept["records"] == [{"call": "a call", "wrong": 7}]
    assert kept["none_of"] == {"wrong": 7}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
