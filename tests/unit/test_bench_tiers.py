"""The benchmark of tiers, where it has nothing but a CPU."""

import json
from pathlib import Path

import pytest

from mamba_cache.bench.command import main


def test_it_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tiers", "--small", "--device", "cpu", "--ready-gb", "0.001", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in result["measurements"]]
    assert len(names) == len(set(names)) == 15
    assert all(one["limit"] is None for one in result["measurements"])


def test_a_part_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--small", "--device", "cpu", "--only", "disk", "--disk-path", str(tmp_path)]
    assert main(["tiers", *arguments, "--json"]) == 0
    first, alone, share = json.loads(capsys.readouterr().out)["measurements"]
    assert first["name"].startswith("first token after 4,096 tokens from the disk")
    assert "prefetch" in first["detail"]
    assert (alone["name"], alone["unit"]) == ("the disk alone", "GB/s")
    assert "8 threads" in alone["detail"]
    assert (share["name"], share["unit"]) == ("prefetch: share of the disk's GB/s", "x")
    prefetch = float(share["detail"].split()[0])
    assert share["value"] * alone["value"] == pytest.approx(prefetch, abs=0.005)
    assert sorted(file.name for file in tmp_path.rglob("*.slab")) == ["kv.slab", "states.slab"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nowhere"], "device must be one that PyTorch finds"),
        (["--device", "meta"], "device must be"),
        (["--ready-gb", "0"], "ready_gb must be a number above 0"),
    ],
)
def test_what_it_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiers", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
