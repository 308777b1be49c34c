"""Prefetches: what lies below the host tier is brought there, and nothing of it is wrong."""

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
    """A lower tier of plain dicts. It answers when the test says so, in the test's thread."""

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
        """End as many as there are answers for, or all well."""
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
        """There is nothing to check."""


def make(path, *, tier=None, **changes):
    """A context over a disk, or over a tier that the test holds."""
    context = make_over(disk_cache_path=path, disk_cache_gb=0.01, **changes)
    if tier is not None:
        context.disk_tier.close()
        context._tiering.disk = tier
    return context


@pytest.fixture
def tier():
    """A lower tier that has the prompt's entries."""
    return HeldTier()


@pytest.fixture
def context(tmp_path, tier):
    """A context that has nothing, over a tier that has the prompt."""
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


def test_what_was_computed_is_offered_and_brought_back(context, tier) -> None:
    """The state comes first: it takes as long as many blocks, and one thread to verify."""
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
    """Two requests of one prefix share a flight."""
    first, second = ask(context), ask(context)
    assert len(tier.loads) == 8
    assert (first.num_entries, second.num_entries) == (8, 8)
    tier.end_loads()
    assert (first.state, second.state) == (PrefetchState.READY,) * 2
    assert ask(context).state is PrefetchState.NOTHING
    assert tier.loads == []


def test_a_flight_that_is_over_is_not_joined(context, tier, monkeypatch) -> None:
    """Another thread ends it between the look and the joining: then the row is there."""
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


def test_there_is_nothing_to_bring_of_another_prompt_or_salt_nor_from_a_sick_tier(
    context, tier
) -> None:
    assert ask(context, OTHER).state is PrefetchState.NOTHING
    assert ask(context, PROMPT[:8]).state is PrefetchState.NOTHING  # nothing would be left
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


def test_what_the_host_tier_has_is_not_brought(tmp_path, context, tier) -> None:
    """And what it has makes no room for what comes."""
    prefetch = ask(context, PROMPT[:50])
    assert prefetch.skip_tokens == 48
    tier.end_loads()
    prefetch = ask(context)
    assert (prefetch.skip_tokens, prefetch.num_entries) == (56, 2)
    tier.end_loads()
    assert match(context).skip_tokens == 56


def test_a_deadline_ends_the_waiting_and_what_comes_later_is_kept(context, tier) -> None:
    prefetch = ask(context, timeout_seconds=0)
    assert prefetch.wait() is PrefetchState.TIMED_OUT
    assert not match(context).skip_tokens
    tier.end_loads()
    assert prefetch.state is PrefetchState.TIMED_OUT
    assert match(context).skip_tokens == 56


def test_what_is_cancelled_leaves_rows_free(context, tier) -> None:
    prefetch = ask(context)
    prefetch.cancel()
    assert prefetch.state is prefetch.wait() is PrefetchState.CANCELLED
    tier.end_loads()
    assert prefetch.refusals == (Refusal.ABORTED,) * 8
    assert match(context).skip_tokens == 0
    assert entries(context) == {"kv": 0, "state": 0}
    done = ask(context)
    tier.end_loads()
    done.cancel()  # too late to matter
    assert done.state is PrefetchState.READY


def test_what_another_still_wants_is_kept_when_one_cancels(context, tier) -> None:
    first, second = ask(context), ask(context)
    first.cancel()
    tier.end_loads()
    assert (first.state, second.state) == (PrefetchState.CANCELLED, PrefetchState.READY)
    assert match(context).skip_tokens == 56


def test_what_comes_after_a_reset_is_nobodys(context, tier) -> None:
    """The row has another generation by then; all who waited for one prompt are told."""
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
    """What it was handed ends once it has done it: at once, or at the reset."""
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


def test_who_joins_what_is_under_way_teaches_nobody_what_it_takes(
    context, tier, monkeypatch
) -> None:
    """It took ten seconds, of which the second one has seen one."""
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
def test_what_is_wrong_and_has_just_come_up_is_not_matched(context, tier, kind) -> None:
    """Its load is over, and the context has not looked since."""
    prefetch = ask(context)
    tier.end_loads()
    assert prefetch.state is PrefetchState.READY
    digest = next(key.digest for key in tier.stored if key.kind is kind)
    context._tiering.remove(kind, None, digest)
    match(context)  # takes over what has come
    assert digest not in context.host_tier[kind]


def test_what_was_damaged_before_it_was_stored_is_stored_anew(context, tier) -> None:
    """A bit turned in host memory on the way down: what lies below verifies, and is of no use."""
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


def test_without_room_what_fits_is_brought(tmp_path, context, tier) -> None:
    small = make(tmp_path, tier=tier, num_host_blocks=3, num_host_states=1)
    prefetch = ask(small)
    tier.end_loads()
    assert prefetch.state is PrefetchState.READY
    assert match(small).skip_tokens == prefetch.skip_tokens == 24
    # Rows that others have for now: what is left is of no use to this request.
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
    # Nor is what the host tier has: it is not brought again.
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
    """All of the prompt but its last five tokens, of which each takes a second."""
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
    """What was measured once would decide for ever otherwise."""
    monkeypatch.setattr("mamba_cache.context.tiering._TRIAL_EVERY", 3)
    context._tiering._is_waited_for = True
    context._tiering.planners.host.rates = Rates(tokens_per_second=1e12)
    assert [ask(context).num_entries for _ in range(6)] == [0, 0, 2, 0, 0, 2]
    tier.end_loads()


def test_hits_are_offered_again(context, tier) -> None:
    """So that what is used for the second time is written, wherever it was found."""
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
    """It writes from the host's rows and reads into them."""
    for number, (settings, kinds) in enumerate((
        ({}, {"kv", "state"}),
        ({"num_host_states": 0}, {"kv"}),
        ({"num_host_blocks": 0}, {"state"}),
    )):  # fmt: skip
        context = make(tmp_path / str(number), **settings)
        assert context.disk_tier.stats().entries.keys() == kinds
        context.close()


@pytest.mark.parametrize("uses", [1, 2])
def test_what_a_disk_takes_at_once_passes_the_rows_of_states_worth_more(tmp_path, uses) -> None:
    context = make(
        tmp_path, num_host_states=2, max_slots=4, slot_policy="adaptive", write_on_use=uses
    )
    once = [[(7 * i + k) % 13 for i in range(17)] for k in range(5)]
    for prompt in (PROMPT[:17], PROMPT[:17], *once):
        generate(context, prompt, 1)
        context.wait_for_tiers()
    is_stored = [bool(match(context, prompt).arriving_tokens or ask(context, prompt).num_entries)
                 for prompt in once]  # fmt: skip
    assert is_stored[:2] == [uses == 1] * 2  # their slots were given to others since
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


def test_numerics_that_nobody_gave_are_those_of_the_contexts_device() -> None:
    """Not of the CPU beside it: two kinds of GPUs do not compute the same bits."""
    specs = MODEL.config.state_spec(MODEL.dtype), MODEL.config.kv_spec(MODEL.dtype)
    config = make_config(hash_secret=b"s")
    cpu, device = torch.device("cpu"), torch.device("meta")  # which stands for a GPU
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


def test_a_context_that_nobody_closes_lets_go_of_the_disk(tmp_path) -> None:
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
