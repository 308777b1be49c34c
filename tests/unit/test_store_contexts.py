"""Contexts and engines over one store skip each other's computed tokens."""

import gc
import threading
import weakref

import pytest
import restart_rig
from clocks import ManualClock
from context_rig import assert_same_run, generate, make_config, make_context
from faulty_store import FaultyStore, Trouble
from memory_store import MemoryStore
from remote_rig import PATIENCE, let_see, wait_until
from restart_rig import PROMPT_TOKENS
from tier_rig import OTHER, PROMPT, ask, make_over, match

from mamba_cache import InvalidArgumentError, Request
from mamba_cache.context import PrefetchState, tier_memory
from mamba_cache.context import prefetch as prefetching
from mamba_cache.context import tiering as tierings
from mamba_cache.errors import TierInUseError
from mamba_cache.stores import StoreFault
from mamba_cache.tiers import LoadPlanner, ModelIdentity, ParallelRank, Rates, Refusal
from mamba_cache.tiers import lower as lower_module
from mamba_cache.tiers.disk import DiskStore
from mamba_cache.tiers.entry import EntryKind


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of store tiers and prefetches, which only the test advances."""
    clock = ManualClock()
    for module in (lower_module, prefetching):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def make():
    """Return a function that makes contexts over a store; check and close them at the end."""
    made = []

    def make_one(store, **options):
        made.append(make_over(store=store, **options))
        return made[-1]

    yield make_one
    for context in made:
        context.check_invariants()
        context.close()


def filled(store, prompt=PROMPT, **changes):
    """Return a store with a context's prompt, and the closed context."""
    context = make_over(store=store, **changes)
    generate(context, prompt, 2)
    context.wait_for_tiers()
    context.close()
    return context


def skipped(context, prompt=PROMPT):
    return match(context, prompt).skip_tokens


@pytest.fixture
def store():
    """Return a store with the prompt's entries that can inject faults."""
    memory = MemoryStore()
    filled(memory)
    faulty = FaultyStore(memory)
    yield faulty
    faulty.heal()


def test_one_context_skips_tokens_computed_by_another(make, store) -> None:
    context = make(store)
    assert skipped(context) == 0
    prefetch = ask(context)
    assert prefetch.wait() is PrefetchState.READY
    assert (prefetch.skip_tokens, prefetch.num_entries, prefetch.num_arrived) == (56, 8, 8)
    run = generate(context, PROMPT, 4)
    assert run[2].skip_tokens == 56
    assert_same_run(run, PROMPT)
    host, tier = context.tier_stats()
    assert (host.name, tier.name, tier.restored) == ("host", "store", 8)
    assert context.store_tier.store is store


def test_a_question_is_answered_while_steps_go_on(make, store) -> None:
    """No call waits: the context's next call continues after the store's answer."""
    context = make(store)
    asked = len(threading.enumerate())
    prefetch = ask(context)
    assert (prefetch.state, prefetch.num_entries) == (PrefetchState.PENDING, 0)
    context.store_tier.flush(PATIENCE)
    assert prefetch.state is PrefetchState.PENDING
    run = generate(context, OTHER, 3)
    assert_same_run(run, OTHER)
    context.store_tier.flush(PATIENCE)
    assert prefetch.state is PrefetchState.READY
    assert skipped(context) == 56
    assert len(threading.enumerate()) == asked


def test_another_thread_waits_until_the_context_continues(make, store) -> None:
    context = make(store)
    prefetch = ask(context)
    states = []
    waiting = threading.Thread(target=lambda: states.append(prefetch.wait()))
    waiting.start()
    context.store_tier.flush(PATIENCE)
    assert states == []
    context.poll_tiers()
    waiting.join()
    assert states == [PrefetchState.READY]


def test_salts_secrets_ranks_weights_keep_entries_apart(make, store) -> None:
    others = [
        make(store, hash_secret=b"another"),
        make(store, identity=ModelIdentity(name="model", weights="others")),
        make(
            store,
            identity=ModelIdentity(
                name="model", weights="w", rank=ParallelRank(tensor=1, tensor_size=2)
            ),
        ),
    ]
    for context in others:
        assert ask(context).wait() is PrefetchState.NOTHING
        context.close()
    context = make(store)
    salted = Request(request_id="one", prompt_tokens=PROMPT, cache_salt="other")
    assert context.prefetch(salted).wait() is PrefetchState.NOTHING
    generate(context, PROMPT, 2, cache_salt="other")
    context.wait_for_tiers()
    assert make(store).prefetch(salted).wait() is PrefetchState.READY


def test_the_next_best_boundary_is_resumed_from_where_an_entry_is_bad(make, store) -> None:
    """The damaged state at the end is refused once; then the previous state is used."""
    context = make(store)
    ask(context).wait()
    [last] = [
        name
        for name in store._store._blobs
        if name.startswith(str(key_of(context, PROMPT, 6))) and name.count("/") == 6
    ]
    blob = store._store._blobs[last]
    store._store._blobs[last] = blob[:40] + bytes([blob[40] ^ 1]) + blob[41:]
    context.close()
    context = make(store)
    prefetch = ask(context)
    assert prefetch.wait() is PrefetchState.INCOMPLETE
    assert prefetch.refusals == (Refusal.MAC,)
    assert context.store_tier.stats().refused == {"mac": 1}
    prefetch = ask(context)
    assert prefetch.wait() is PrefetchState.READY
    assert (prefetch.skip_tokens, prefetch.num_entries) == (48, 1)  # the blocks were loaded before
    run = generate(context, PROMPT, 4)
    assert run[2].skip_tokens == 48
    assert_same_run(run, PROMPT)
    context.check_invariants()
    context.close()


def key_of(context, prompt, index):
    """Return the key of the state at the end of a block."""
    prepared = context.prepare(Request(request_id="x", prompt_tokens=prompt))
    return context._tiering.entries(prepared.hashes, None).key(EntryKind.STATE, index)


def test_an_engine_skips_tokens_computed_by_another() -> None:
    """At least 95% of the prompts' tokens are skipped; the answers equal those without a cache."""
    store = MemoryStore()
    first, second = (restart_rig.make_engine("store://", store=store) for _ in range(2))
    answers, skips = restart_rig.run(first, 1)
    assert set(skips) == {0}
    first.context.close()
    again, skips = restart_rig.run(second, 1)
    assert again == answers == restart_rig.uncached(1)
    assert sum(skips) >= 0.95 * PROMPT_TOKENS * len(skips)
    second.context.check_invariants()
    second.context.close()


def test_an_engine_waits_for_the_entries_of_its_only_request() -> None:
    store = MemoryStore()
    first, second = (restart_rig.make_engine("store://", store=store) for _ in range(2))
    answers, _ = restart_rig.run(first, 1, count=1)
    first.context.close()
    assert restart_rig.run(second, 1, count=1) == (answers, [160])
    second.context.close()


# Delay of a request by a dead or slow store.


@pytest.mark.parametrize("call", ["exists_many", "get_many_into"])
def test_a_request_waits_no_longer_for_a_silent_store_than_it_may(make, store, clock, call) -> None:
    context = make(store)
    store.inject(call, Trouble.HANG)
    prefetch = ask(context, timeout_seconds=0.03)
    wait_until(lambda: context.poll_tiers() or store.injected[call, Trouble.HANG])
    clock.now += 0.029
    assert prefetch.state is PrefetchState.PENDING
    clock.now += 0.002
    assert prefetch.state is prefetch.wait() is PrefetchState.TIMED_OUT
    run = generate(context, PROMPT, 3)
    assert run[2].skip_tokens == 0
    assert_same_run(run, PROMPT)
    store.heal()
    context.wait_for_tiers()  # late entries are verified and kept
    assert prefetch.state is PrefetchState.TIMED_OUT
    assert not any(context.host_tier.leases.values())


@pytest.mark.parametrize("call", ["exists_many", "get_many_into"])
def test_after_one_overdue_answer_no_request_waits_for_the_store(make, store, clock, call) -> None:
    """Present waits end, for other answers and in the queue, and later requests do not wait."""
    context = make(store)
    store.inject(call, Trouble.HANG)
    waiting = [ask(context), ask(context, PROMPT[:50])]
    wait_until(lambda: context.poll_tiers() or store.injected[call, Trouble.HANG])
    assert not any(each.is_done for each in waiting)

    # Advance once more after the first failure, for a call begun after the clock was advanced;
    # a later advance would end the pause.
    turns = iter([True])

    def are_done() -> bool:
        if context.store_tier.is_healthy or next(turns, False):
            clock.now += 2.1
        let_see(context.store_tier)
        context.poll_tiers()
        return all(each.is_done for each in waiting)

    wait_until(are_done)
    for prefetch in waiting:
        assert prefetch.state in (PrefetchState.NOTHING, PrefetchState.INCOMPLETE)
    assert not context.store_tier.is_healthy
    calls = context.store_tier.stats().asks
    assert ask(context).state is PrefetchState.NOTHING
    assert_same_run(generate(context, PROMPT, 3), PROMPT)
    assert context.store_tier.stats().asks == calls
    store.heal()
    context.wait_for_tiers()


def test_a_store_that_fails_for_one_entry_is_not_waited_for(make, store) -> None:
    """A dead holder fails quickly for each entry in turn; the sum would take long."""
    context = make(store)
    store.inject("get_many_into", Trouble.FAIL, times=1, fault=StoreFault.TRANSFER_FAILED)
    reads, is_first, goes_on = store.get_many_into, iter([True]), threading.Event()

    def dying(*arguments):
        if not next(is_first, False):
            assert goes_on.wait(PATIENCE)
        return reads(*arguments)

    store.get_many_into = dying
    prefetch = ask(context)
    assert prefetch.wait() is PrefetchState.INCOMPLETE
    assert prefetch.num_arrived < prefetch.num_entries
    assert Refusal.IO_ERROR in prefetch.refusals
    found = match(context)
    assert (found.skip_tokens, found.arriving_tokens) == (0, 0)
    assert_same_run(generate(context, PROMPT, 3), PROMPT)
    goes_on.set()
    context.wait_for_tiers()
    assert prefetch.state is PrefetchState.INCOMPLETE
    assert not any(context.host_tier.leases.values())


def test_a_caller_that_waits_waits_for_an_answer_no_longer_than_computing_takes(
    make, store, clock
) -> None:
    """Up to 56 of the prompt's 61 tokens could be skipped."""
    context = make(store)
    context._tiering._is_waited_for = True
    context._tiering.planners.host.rates = Rates(tokens_per_second=1000.0)
    store.inject("exists_many", Trouble.HANG)
    prefetch = ask(context)
    clock.now += 0.055
    assert prefetch.state is PrefetchState.PENDING
    clock.now += 0.002
    assert prefetch.wait() is PrefetchState.TIMED_OUT
    store.heal()


def test_a_lookup_and_its_loads_have_one_deadline(make, store, clock) -> None:
    context = make(store)
    store.inject("exists_many", Trouble.HANG, times=1)
    store.inject("get_many_into", Trouble.HANG)
    prefetch = ask(context, timeout_seconds=0.03)
    wait_until(lambda: store.injected["exists_many", Trouble.HANG])
    clock.now += 0.025
    wait_until(lambda: store.release() or prefetch.is_answered)
    wait_until(lambda: context.poll_tiers() or store.injected["get_many_into", Trouble.HANG])
    clock.now += 0.004
    assert prefetch.state is PrefetchState.PENDING
    clock.now += 0.002
    assert prefetch.state is PrefetchState.TIMED_OUT
    store.heal()
    context.wait_for_tiers()


def test_a_store_that_moves_is_waited_for(make, store, clock) -> None:
    """Only the deadline ends the wait."""
    context = make(store)
    reads = store.get_many_into

    def slow(*arguments):
        clock.now += 0.03
        return reads(*arguments)

    store.get_many_into = slow
    assert ask(context).wait() is PrefetchState.READY
    assert skipped(context) == 56


def test_a_prefetch_cancelled_or_reset_during_the_lookup_loads_nothing(make, store) -> None:
    context = make(store)
    for end in (lambda prefetch: prefetch.cancel(), lambda _: context.reset()):
        context.store_tier._stored.clear()
        store.inject("exists_many", Trouble.HANG)
        prefetch = ask(context)
        end(prefetch)
        assert prefetch.state is prefetch.wait() is PrefetchState.CANCELLED
        store.heal()
        context.store_tier.flush(PATIENCE)
        context.poll_tiers()
        assert context.store_tier.stats().loads == 0
    assert ask(context).wait() is PrefetchState.READY


def test_a_full_queue_of_questions_lets_requests_go_on(make, store) -> None:
    context = make(store)
    context.store_tier._max_queued = 0
    assert ask(context).state is PrefetchState.NOTHING


def test_a_store_that_is_slower_than_computing_is_not_asked(make, store) -> None:
    """If B <= k P, no prefix is long enough to gain."""
    fast = LoadPlanner(Rates(tokens_per_second=1e12), learns=False)
    context = make(store, planner=fast)
    assert ask(context).state is PrefetchState.NOTHING
    assert context.store_tier.stats().asks == 0


def test_the_speed_of_the_store_is_measured(make, store, clock) -> None:
    context = make(store)
    link = context._tiering
    reads = store.get_many_into

    def slow(*arguments):
        with context.store_tier._lock:
            clock.now += 10.0
        return reads(*arguments)

    store.get_many_into = slow
    before = link.planners.store.rates
    assert ask(context).wait() is PrefetchState.READY
    context.poll_tiers()
    assert link.planners.store.rates.bytes_per_second < before.bytes_per_second / 100
    assert link.planners.disk.rates == tierings._ASSUMED[1]  # the disk has separate rates


def test_disk_and_store_together(make, store, tmp_path) -> None:
    """Entries on the disk are loaded from it, the rest from the store; both are offered all."""
    on_disk = {"disk_cache_path": tmp_path, "disk_cache_gb": 0.01, "write_on_use": 1}
    empty = MemoryStore()
    first = make(empty, **on_disk)
    generate(first, PROMPT[:50], 2)
    first.wait_for_tiers()
    assert len({name.rpartition("/")[0] for name in empty._blobs}) > 12
    first.close()
    context = make(store, **on_disk)
    prefetch = ask(context)
    assert prefetch.wait() is PrefetchState.READY
    assert prefetch.skip_tokens == 56
    assert context.disk_tier.stats().restored == 6
    assert context.store_tier.stats().restored == 2
    assert [stats.name for stats in context.tier_stats()] == ["host", "disk", "store"]
    run = generate(context, PROMPT, 4)
    assert run[2].skip_tokens == 56
    assert_same_run(run, PROMPT)


def test_if_the_disk_has_all_entries_the_store_is_not_asked(make, store, tmp_path) -> None:
    on_disk = {"disk_cache_path": tmp_path, "disk_cache_gb": 0.01, "write_on_use": 1}
    filled(MemoryStore(), **on_disk)
    context = make(store, **on_disk)
    assert ask(context).wait() is PrefetchState.READY
    assert skipped(context) == 56
    assert context.store_tier.stats().asks == 0


def test_the_queue_of_a_disk_has_a_separate_length(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tier_memory, "_MAX_QUEUED_ON_DISK", 0)
    context = filled(None, disk_cache_path=tmp_path, disk_cache_gb=0.01)
    stats = context.disk_tier.stats()
    assert (stats.stored, set(stats.dropped)) == (0, {"queue_full"})


@pytest.mark.parametrize(("num_rows", "skip_tokens"), [(0, 0), (2, 16)])
def test_no_more_is_brought_than_there_are_rows_for(make, store, num_rows, skip_tokens) -> None:
    """Without a row for a block, the blocks after it would be useless."""
    context = make(store, num_host_blocks=num_rows)
    prefetch = ask(context)
    assert prefetch.wait() is (PrefetchState.READY if num_rows else PrefetchState.NOTHING)
    assert (prefetch.skip_tokens, prefetch.num_arrived) == (skip_tokens, num_rows and num_rows + 1)
    assert generate(context, PROMPT, 2)[2].skip_tokens == skip_tokens


def test_a_store_that_is_silent_ends_no_wait_for_the_disk(
    make, store, clock, tmp_path, monkeypatch
) -> None:
    """A store's overdue answer to one request does not time out another one, all on disk."""
    on_disk = {"disk_cache_path": tmp_path, "disk_cache_gb": 0.01, "write_on_use": 1}
    filled(MemoryStore(), **on_disk)
    context = make(store, **on_disk)
    opened, read = threading.Event(), DiskStore._read
    monkeypatch.setattr(DiskStore, "_read", lambda *a: opened.wait(PATIENCE) and read(*a))
    prefetch = ask(context)
    store.inject("exists_many", Trouble.HANG)
    asked = ask(context, OTHER, timeout_seconds=0.5)
    wait_until(lambda: store.injected["exists_many", Trouble.HANG])
    clock.now += 1
    assert asked.state is PrefetchState.TIMED_OUT
    assert prefetch.state is PrefetchState.PENDING
    opened.set()
    assert prefetch.wait() is PrefetchState.READY
    store.heal()


def test_a_prefetch_that_waits_for_the_disk_holds_up_none_after_it(
    make, store, tmp_path, monkeypatch
) -> None:
    on_disk = {"disk_cache_path": tmp_path, "disk_cache_gb": 0.01, "write_on_use": 1}
    filled(MemoryStore(), **on_disk)
    filled(store, OTHER)
    context = make(store, **on_disk)
    opened, read = threading.Event(), DiskStore._read
    monkeypatch.setattr(DiskStore, "_read", lambda *a: opened.wait(PATIENCE) and read(*a))
    prefetch, other = ask(context), ask(context, OTHER)
    wait_until(lambda: context.poll_tiers() or other.state is PrefetchState.READY)
    assert prefetch.state is PrefetchState.PENDING
    opened.set()
    assert prefetch.wait() is PrefetchState.READY


def test_hits_are_offered_to_the_store_for_the_second_time(make, clock) -> None:
    """By default an entry is written at its second use."""
    store = MemoryStore()
    context = make(store, write_on_use=2)
    generate(context, PROMPT, 2)
    context.wait_for_tiers()
    assert store._blobs == {}
    assert generate(context, PROMPT, 2)[2].skip_tokens == 56
    context.wait_for_tiers()
    assert context.store_tier.stats().stored == 8
    # Entries removed by another process or evicted by the store are offered again after a while.
    store._blobs.clear()
    clock.now += 61
    generate(context, PROMPT, 2)
    generate(context, PROMPT, 2)
    context.wait_for_tiers()
    assert context.store_tier.stats().stored == 16


def test_a_store_by_its_url_is_opened_and_closed(make, monkeypatch) -> None:
    monkeypatch.setattr(tier_memory, "open_store", {"valkey://host": MemoryStore()}.get)
    context = make("valkey://host")
    generate(context, PROMPT, 2)
    context.wait_for_tiers()
    store = context.store_tier.store
    assert len(store._blobs) > 14
    context.close()
    assert store._is_closed


def test_a_context_that_finds_its_disk_in_use_leaves_no_store_open(make, tmp_path) -> None:
    on_disk = {"disk_cache_path": tmp_path, "disk_cache_gb": 0.01}
    first = make(MemoryStore(), **on_disk)
    before = set(threading.enumerate())
    for store in ("valkey://127.0.0.1:1", MemoryStore(), None):
        with pytest.raises(TierInUseError):
            make(store, **on_disk)
    assert before.issuperset(threading.enumerate())
    first.close()


def test_a_store_needs_an_identity() -> None:
    settings = {"num_host_blocks": 4, "num_host_states": 4, "hash_secret": b"s"}
    with pytest.raises(InvalidArgumentError, match="store needs identity"):
        make_context(make_config(store=MemoryStore(), **settings))


def test_an_unclosed_context_ends_its_threads(store) -> None:
    context = make_over(store=store)
    tier = context.store_tier
    watched = weakref.ref(context)
    prefetch = ask(context)
    context.store_tier.flush(PATIENCE)
    del context
    gc.collect()
    assert watched() is None
    tier._watcher.join(PATIENCE)
    assert not tier._watcher.is_alive()
    assert tier._workers == []
    # A waiting thread, this or another one, gets the result.
    waiting = threading.Thread(target=prefetch.wait, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert prefetch.state is prefetch.wait() is PrefetchState.CANCELLED
