"""The first command of the README: its JSON, its table, its exit status."""

import importlib.util
import json
import subprocess
import sys

import pytest
from sources import ROOT

EXAMPLE = ROOT / "examples" / "prefix_reuse.py"
FIELDS = {
    "name": str,
    "prompt_tokens": int,
    "kv_matched_blocks": int,
    "state_matched_blocks": int,
    "skipped_tokens": int,
    "computed_tokens": int,
    "ttft_ms": float,
}


@pytest.fixture(scope="module")
def report():
    command = [sys.executable, str(EXAMPLE), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("prefix_reuse", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_request_has_its_fields(report, example):
    requests = report["requests"]
    assert len(requests) == len({request["name"] for request in requests}) == example.NUM_PROMPTS
    for request in requests:
        assert {name: type(request[name]) for name in FIELDS} == FIELDS
        assert request["skipped_tokens"] + request["computed_tokens"] == request["prompt_tokens"]
        assert request["state_matched_blocks"] <= request["kv_matched_blocks"]
        assert request["ttft_ms"] > 0


def test_outputs_match_and_half_of_the_prefill_is_skipped(report):
    assert report["outputs_match"] is True
    computed = sum(request["computed_tokens"] for request in report["requests"])
    needed = sum(request["prompt_tokens"] for request in report["requests"])
    assert report["prefill_tokens_computed"] == computed
    assert report["prefill_tokens_without_cache"] == needed
    assert computed <= needed / 2


def test_the_readme_says_how_much_is_skipped(report):
    skipped = 1 - report["prefill_tokens_computed"] / report["prefill_tokens_without_cache"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| {skipped:.0%}, the same tokens | `python examples/prefix_reuse.py` |" in readme


def test_each_scene_shows_what_it_is_there_for(report):
    skipped = {request["name"]: request["skipped_tokens"] for request in report["requests"]}
    kv_blocks = {request["name"]: request["kv_matched_blocks"] for request in report["requests"]}
    assert all(skipped[f"system prompt {n}"] > 2000 for n in (2, 3, 4))
    assert all(skipped[f"conversation {n}"] > 1000 for n in (2, 3, 4))
    assert kv_blocks["branch 2"] == kv_blocks["branch 3"] > 0
    assert skipped["branch 2"] == 0 < skipped["branch 3"]
    assert skipped["eviction 6: B"] == 0 < skipped["eviction 5: A"]


def test_outputs_that_differ_fail_the_script(example, monkeypatch, capsys, report):
    monkeypatch.setattr(example, "play", lambda: ({}, {}))
    monkeypatch.setattr(example, "report", lambda *_: report | {"outputs_match": False})
    monkeypatch.setattr(sys, "argv", ["prefix_reuse.py"])
    assert example.main() == 1
    assert "DO NOT AGREE" in capsys.readouterr().out


def test_the_table_names_every_request(example, capsys, report):
    example.show(report)
    printed = capsys.readouterr().out
    assert all(request["name"] in printed for request in report["requests"])
    assert all(len(line) <= 88 for line in printed.splitlines())
