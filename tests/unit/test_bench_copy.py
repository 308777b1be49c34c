"""The benchmark of copies, tiny and on the CPU: bits are compared, figures have their names."""

import json
from dataclasses import replace

import pytest
import torch
from sources import ROOT

from mamba_cache.bench import copy
from mamba_cache.reference import HybridModelConfig
from mamba_cache.states import StateSpec

TINY = {"_DEVICE": "cpu", "_CONV_DIM": 24, "_SSM": (3, 8, 16), "_TOKENS": 1024, "_CHECKPOINTS": 4}


@pytest.fixture
def tiny(monkeypatch):
    """The benchmark, which calls what it times once and finds that it took 10 us."""

    def measure(calls):
        for call in calls:
            call()
        return 10.0

    for name, value in TINY.items():
        monkeypatch.setattr(copy, name, value)
    spec = StateSpec.mamba(2, (24, 4), (3, 8, 16), torch.bfloat16, torch.float32)
    monkeypatch.setattr(copy, "SHAPES", [replace(shape, spec=spec) for shape in copy.SHAPES])
    monkeypatch.setattr(copy, "_MODEL", HybridModelConfig(layer_pattern="M-", ssm_chunk_size=128))
    monkeypatch.setattr(copy, "check_gpu", lambda benchmark: None)
    monkeypatch.setattr(copy, "device_us", lambda calls, runs=1: measure(calls))
    monkeypatch.setattr(copy, "host_us", lambda call, runs=1: measure([call]))
    monkeypatch.setattr(copy, "_memory_taken", lambda layer: 0)
    return copy


def test_the_figures_are_those_of_the_run_that_is_kept(tiny):
    [path] = (ROOT / "docs" / "benchmarks").glob("copy-h200-*.json")
    kept = [one["name"] for one in json.loads(path.read_text(encoding="utf-8"))["measurements"]]
    sizes = [("64 checkpoints", "4 checkpoints"), ("16,384 tokens", "1,024 tokens")]
    for large, small in sizes:
        kept = [name.replace(large, small) for name in kept]
    assert [one.name for one in tiny.run_copy()] == kept


@pytest.mark.parametrize("copier", ["StateCopier", "StateQuantizer", "extract_checkpoint_states"])
def test_wrong_bits_are_noticed_before_anything_is_timed(tiny, copier, monkeypatch):
    class DoesNothing:
        def __init__(self, *_, **__):
            pass

        def copy(self, *_):
            pass

    monkeypatch.setattr(copy, copier, DoesNothing)
    with pytest.raises(AssertionError):
        tiny.run_copy()
