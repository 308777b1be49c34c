"""Prefix caches of transformers models over one store: what one has computed, the others skip."""

import pytest
import torch
from clocks import ManualClock
from faulty_store import FaultyStore, Trouble
from memory_store import MemoryStore
from notebook_rig import ask, prompts
from remote_rig import PATIENCE
from transformers_rig import make_cache, make_model, plain

from mamba_cache.context import prefetch
from mamba_cache.integrations.transformers import tiers as prefix_tiers
from mamba_cache.stores import StoreFault
from mamba_cache.tiers import remote

FAMILY = "granite 4"
SECRET = b"of this test"


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of stores, which stands still; loads are waited for as long as they take."""
    monkeypatch.setattr(prefix_tiers, "_DEADLINE_SECONDS", None)
    clock = ManualClock()
    for module in (remote, prefetch):
        monkeypatch.setattr(module, "time", clock)
    return clock


def open_cache(store, model, **settings):
    own = {"host_cache_gb": 0.01, "hash_secret": SECRET}
    return make_cache(model, store=store, **(own | settings))


def test_a_store_that_fails_or_is_silent_is_not_waited_for(clock) -> None:
    """Patience ends with the clock, which the first question turns; later calls do not ask."""
    store, model = FaultyStore(MemoryStore()), make_model(FAMILY)
    with open_cache(store, model) as first:
        answers, _ = ask(first, prompts()[:2])
    store.inject("exists_many", Trouble.HANG)
    hangs = store._meet_call

    def turn(call):
        clock.now += 1.0
        hangs(call)

    store._meet_call = turn
    with open_cache(store, model) as second:
        found, skipped = ask(second, prompts()[:2])
        assert (found, skipped) == (answers, 0)
        store._meet_call = hangs
        store.heal()
        assert second._store.tiers._remote.flush(PATIENCE)
    store.inject("exists_many", Trouble.FAIL)
    with open_cache(store, model) as third:
        assert ask(third, prompts()[:2]) == (answers, 0)


def test_a_store_that_fails_for_one_boundary_is_not_tried_at_the_next() -> None:
    """A dead holder takes its time for each of them, and there may be many."""
    store, model = FaultyStore(MemoryStore()), make_model(FAMILY)
    with open_cache(store, model) as first:
        answers, _ = ask(first, prompts()[:1])
    longer = [torch.tensor([[*answers[0], 7, 8, 9]])]  # states at the prompt's and answer's ends
    expected = [plain(model, ids).sequences[0].tolist() for ids in longer]
    with open_cache(store, model) as second:
        store.inject("get_many_into", Trouble.FAIL, times=1, fault=StoreFault.TRANSFER_FAILED)
        assert ask(second, longer) == (expected, 0)
    with open_cache(store, model) as third:
        found, skipped = ask(third, longer)
        assert found == expected
        assert skipped >= 0.9 * len(answers[0])
