"""No step waits for a store, judged by its thread's calls and locks, not by clocks."""

import socket
import threading

import pytest
from clocks import ManualClock
from context_rig import generate
from faulty_store import FaultyStore, Trouble
from memory_store import MemoryStore
from step_watch import StepWatch
from tier_rig import PROMPT, ask, make_over

from mamba_cache.context import PrefetchState
from mamba_cache.context import prefetch as prefetching
from mamba_cache.tiers import lower as lower_module
from mamba_cache.tiers.entry import PayloadMac
from mamba_cache.tiers.lower import LowerTier

OTHERS = [[(k * i + i // 5) % 12 + 1 for i in range(61)] for k in range(3, 9)]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Stop the clock of store tiers and prefetches: no call times out."""
    for module in (lower_module, prefetching):
        monkeypatch.setattr(module, "time", ManualClock())


@pytest.fixture
def watch():
    return StepWatch()


def make(watch, store, monkeypatch):
    """Return a context with watched locks, store calls, copies and MACs."""
    for owner, name in ((lower_module, "_copy"), (PayloadMac, "part")):
        monkeypatch.setattr(owner, name, watch.called(name, getattr(owner, name)))
    with watch.locks(monkeypatch):
        return make_over(store=watch.store(store))


def serve(watch, store, monkeypatch):
    """Serve requests, one from the store; return its prefetch state and the store's stats."""
    context = make(watch, store, monkeypatch)
    context.wait_for_tiers()
    with watch.steps():
        prefetch = ask(context)
        state = prefetch.wait()
        for prompt in [PROMPT, *OTHERS]:
            generate(context, prompt, 3)
            context.poll_tiers()
    context.wait_for_tiers()
    stats = context.store_tier.stats()
    context.close()
    return state, stats


@pytest.fixture
def filled(monkeypatch):
    memory = MemoryStore()
    serve(StepWatch(), memory, monkeypatch)
    return memory


def test_the_thread_of_steps_never_enters_a_store_and_waits_for_bookkeeping_at_most(
    watch, filled, monkeypatch
) -> None:
    """Only tier threads call the store; none holds a lock during a call or a copy."""
    for prompt in OTHERS:  # these prompts are written again
        prompt[0] = prompt[0] % 12 + 1
    state, stats = serve(watch, filled, monkeypatch)
    assert state is PrefetchState.READY
    assert stats.restored > 0
    assert stats.stored > 0
    assert watch.calls["exists_many"] * watch.calls["put_many"] * watch.calls["get_many_into"]
    assert watch.calls["_copy"] * watch.calls["part"]
    assert watch.acquired[threading.get_ident()] > 0
    assert not watch.entered
    assert not +watch.with_locks


def test_nor_where_the_store_fails(watch, filled, monkeypatch) -> None:
    faulty = FaultyStore(filled)
    for call in ("exists_many", "put_many", "get_many_into"):
        faulty.inject(call, Trouble.FAIL)
    _, stats = serve(watch, faulty, monkeypatch)
    assert stats.faults
    assert not watch.entered
    assert not +watch.with_locks


def test_steps_go_on_while_a_store_hangs(watch, filled, monkeypatch) -> None:
    """All threads of the tier are in calls that do not return, and hold no lock."""
    faulty = FaultyStore(filled)
    context = make(watch, faulty, monkeypatch)
    context.wait_for_tiers()
    faulty.inject("put_many", Trouble.HANG)
    faulty.inject("exists_many", Trouble.HANG)
    with watch.steps():
        for prompt in OTHERS:
            generate(context, [prompt[0] % 12 + 1, *prompt[1:]], 3)
            context.poll_tiers()
    assert watch.calls["exists_many"] > 0
    assert not watch.entered
    assert not +watch.with_locks
    faulty.heal()
    context.close()


@pytest.mark.parametrize(
    "breach", ["calls under its lock", "asks in the step's thread", "connects"]
)
def test_the_watch_finds_each_breach(watch, filled, monkeypatch, breach) -> None:
    if breach == "calls under its lock":
        call_store = LowerTier._call

        def call(tier, *arguments, **options):
            with tier._lock:
                return call_store(tier, *arguments, **options)

        monkeypatch.setattr(LowerTier, "_call", call)
    elif breach == "asks in the step's thread":
        monkeypatch.setattr(LowerTier, "has_many", lambda tier, keys: [
            fault is None for fault in tier.store.exists_many([str(key) for key in keys])
        ])  # fmt: skip
    else:
        has_many = LowerTier.has_many

        def connect(tier, keys):
            socket.socket().close()
            return has_many(tier, keys)

        monkeypatch.setattr(LowerTier, "has_many", connect)
    serve(watch, filled, monkeypatch)
    assert bool(+watch.with_locks) is (breach == "calls under its lock")
    assert bool(watch.entered) is (breach != "calls under its lock")
