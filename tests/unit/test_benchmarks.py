"""Each benchmark runs at a tiny size; its measured figures are not checked."""

import json
import random

import bench_control
import bench_copy
import bench_peers
import bench_rectangles
import bench_serve
import bench_step
import bench_store
import bench_tiers
import bench_ttft
import measuring
import pytest
import torch
from clocks import ManualClock
from memory_store import MemoryStore

from mamba_cache.tiers import lower


@pytest.fixture
def keep(tmp_path):
    """Return the options that make a benchmark write its result, and a function that reads it."""
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


def test_peers():
    measured = [
        *bench_peers.measure_lives(1),
        *bench_peers.measure_full_admissions(1, 600),
        *bench_peers.measure_memory([100]),
    ]
    assert {one.unit for one in measured} == {"us", "x", "bytes", "ms"}


def test_step():
    measured = [
        *bench_step.measure_decode_steps([1, 3], runs=3),
        *bench_step.measure_prompt_lives([(512, 256)], runs=2),
    ]
    assert [one.unit for one in measured] == [*6 * ["us", "x"], "ms"]


def test_rectangles(keep):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    options, read = keep
    bench_rectangles.main(["--family", "tiny", "--rounds", "1", *options])
    result = read()
    assert result["batch_stats"]["rectangles"] > 0
    assert {one["unit"] for one in result["measurements"]} == {"ms", "x"}


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
    monkeypatch.setattr(lower, "time", ManualClock())
    monkeypatch.setattr(bench_store, "open_store", lambda url: MemoryStore())
    options, read = keep
    bench_store.main(["--device", "cpu", "--small", "--store", "memory://", *options])
    assert len(read()["measurements"]) == 3


def test_ttft(keep):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    options, read = keep
    size = ["--prefix", "128", "--suffix", "16", "--rounds", "1"]
    bench_ttft.main(["--family", "tiny", *size, *options])
    result = read()
    assert result["failed"] == {}
    names = [one["name"] for one in result["measurements"]]
    assert "hit, 128 + 16 tokens" in names
    assert "hit, through generate_batch, 128 + 16 tokens" in names


def test_serve(keep):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    options, read = keep
    workloads = ["--workload", "mixed", "trainer", "--decode-rows", "2"]
    bench_serve.main(["--tiny", *workloads, "--max-requests", "6", *options])
    result = read()
    assert result["failed"] == {}
    equal = [one for one in result["measurements"] if "answers equal" in one["name"]]
    assert [one["value"] for one in equal] == [100.0] * 3
    names = [one["name"] for one in result["measurements"]]
    assert "generate_batch: first batch over the third" in names
    assert "all first tokens, 4 x (256 cached + 4 to 48), over equal lengths" in names
    fewest, most = result["workloads"]["mixed"]["prompt_tokens"]
    assert 256 < fewest < most
    [found] = result["workloads"]["trainer"]["ways"]["batch"]
    assert found["answers"] == found["of"] == 6


def test_mixed_lengths_are_as_many_tokens_as_equal_ones():
    lengths = bench_serve.mixed_lengths(random.Random(1), 64, 64, 1024, mean=256)
    assert sum(lengths) == 64 * 256
    assert 64 <= min(lengths) < 256 < max(lengths) <= 1024
    assert bench_serve.mixed_lengths(random.Random(1), 5, 16, 16, mean=16) == [16] * 5
