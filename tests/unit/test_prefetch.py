"""Prefetches: loads from lower tiers into the host tier, verified."""

import gc
import json
import weakref
from dataclasses import asdict, replace

import pytest
import torch
from clocks import ManualClock
from context_rig import MODEL, assert_same_run, generate, make_config, make_context
from restart_rig import slow_prefill
from tier_rig import IDENTITY, OTHER, PROMPT, ask, make_over, match

from mamba_cache import InvalidArgumentError, Request
from mamba_cache.context import PrefetchState
from mamba_cache.context import prefetch as prefetching
from mamba_cache.context import tiering as tierings
from mamba_cache.context.tier_memory import identity_of
from mamba_cache.reference import HybridModel, HybridModelConfig
from mamba_cache.tiers import CacheIdentity, LoadPlanner, Numerics, Rates, Refusal
from mamba_cache.tiers.entry import EntryKind


class HeldTier:
    """A lower tier of plain dicts that answers on the test's call, in the test's thread."""

    name = "held"

    def __init__(self):
        self.is_healthy = True
        self.stored = {}
        self.puts, self.loads = [], []
        self.takes = True

    def has_many(self, keys):
        return [key in self.stored for key in keys]

    def put(self, facts, payload, done):
        if self.takes:
            self.puts.append((facts, payload, done))
        return self.takes

    def load(self, expected, into, done):
        if self.takes:
            self.loads.append((expected, into, done))
        return self.takes

    def end_puts(self):
        for facts, payload, done in self.puts:
            self.stored[facts.key] = facts, bytes(payload)
            done(None)
        self.puts = []

    def end_loads(self, *refusals):
        """End all loads with these refusals, or all with success."""
        for index, (expected, into, done) in enumerate(self.loads):
            refusal = refusals[index] if refusals else None
            if refusal is None:
                facts, payload = self.stored[expected.key]
                assert facts == expected
                into[:] = payload
            done(refusal)
        self.loads = []

    def remove(self, key):
        self.stored.pop(key, None)

    def flush(self, timeout_seconds=None):
        self.end_puts()
        self.end_loads()
        return True

    def close(self):
        self.is_healthy = False

    def check_invariants(self):
        """Check nothing."""


def make(path, *, tier=None, **changes):
    """Return a context over a disk, or over the test's tier."""
    context = make_over(disk_cache_path=path, disk_cache_gb=0.01, **changes)
    if tier is not None:
        context.disk_tier.close()
        context._tiering.disk = tier
    return context


@pytest.fixture
def tier():
    """Return a lower tier with the prompt's entries."""
    return HeldTier()


@pytest.fixture
def context(tmp_path, tier):
    """Return an empty context over a tier with the prompt's entries."""
    first = make(tmp_path, tier=tier)
    generate(first, PROMPT, 2)
    first.wait_for_tiers()
    first.close()
    tier.is_healthy = True
    context = make(tmp_path, tier=tier)
    yield context
    context.check_invariants()


def entries(context):
    return context.host_tier.stats().entries


def test_computed_entries_are_offered_and_loaded(context, tier) -> None:
    """The state is loaded first: it takes as long as many blocks, and one thread verifies it."""
    assert match(context).skip_tokens == 0
    prefetch = ask(context)
    assert (prefetch.state, prefetch.is_done) == (PrefetchState.PENDING, False)
    assert (prefetch.request_id, prefetch.skip_tokens, prefetch.num_entries) == ("one", 56, 8)
    kinds = [expected.key.kind for expected, _, _ in tier.loads]
    assert kinds == [EntryKind.STATE, *[EntryKind.KV] * 7]
    found = match(context)
    assert (found.skip_tokens, found.arriving_tokens) == (0, 56)
    assert match(context, OTHER).arriving_tokens == 0
    assert match(context, PROMPT[:20]).arriving_tokens == 0
    tier.end_loads()
    assert prefetch.state is prefetch.wait() is PrefetchState.READY
    assert (prefetch.num_arrived, prefetch.refusals) == (8, ())
    found = match(context)
    assert (found.skip_tokens, found.arriving_tokens, found.loaded_blocks) == (56, 0, 7)
    run = generate(context, PROMPT, 4)
    assert run[2].skip_tokens == 56
    assert_same_run(run, PROMPT)


def test_nothing_is_brought_twice(context, tier) -> None:
    """Two requests of one prefix share a load."""
    first, second = ask(context), ask(context)
    assert len(tier.loads) == 8
    assert (first.num_entries, second.num_entries) == (8, 8)
    tier.end_loads()
    assert (first.state, second.state) == (PrefetchState.READY,) * 2
    assert ask(context).state is PrefetchState.NOTHING
    assert tier.loads == []


def test_a_finished_flight_is_not_joined(context, tier, monkeypatch) -> None:
    """Another thread ends the flight between lookup and join: by then the row is filled."""
    ask(context)
    join = prefetching.Flight.join

    def late(flight, prefetch):
        tier.end_loads()
        return join(flight, prefetch)

    monkeypatch.setattr(prefetching.Flight, "join", late)
    second = ask(context)
    assert second.state is PrefetchState.INCOMPLETE
    assert match(context).skip_tokens == 56


@pytest.mark.parametrize("settings", [{}, {"num_host_blocks": 4, "num_host_states": 4}])
def test_without_a_disk_there_is_nothing_to_bring(settings) -> None:
    context = make_context(make_config(**settings))
    prefetch = ask(context, timeout_seconds=1)
    assert prefetch.state is prefetch.wait() is PrefetchState.NOTHING
    assert (prefetch.skip_tokens, prefetch.num_bytes) == (0, 0)
    assert context.disk_tier is None
    context.close()
    context.wait_for_tiers()


def test_nothing_is_loaded_for_another_prompt_or_salt_or_from_an_unhealthy_tier(
    context, tier
) -> None:
    assert ask(context, OTHER).state is PrefetchState.NOTHING
    assert ask(context, PROMPT[:8]).state is PrefetchState.NOTHING  # no token left to compute
    salted = Request(request_id="one", prompt_tokens=PROMPT, cache_salt="other")
    assert context.prefetch(salted).state is PrefetchState.NOTHING
    tier.is_healthy = False
    assert ask(context).state is PrefetchState.NOTHING
    generate(context, OTHER, 2)
    generate(context, OTHER, 2)
    assert (tier.puts, tier.loads) == ([], [])


def test_a_tier_that_takes_nothing_costs_rows_nothing(context, tier) -> None:
    tier.takes = False
    prefetch = ask(context)
    assert prefetch.state is PrefetchState.INCOMPLETE
    assert prefetch.refusals == (Refusal.ABORTED,) * 8
    assert context.host_tier.stats().dropped == {"queue_full": 8}
    assert_same_run(generate(context, PROMPT, 3), PROMPT)
    assert entries(context) == {"kv": 7, "state": 7}
    tier.takes = True
    assert generate(context, PROMPT, 3)[2].skip_tokens == 56


def test_the_next_best_boundary_is_brought_where_a_block_is_missing(context, tier) -> None:
    hashes = context.prepare(Request(request_id="x", prompt_tokens=PROMPT)).hashes
    last = hashes.digests[6]
    tier.stored = {
        key: value
        for key, value in tier.stored.items()
        if not (key.kind is EntryKind.KV and key.digest == last)
    }
    prefetch = ask(context)
    assert (prefetch.skip_tokens, prefetch.num_entries) == (48, 7)
    tier.end_loads()
    assert match(context).skip_tokens == 48


def test_entries_in_the_host_tier_are_not_loaded(tmp_path, context, tier) -> None:
    """Entries in the host tier are not evicted for arriving entries."""
    prefetch = ask(context, PROMPT[:50])
    assert prefetch.skip_tokens == 48
    tier.end_loads()
    prefetch = ask(context)
    assert (prefetch.skip_tokens, prefetch.num_entries) == (56, 2)
    tier.end_loads()
    assert match(context).skip_tokens == 56


def test_a_deadline_ends_the_wait_and_late_entries_are_kept(context, tier) -> None:
    prefetch = ask(context, timeout_seconds=0)
    assert prefetch.wait() is PrefetchState.TIMED_OUT
    assert not match(context).skip_tokens
    tier.end_loads()
    assert prefetch.state is PrefetchState.TIMED_OUT
    assert match(context).skip_tokens == 56


def test_a_cancelled_prefetch_leaves_rows_free(context, tier) -> None:
    prefetch = ask(context)
    prefetch.cancel()
    assert prefetch.state is prefetch.wait() is PrefetchState.CANCELLED
    tier.end_loads()
    assert prefetch.refusals == (Refusal.ABORTED,) * 8
    assert match(context).skip_tokens == 0
    assert entries(context) == {"kv": 0, "state": 0}
    done = ask(context)
    tier.end_loads()
    done.cancel()  # too late for an effect
    assert done.state is PrefetchState.READY


def test_entries_that_another_prefetch_needs_survive_a_cancel(context, tier) -> None:
    first, second = ask(context), ask(context)
    first.cancel()
    tier.end_loads()
    assert (first.state, second.state) == (PrefetchState.CANCELLED, PrefetchState.READY)
    assert match(context).skip_tokens == 56


def test_loads_that_end_after_a_reset_are_discarded(context, tier) -> None:
    """The reset changes the row's generation and cancels all prefetches of the prompt."""
    handles = [ask(context) for _ in range(3)]
    loads, tier.loads = tier.loads, []
    context.reset()
    assert [each.state for each in handles] == [PrefetchState.CANCELLED] * 3
    again = ask(context)
    tier.loads, later = loads, tier.loads
    tier.end_loads()
    assert match(context).skip_tokens == 0
    context.check_invariants()
    tier.loads = later
    tier.end_loads()
    assert again.state is PrefetchState.READY
    assert match(context).skip_tokens == 56


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("method", ["load", "put"])
def test_a_tier_that_raises_has_no_row_left(context, tier, monkeypatch, method, is_slow) -> None:
    """Accepted jobs end when the tier finishes them: immediately, or at the reset."""
    kept = getattr(tier, method)
    answers = iter([False] if is_slow else [])
    flush = tier.flush

    def break_off(facts, payload, done):
        if len(tier.loads) + len(tier.puts) == 3:
            raise MemoryError("of the tier")
        return kept(facts, payload, done)

    monkeypatch.setattr(tier, method, break_off)
    monkeypatch.setattr(tier, "flush", lambda *_: next(answers, True) and flush())

    def store() -> None:
        generate(context, OTHER, 2)
        context.wait_for_tiers()

    use = {"load": lambda: ask(context), "put": store}[method]
    with pytest.raises(MemoryError, match="of the tier"):
        use()
    monkeypatch.undo()
    context.reset()
    assert not context.host_tier.lower_leases
    ask(context)
    tier.end_loads()
    assert match(context).skip_tokens == 56


def test_joining_a_load_under_way_measures_no_speed(context, tier, monkeypatch) -> None:
    """The load took ten seconds; the second prefetch waited for one of them."""
    clock = ManualClock()
    monkeypatch.setattr(prefetching, "time", clock)
    planner = context._tiering.planners.disk
    first = ask(context)
    clock.now += 9
    second = ask(context)
    clock.now += 1
    tier.end_loads()
    assert first.state is second.state is PrefetchState.READY
    context.poll_tiers()
    expected = LoadPlanner(tierings._ASSUMED[1])
    expected.record_load(first.num_bytes, 10.0)
    assert planner.rates == expected.rates


@pytest.mark.parametrize("kind", EntryKind)
def test_a_wrong_entry_that_was_just_loaded_is_not_matched(context, tier, kind) -> None:
    """The load has ended, and the context has not polled since."""
    prefetch = ask(context)
    tier.end_loads()
    assert prefetch.state is PrefetchState.READY
    digest = next(key.digest for key in tier.stored if key.kind is kind)
    context._tiering.remove(kind, None, digest)
    match(context)  # collects finished loads
    assert digest not in context.host_tier[kind]


def test_an_entry_damaged_before_it_was_stored_is_stored_again(context, tier) -> None:
    """A bit flipped in host memory before the store: the stored entry verifies, but is damaged."""
    facts, payload = next(v for v in tier.stored.values() if v[0].prefix_tokens == 56)
    tier.stored[facts.key] = facts, bytes([payload[0] ^ 1]) + payload[1:]
    ask(context)
    tier.end_loads()
    assert context.add_request(Request(request_id="a", prompt_tokens=PROMPT)).skip_tokens == 56
    step = context.begin_step()
    MODEL.forward(step.metadata, context)
    assert context.commit_step({"a": 1}) == ("a",)
    assert facts.key not in tier.stored
    context.finish("a")
    generate(context, PROMPT, 1)
    context.wait_for_tiers()
    assert tier.stored[facts.key] == (facts, payload)


def test_with_little_room_the_entries_that_fit_are_loaded(tmp_path, context, tier) -> None:
    small = make(tmp_path, tier=tier, num_host_blocks=3, num_host_states=1)
    prefetch = ask(small)
    tier.end_loads()
    assert prefetch.state is PrefetchState.READY
    assert match(small).skip_tokens == prefetch.skip_tokens == 24
    # Other loads hold the rows for now: the remaining entries are useless to this request.
    small.reset()
    some = next(iter(tier.stored.values()))[0]
    other = replace(some, key=replace(some.key, kind=EntryKind.KV, digest=b"x" * 16))
    lease = small.host_tier[other.key.kind].reserve(other)
    prefetch = ask(small)
    assert prefetch.refusals == (Refusal.ABORTED,)
    tier.end_loads()
    assert prefetch.state is PrefetchState.INCOMPLETE
    assert match(small).skip_tokens == 0
    lease.rows.release(lease)
    assert_same_run(generate(small, PROMPT, 3), PROMPT)
    small.check_invariants()


def test_a_slow_tier_is_not_worth_it(tmp_path, context, tier) -> None:
    fast = LoadPlanner(Rates(tokens_per_second=1e12), learns=False)
    quick = make(tmp_path, tier=tier, planner=fast)
    assert ask(quick).state is PrefetchState.NOTHING
    # Entries in the host tier are not worth loading either, and are not fetched again.
    ask(context)
    tier.end_loads()
    assert match(context).skip_tokens == 56
    context._tiering.planners.host.rates = fast.rates
    assert match(context).skip_tokens == 0
    assert ask(context).state is PrefetchState.NOTHING


@pytest.mark.parametrize(("seconds", "is_worth_it"), [(55.5, True), (56.5, False)])
def test_entries_are_worth_the_tokens_before_their_boundary(
    tmp_path, context, tier, seconds, is_worth_it
) -> None:
    """Loading saves computing all but the last five prompt tokens, one second each."""
    one_a_second = LoadPlanner(Rates(tokens_per_second=1.0), learns=False)
    other = make(tmp_path, tier=tier, planner=one_a_second)
    other._tiering.planners.disk.rates = Rates(1e15, seconds, 1.0)
    assert (ask(other).state is PrefetchState.PENDING) == is_worth_it
    tier.end_loads()


@pytest.mark.parametrize(
    ("timeout", "on_gpu", "seconds"), [(None, 0, 56), (60, 0, 56), (10, 0, 10), (None, 16, 40)]
)
def test_a_caller_that_waits_waits_no_longer_than_computing_takes(
    context, tier, monkeypatch, timeout, on_gpu, seconds
) -> None:
    clock, tiering = ManualClock(), context._tiering
    monkeypatch.setattr(prefetching, "time", clock)
    if on_gpu:
        generate(context, PROMPT[: on_gpu + 1], 1)
        tier.end_puts()
    tiering._is_waited_for = True
    tiering.planners.host.rates = Rates(tokens_per_second=1.0)
    prefetch = ask(context, timeout_seconds=timeout)
    clock.now += seconds - 0.5
    assert prefetch.state is PrefetchState.PENDING
    clock.now += 1
    assert prefetch.state is PrefetchState.TIMED_OUT
    tier.end_loads()
    assert match(context).skip_tokens == 56


def test_a_caller_that_waits_tries_a_slow_tier_now_and_again(context, tier, monkeypatch) -> None:
    """Otherwise one measurement would decide for ever."""
    monkeypatch.setattr("mamba_cache.context.tiering._TRIAL_EVERY", 3)
    context._tiering._is_waited_for = True
    context._tiering.planners.host.rates = Rates(tokens_per_second=1e12)
    assert [ask(context).num_entries for _ in range(6)] == [0, 0, 2, 0, 0, 2]
    tier.end_loads()


def test_hits_are_offered_again(context, tier) -> None:
    """An entry is written at its second use, in whichever tier it was found."""
    tier.stored.clear()
    generate(context, PROMPT, 2)
    tier.puts = [(facts, payload, done) for facts, payload, done in tier.puts]
    offered = {facts.key for facts, _, _ in tier.puts}
    for _, _, done in tier.puts:
        done(Refusal.IO_ERROR)  # none was stored
    tier.puts = []
    assert generate(context, PROMPT, 2)[2].skip_tokens == 56
    again = {facts.key for facts, _, _ in tier.puts}
    assert len(again & offered) == 8
    tier.end_puts()
    generate(context, PROMPT, 2)
    assert not {facts.key for facts, _, _ in tier.puts} & again
    tier.end_puts()


def test_an_entry_that_is_damaged_in_host_memory_is_not_offered(context, tier) -> None:
    tier.stored.clear()
    generate(context, PROMPT, 2)
    tier.end_puts()
    tier.stored.clear()
    for entry in context.host_tier._rows.values():
        entry.headers[:] = 0
    generate(context, PROMPT, 2)
    assert [facts.key for facts, _, _ in tier.puts] == []


def test_models_without_attention_bring_states_alone(tmp_path) -> None:
    shape = {name: getattr(MODEL.config, name) for name in MODEL.config.__dataclass_fields__}
    model = HybridModel(HybridModelConfig(**(shape | {"layer_pattern": "MM"})), dtype=torch.float64)
    tier = HeldTier()
    settings = {
        "num_host_states": 9, "num_host_blocks": 0, "disk_cache_path": tmp_path,
        "disk_cache_gb": 0.01, "write_on_use": 1, "hash_secret": b"s",
    }  # fmt: skip
    contexts = []
    for _ in range(2):
        context = make_context(
            make_config(**settings), model=model, identity=IDENTITY,
            load_planner=slow_prefill(),
        )  # fmt: skip
        context.disk_tier.close()
        context._tiering.disk = tier
        contexts.append(context)
    first, second = contexts
    tokens = generate(first, PROMPT, 4, model=model)[0]
    first.wait_for_tiers()
    prefetch = second.prefetch(Request(request_id="one", prompt_tokens=PROMPT))
    assert (prefetch.num_entries, prefetch.skip_tokens) == (1, 56)
    tier.end_loads()
    again = generate(second, PROMPT, 4, model=model)
    assert (again[0], again[2].skip_tokens) == (tokens, 56)


def test_a_disk_has_rows_of_the_kinds_that_the_host_has(tmp_path) -> None:
    """The disk writes from host rows and reads into host rows."""
    for number, (settings, kinds) in enumerate((
        ({}, {"kv", "state"}),
        ({"num_host_states": 0}, {"kv"}),
        ({"num_host_blocks": 0}, {"state"}),
    )):  # fmt: skip
        context = make(tmp_path / str(number), **settings)
        assert context.disk_tier.stats().entries.keys() == kinds
        context.close()


@pytest.mark.parametrize("uses", [1, 2])
def test_a_state_that_a_disk_takes_at_once_needs_no_worth_for_a_row(tmp_path, uses) -> None:
    context = make(
        tmp_path, num_host_states=2, max_slots=4, slot_policy="adaptive", write_on_use=uses
    )
    once = [[(7 * i + k) % 13 for i in range(17)] for k in range(5)]
    for prompt in (PROMPT[:17], PROMPT[:17], *once):
        generate(context, prompt, 1)
        context.wait_for_tiers()
    is_stored = [bool(match(context, prompt).arriving_tokens or ask(context, prompt).num_entries)
                 for prompt in once]  # fmt: skip
    assert is_stored[:2] == [uses == 1] * 2  # other states have taken their slots since
    assert (context.host_tier.dropped["refused"] > 0) == (uses == 2)
    context.close()


def test_arguments_are_checked(context, tmp_path) -> None:
    for seconds in (-1, 1e9 + 1):
        with pytest.raises(InvalidArgumentError, match="timeout_seconds must be a number"):
            ask(context, timeout_seconds=seconds)
    with pytest.raises(InvalidArgumentError, match="give a Request"):
        context.prefetch("one")
    on_disk = make_config(
        num_host_blocks=4, num_host_states=4, hash_secret=b"s",
        disk_cache_path=tmp_path / "x", disk_cache_gb=0.01,
    )  # fmt: skip
    for options, message in (({}, "needs identity"), ({"identity": "m"}, "a ModelIdentity")):
        with pytest.raises(InvalidArgumentError, match=message):
            make_context(on_disk, **options)


def test_default_numerics_are_those_of_the_contexts_device() -> None:
    """Numerics of the CPU would not do: two kinds of GPUs do not compute the same bits."""
    specs = MODEL.config.state_spec(MODEL.dtype), MODEL.config.kv_spec(MODEL.dtype)
    config = make_config(hash_secret=b"s")
    cpu, device = torch.device("cpu"), torch.device("meta")  # stands for a GPU
    assert identity_of(None, config, *specs, cpu) is None
    assert identity_of(IDENTITY, config, *specs, cpu) == CacheIdentity.of(IDENTITY, config, *specs)
    made = identity_of(IDENTITY, config, *specs, device)
    assert (
        json.loads(made.canonical)["numerics"]
        == asdict(Numerics.of(device))
        != asdict(IDENTITY.numerics)
    )
    for numerics in (Numerics.of(device, kernels="own"), Numerics.of("cpu", kernels="own")):
        given = replace(IDENTITY, numerics=numerics)
        own = CacheIdentity.of(given, config, *specs)
        assert identity_of(given, config, *specs, device) == own


def test_an_unclosed_context_releases_the_disk(tmp_path) -> None:
    context = make(tmp_path)
    generate(context, PROMPT, 2)
    gone = weakref.ref(context.disk_tier)
    tier = gone()
    del context
    gc.collect()
    assert not tier.is_healthy
    assert make(tmp_path).disk_tier.is_healthy


def test_after_close_a_context_goes_on_without_the_disk(tmp_path) -> None:
    context = make(tmp_path)
    assert_same_run(generate(context, PROMPT, 3), PROMPT)
    context.close()
    context.close()
    assert ask(context, OTHER).state is PrefetchState.NOTHING
    assert_same_run(generate(context, PROMPT, 3), PROMPT)
    assert [stats.name for stats in context.tier_stats()] == ["host", "disk"]
    assert context.tier_stats()[1].entries == {"state": 7, "kv": 7}
