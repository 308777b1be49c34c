"""A benchmark that lacks what it needs says so in a line and exits with 2, by either command."""

import sys

import pytest
import torch

from mamba_cache import errors
from mamba_cache.bench.command import BENCHMARKS, Benchmark, main
from mamba_cache.cli.app import run as run_command


@pytest.fixture(params=["mamba-cache bench", "python -m mamba_cache.bench"])
def run(request, monkeypatch, capsys):
    """Runs a benchmark; returns its exit code and what it wrote to stderr."""

    def call(*arguments):
        if request.param == "mamba-cache bench":
            monkeypatch.setattr(sys, "argv", ["mamba-cache", "bench", *arguments])
            code = run_command()
        else:
            code = main(arguments, prog=request.param)
        out, err = capsys.readouterr()
        assert out == ""
        return code, err

    return call


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["copy"], "the copy benchmark times a GPU, and PyTorch finds none: run it where"),
        (["align"], "the align benchmark times a GPU, and PyTorch finds none: run it where"),
        (["ttft"], "this needs transformers >= 5.10: pip install"),
        (["serve"], "this needs transformers >= 5.10: pip install"),
        (["soak", "--device", "cuda:99"], "device must be one that PyTorch finds here"),
        (["soak", "--device", "grapefruit"], "device must be one that PyTorch finds here"),
        (["soak", "--minutes", "-1"], "minutes must be > 0"),
        (["replay", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_it_is_a_line_with_the_remedy(run, monkeypatch, arguments, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, err = run(*arguments)
    [line] = err.splitlines()
    assert (code, said in line) == (2, True)


@pytest.mark.parametrize("prog", ["mamba-cache bench", "python -m mamba_cache.bench"])
def test_no_name_shows_what_there_is(prog, capsys):
    assert main([], prog=prog) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"usage: {prog} [-h] NAME")) == ("", True)
    assert all(f"    {name} " in err or f"    {name}\n" in err for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgumentError("seven"), 2),
        (errors.UnsupportedVersionError("seven"), 2),
        (errors.BudgetError("seven"), 1),
        (errors.InvariantError("seven"), 1),
    ],
)
def test_an_error_is_a_line_and_an_exit_code(run, monkeypatch, error, code):
    def fail():
        raise error

    monkeypatch.setitem(BENCHMARKS, "control", Benchmark("fail", fail))
    given, err = run("control")
    assert (given, err.endswith("bench: seven\n"), err.count("\n")) == (code, True, 1)
