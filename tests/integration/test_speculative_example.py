"""The example of speculative decoding: its JSON, its table, its exit status."""

import contextlib
import importlib.util
import io
import json
import sys

import pytest
from sources import ROOT

EXAMPLE = ROOT / "examples" / "speculative_decoding.py"


@pytest.fixture(scope="module")
def example():
    """The script, which answers one text here."""
    spec = importlib.util.spec_from_file_location("speculative_decoding", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks up its annotations
    spec.loader.exec_module(module)
    module.TEXTS = module.TEXTS[1:2]
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def report(example):
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        patch.setattr(sys, "argv", [str(EXAMPLE), "--json"])
        assert example.main() == 0
    assert stderr.getvalue() == ""
    return json.loads(stdout.getvalue())


def test_drafts_save_steps_and_change_no_token(report):
    assert report["outputs_match"] is True
    plain = {run["sampling"]: run for run in report["runs"] if run["num_speculative_tokens"] == 0}
    assert plain.keys() == {"greedy", "drawn"}
    assert len(report["runs"]) == 6
    for run in report["runs"]:
        without = plain[run["sampling"]]
        assert run["tokens"] == run["steps"] + run["accepted_tokens"] == without["steps"]
        if run is not without:
            assert run["tokens_per_step"] > 1.3
            assert run["accepted_tokens"] <= run["drafted_tokens"]


def test_the_second_turn_resumes_behind_the_first_answer(report, example):
    prompts = len(example.TEXTS) * example.PROMPT_TOKENS
    assert all(run["skipped_tokens"] > prompts for run in report["runs"])


def test_answers_that_differ_are_noticed(example):
    def outcome(token):
        return example.Outcome([(1, token)], example.DecodingStats(), 0, 1.0)

    same = {("greedy", 0): outcome(2), ("greedy", 3): outcome(2), ("drawn", 0): outcome(9)}
    assert example.report(same)["outputs_match"] is True
    assert example.report(same | {("greedy", 3): outcome(3)})["outputs_match"] is False


def test_outputs_that_differ_fail_the_script(example, monkeypatch, capsys, report):
    monkeypatch.setattr(example, "play", dict)
    monkeypatch.setattr(example, "report", lambda _: report | {"outputs_match": False})
    monkeypatch.setattr(sys, "argv", ["speculative_decoding.py"])
    assert example.main() == 1
    assert "DO NOT AGREE" in capsys.readouterr().out


def test_the_table_has_a_row_for_each_run(example, capsys, report):
    example.show(report)
    printed = capsys.readouterr().out
    assert printed.count("up to") == len(report["runs"])
    assert all(len(line) <= 88 for line in printed.splitlines())
