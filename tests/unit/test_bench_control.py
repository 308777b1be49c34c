"""The control benchmark: what it measures on small sizes, and what it prints."""

import json
import sys

import numpy as np
import pytest

from mamba_cache.bench import command
from mamba_cache.bench.control import (
    measure_admission,
    measure_allocate_slots,
    measure_chunk_metadata,
    measure_evict_and_allocate,
    measure_hash_chain,
)
from mamba_cache.bench.measure import Measurement, as_dicts, print_json

KEPT = Measurement("kept", 1.5, "us", limit=2)
MISSED = Measurement("missed", 1.5, "x", limit=2, at_least=True)


def test_a_limit_is_a_maximum_unless_it_is_a_minimum():
    assert [KEPT.passed, MISSED.passed] == [True, False]
    assert Measurement("equal", 2, "us", limit=2).passed
    assert Measurement("equal", 2, "x", limit=2, at_least=True).passed


def test_figures_of_numpy_are_printed_as_json(capsys):
    """What NumPy compares is no bool that JSON knows, and all was lost at the end of a long run."""
    [value] = np.median(np.array([[1.5], [1.5]]), axis=0)
    [one] = as_dicts([Measurement("kept", value, "us", limit=2)])
    print_json({"measurements": [one]})
    assert json.loads(capsys.readouterr().out)["measurements"] == [one]
    assert one["passed"] is True


def test_evict_and_allocate_is_measured_at_every_size(capsys):
    one, two, ratio = measure_evict_and_allocate((40, 80), num_blocks=4, runs=3)
    assert ("40" in one.name, "80" in two.name, one.limit) == (True, True, 60)
    assert one.value > 0
    assert ratio.value == two.value / one.value
    assert capsys.readouterr().out == ""


def test_hash_chains_are_measured_against_sha256():
    measured = list(measure_hash_chain(1_024, runs=2))
    assert [(one.limit, one.at_least) for one in measured] == [(4.0, True), (2.5, True)]
    assert all(one.value > 0 for one in measured)


def test_slots_are_measured_at_every_pool_size():
    measured = list(measure_allocate_slots((20, 30), max_slots=6, runs=2))
    assert ["20 KV" in measured[0].name, "30 KV" in measured[1].name] == [True, True]
    assert all(one.value > 0 and one.limit == 60 for one in measured)


def test_admission_is_measured_on_a_full_match():
    (measured,) = measure_admission(1_024, runs=2)
    assert measured.value > 0
    assert measured.limit == 500


def test_chunk_metadata_are_measured_on_a_batch_of_long_sequences():
    (measured,) = measure_chunk_metadata(3, 1_000, runs=2)
    assert "3 sequences of 1,000 tokens" in measured.name
    assert measured.value > 0
    assert measured.limit == 20_000


@pytest.fixture
def two_measurements(monkeypatch):
    two = command.Benchmark("two", lambda: [KEPT, MISSED])
    monkeypatch.setitem(command.BENCHMARKS, "control", two)


def test_json_holds_figures_and_limits(two_measurements, capsys):
    assert command.main(["control", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["benchmark"], result["passed"]) == ("control", False)
    assert [(m["value"], m["limit"], m["passed"]) for m in result["measurements"]] == [
        (1.5, 2, True),
        (1.5, 2, False),
    ]


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_table_says_what_was_missed(two_measurements, capsys, monkeypatch, has_rich):
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    command.main(["control"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "issed" in line]
    assert len(lines) == 1
    assert all(part in lines[0] for part in ("1.50 x", ">= 2 x", "MISSED"))


def test_an_unknown_benchmark_is_refused_by_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["contrl"])
    assert "got 'contrl'; did you mean 'control'?" in capsys.readouterr().err
