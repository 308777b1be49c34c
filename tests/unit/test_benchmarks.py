"""Each benchmark runs, at a tiny size: what it measures is looked at by people."""

import json

import bench_control
import bench_copy
import bench_serve
import bench_step
import bench_store
import bench_tiers
import bench_ttft
import measuring
import pytest
import torch
from clocks import ManualClock

from mamba_cache.tiers import remote


@pytest.fixture
def keep(tmp_path):
    """The options with which a benchmark writes its result, and a function that reads it."""
    path = tmp_path / "result.json"

    def read():
        return json.loads(path.read_text(encoding="utf-8"))

    return ["--json", str(path)], read


def test_control(keep):
    options, read = keep
    measured = [
        *bench_control.measure_evict_and_allocate([50, 100], runs=3),
        *bench_control.measure_allocate_slots([200], max_slots=20, runs=3),
        *bench_control.measure_hash_chain(1024, runs=2),
        *bench_control.measure_admission(1024, runs=2),
        *bench_control.measure_chunk_metadata(4, 1024, runs=2),
    ]
    measuring.report("control", measured, options[-1])
    assert len(read()["measurements"]) == 8


def test_step():
    measured = [
        *bench_step.measure_decode_steps([1, 3], runs=3),
        *bench_step.measure_prompt_lives([(512, 256)], runs=2),
    ]
    assert [one.unit for one in measured] == ["us", "x", "us", "x", "us", "x", "us", "x", "ms"]


def test_copy_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_copy.py"])
    with pytest.raises(SystemExit, match="times a GPU"):
        bench_copy.main()


def test_tiers(keep, tmp_path):
    options, read = keep
    parts = ["--only", "copies", "first", "disk", "ready", "--disk-path", str(tmp_path)]
    bench_tiers.main(["--device", "cpu", "--small", "--ready-gb", "0.01", *parts, *options])
    names = [one["name"] for one in read()["measurements"]]
    assert "the disk alone" in names
    assert "first token after 4,096 tokens from the host: over one from the GPU" in names


def test_store(keep, monkeypatch):
    monkeypatch.setattr(remote, "time", ManualClock())
    options, read = keep
    bench_store.main(["--device", "cpu", "--small", *options])
    assert len(read()["measurements"]) == 3


def test_ttft(keep):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    options, read = keep
    size = ["--prefix", "128", "--suffix", "16", "--rounds", "1"]
    bench_ttft.main(["--family", "tiny", *size, *options])
    result = read()
    assert result["failed"] == {}
    assert "hit, 128 + 16 tokens" in [one["name"] for one in result["measurements"]]


def test_serve(keep):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    options, read = keep
    bench_serve.main(["--tiny", "--workload", "shared", "--decode-rows", "2", *options])
    result = read()
    assert result["failed"] == {}
    equal = [one for one in result["measurements"] if "answers equal" in one["name"]]
    assert [one["value"] for one in equal] == [100.0, 100.0, 100.0]
