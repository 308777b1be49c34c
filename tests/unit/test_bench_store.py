"""The benchmark of stores, where there is no server."""

import json
import multiprocessing
from types import SimpleNamespace

import pytest
from clocks import ManualClock

from mamba_cache.bench import store as bench
from mamba_cache.bench.command import main
from mamba_cache.errors import MambaCacheError
from mamba_cache.tiers import remote


def test_it_moves_entries_through_a_store_in_memory(monkeypatch, capsys) -> None:
    monkeypatch.setattr(remote, "time", ManualClock())
    assert main(["store", "--small", "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in result["measurements"]]
    assert len(set(names)) == 3
    assert all(name.startswith("memory: ") for name in names)


def test_no_time_is_taken_of_what_is_wrong(monkeypatch, capsys) -> None:
    monkeypatch.setattr(remote, "time", ManualClock())
    monkeypatch.setattr(bench.np, "array_equal", lambda *_: False)
    assert main(["store", "--small", "--device", "cpu"]) == 1
    assert "brought other bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nowhere"], "device must be one that PyTorch finds"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--forward-ms", "-1"], "forward_ms must be a number"),
        (["--store", "nowhere"], "nowhere"),
    ],
)
def test_what_it_refuses(arguments, message, capsys) -> None:
    assert main(["store", "--small", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_process_that_ended_is_not_waited_for() -> None:
    # It says nothing: a worker of pytest-xdist talks through its standard output.
    with bench._Child(id) as child, pytest.raises(MambaCacheError, match="has ended early"):
        child.hear()
    assert not multiprocessing.active_children()


def test_steps_may_wait_for_a_model_that_is_elsewhere(monkeypatch) -> None:
    """Its states are saved and stored as those of a model that computes."""
    classes = []
    monkeypatch.setattr(
        bench.os, "sched_setscheduler", lambda *arguments: classes.append(arguments[:2])
    )
    told = []
    pipe = SimpleNamespace(send=told.append, recv=lambda: "go")
    setting = bench._Setting("memory://", "cpu", True, b"s", forward_seconds=0.0, is_real_time=True)
    bench._time_steps(pipe, setting, rounds=2, number=0)
    ready, (own, plain, num_stored) = told
    assert ready == "ready"
    assert len(own) == len(plain) == 2 * (bench._STEPS_A_ROUND - 1)
    assert num_stored >= 2 * 4  # of each prompt four blocks
    assert classes == [(0, bench.os.SCHED_FIFO | bench.os.SCHED_RESET_ON_FORK)]
