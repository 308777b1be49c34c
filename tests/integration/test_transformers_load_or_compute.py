"""A prefix cache loads an entry only where that is faster than computing, and waits no longer."""

import math
import threading

import pytest
from clocks import ManualClock
from memory_store import MemoryStore
from notebook_rig import REUSABLE, ask, prompts
from transformers_rig import budgets, make_cache, make_model

from mamba_cache.context import prefetch, tiering
from mamba_cache.integrations.transformers import tiers as prefix_tiers
from mamba_cache.tiers import lower
from mamba_cache.tiers.disk import DiskStore

FAST = 1e4
"""Tokens a second: a prompt is computed in less time than any load here."""


class Reads(MemoryStore):
    """Counts reads of a disk and of this store; each advances the clock, and may be held."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.clock, self.count, self.gate = ManualClock(), 0, threading.Event()
        self._lock, read_blob = threading.Lock(), DiskStore._read
        monkeypatch.setattr(prefetch, "time", self.clock)
        monkeypatch.setattr(lower, "time", ManualClock())  # no answer of the store is overdue
        monkeypatch.setattr(
            DiskStore, "_read", lambda *args: (args[2] is None or self.turn(), read_blob(*args))[1]
        )

    def turn(self):
        with self._lock:
            self.count += 1
            self.clock.now += 0.1
        self.gate.wait()

    def get_many_into(self, keys, buffers):
        self.turn()
        return super().get_many_into(keys, buffers)


@pytest.fixture
def reads(monkeypatch):
    reads = Reads(monkeypatch)
    reads.gate.set()
    yield reads
    reads.gate.set()


@pytest.fixture(scope="module")
def model():
    return make_model("granite 4")


@pytest.fixture(params=["disk", "store"])
def open_cache(request, tmp_path, reads, model):
    """Opens caches over one disk or store, with a given compute rate; None: not measured."""
    below = {"disk_cache_path": tmp_path, "disk_cache_gb": 0.05}
    if request.param == "store":
        below = {"store": reads, "hash_secret": b"of this test"}

    def open_one(tokens_per_second=None, **settings):
        cache = make_cache(model, host_cache_gb=0.01, **below, **settings)
        planner = cache._store.tiers.planners.host
        if tokens_per_second is not None:  # in place of the measured rate
            planner.rates = planner.rates._replace(tokens_per_second=tokens_per_second)
        return cache

    return open_one


def lower_tier(cache):
    tiers = cache._store.tiers
    return tiers.lower_tiers[0]


def test_what_comes_too_late_is_computed_and_found_the_next_time(open_cache, reads, model) -> None:
    with open_cache() as first:
        answers, _ = ask(first, prompts())
    few = budgets(make_cache(model), slots=2, blocks=18)  # room for one prompt at a time
    with open_cache(FAST, **few) as second:
        reads.gate.clear()
        assert ask(second, prompts()[:1]) == (answers[:1], 0)
        assert reads.count
        reads.gate.set()
        lower_tier(second).flush()
        reads.gate.clear()  # nothing more is read
        assert ask(second, prompts()[1:]) == (answers[1:], 0)
        restored = second.tier_stats()[0].restored
        assert ask(second, prompts()[:1]) == (answers[:1], REUSABLE[0])
        assert second.tier_stats()[0].restored > restored
        reads.gate.set()


@pytest.mark.parametrize("open_cache", ["disk"], indirect=True)  # a store would be overdue
def test_a_load_that_never_ends_is_waited_for_once(open_cache, reads, monkeypatch) -> None:
    """The compute rate is unmeasured; while the load runs, no other load is begun."""
    with open_cache() as first:
        answers, _ = ask(first, prompts())
    monkeypatch.setattr(prefix_tiers, "_DEADLINE_SECONDS", 0.05)
    monkeypatch.setattr(prefix_tiers, "_RETRY_SECONDS", math.inf)
    with open_cache() as second:
        reads.gate.clear()
        assert ask(second, prompts()[:1]) == (answers[:1], 0)
        asked_for = lower_tier(second).stats().loads
        assert ask(second, prompts()[1:]) == (answers[1:], 0)
        assert lower_tier(second).stats().loads == asked_for
        assert not second._store.tiers._may_fetch()
        monkeypatch.setattr(prefix_tiers, "_RETRY_SECONDS", 0.0)  # loads are tried again then
        assert second._store.tiers._may_fetch()
        reads.gate.set()


def test_the_compute_rate_is_measured_from_forwards(model) -> None:
    with make_cache(model, host_cache_gb=0.01) as cache:
        planner = cache._store.tiers.planners.host
        assert planner.rates == tiering._UNMEASURED
        planner._learns = True
        ask(cache, prompts()[:2])
        assert planner.rates.tokens_per_second > 0.1
