"""The align benchmark: it needs a GPU, and the documentation quotes the run that is kept."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from mamba_cache.bench import command
from mamba_cache.bench.align import REQUEST_COUNTS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["align", "copy"])
def test_without_a_gpu_nothing_is_timed(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([name]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"the {name} benchmark times a GPU, and PyTorch finds none: run it where" in line


@pytest.fixture
def kept_run():
    path = sorted((DOCS / "benchmarks").glob("align-h200-*.json"))[-1]
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_kept_run_keeps_its_limits(kept_run):
    limits = [one["limit"] for one in kept_run["measurements"] if one["limit"] is not None]
    assert kept_run["passed"]
    assert sorted(set(limits)) == [1.04, 1.08, 8]


def test_the_guide_quotes_the_kept_run(kept_run):
    guide = (DOCS / "how-to" / "block_tables.md").read_text(encoding="utf-8")
    values = {one["name"].split(":")[0]: one["value"] for one in kept_run["measurements"]}
    for name, layout, drafts in itertools.product(("pre-copy", "post-copy"), ("SD", "DS"), (0, 1)):
        cases = [
            f"{name}, {layout}, {count} requests, {drafts} drafts accepted"
            for count in REQUEST_COUNTS
        ]
        cells = [
            f"{name}, {layout}, {drafts} drafts accepted",
            *(f"{values[c]:.2f}" for c in cases),
        ]
        assert f"| {' | '.join(cells)} |" in guide
    steps = [value for name, value in values.items() if "no boundary crossed" in name]
    assert f"{min(steps):.1f} to {max(steps):.1f} us" in guide
