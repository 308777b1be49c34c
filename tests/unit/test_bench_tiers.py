"""The benchmark of tiers, where it has nothing but a CPU."""

import json

import pytest

from mamba_cache.bench.command import main


def test_it_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tiers", "--small", "--device", "cpu", "--ready-gb", "0.001", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in result["measurements"]]
    assert len(names) == len(set(names)) == 9
    assert all(one["limit"] is None for one in result["measurements"])


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
