"""Several ranks of one model resume at the same boundary from tiers with different entries."""

from unittest import mock

import pytest
import torch
from clocks import ManualClock
from context_rig import UncachedRuns
from fingerprints import fingerprint
from memory_store import MemoryStore
from ranks_rig import Exchange, RankedModel, Ranks
from tier_rig import (
    STATE,
    LateTransfers,
    install,
    make_tiered,
)
from tiers_machine import LateTier

from mamba_cache import Request
from mamba_cache.context import PrefetchState, RequestStatus
from mamba_cache.context import prefetch as prefetching
from mamba_cache.tiers import LoadPlanner, ModelIdentity, ParallelRank, Rates, Refusal, lower

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(30)]
OTHERS = [[(5 * i + k) % 13 for i in range(30)] for k in range(1, 6)]
MODEL = RankedModel()
UNCACHED = UncachedRuns()


def make_ranks(*changes):
    """Return ranks with these settings and their exchange."""
    exchange, parts = Exchange(len(changes)), []
    for rank, own in enumerate(changes):
        parallel = ParallelRank(tensor=rank, tensor_size=len(changes))
        identity = ModelIdentity(name="model", weights="w", rank=parallel)
        options = {"agreement": exchange, "identity": identity}
        parts.append(make_tiered(options=options, hash_secret=b"s", **own))
    return Ranks(parts, exchange)


def request(prompt=PROMPT, request_id="only", **options):
    return Request(request_id=request_id, prompt_tokens=prompt, **options)


def run(ranks, prompt, count=1, request_id="only", **options):
    """Run a request to its end; each rank's logits must equal those without a cache."""
    admission = ranks.add_request(request(prompt, request_id, **options))
    go_on(ranks, prompt, count, request_id)
    return admission


def go_on(ranks, prompt, count, request_id):
    num_tokens = 0
    while num_tokens < count:
        if ranks.status(request_id) is RequestStatus.PREFILLING:
            ranks.schedule_prefill(request_id)
        step = ranks.begin_step()
        MODEL.forward(step.metadata, ranks)
        tokens = {}
        if step.sampling_ids:
            wanted = UNCACHED.logits(tuple(prompt), num_tokens)
            for logits in ranks.logits:
                torch.testing.assert_close(logits[0], wanted, rtol=0, atol=1e-9)
            tokens = {request_id: int(wanted.argmax())}
            num_tokens += 1
        assert ranks.commit_step(tokens) == ()
    assert len(ranks.finish(request_id)) == count
    fingerprint(ranks)
    ranks.check_invariants()


def digest_of(ranks, index):
    return ranks.parts[0].prepare(request()).hashes.digests[index]


def row_of(context, kind, digest):
    return context.host_tier[kind]._row_of[digest]


def fill(ranks):
    """Put the prompt, with states after two and three blocks, into the tiers, not on the GPU."""
    run(ranks, PROMPT, checkpoint_positions=[16])
    for prompt in OTHERS:
        run(ranks, prompt, 2)
    return ranks


def resume(ranks):
    return run(ranks, PROMPT, 3, "again")


def test_a_prefix_on_all_ranks_is_resumed_with_four_exchanges():
    """The exchanges find the prefix, hold it, begin its load, and verify its bytes."""
    ranks = fill(make_ranks({}, {}, {}))
    before = ranks.exchange.num_rounds
    admission = resume(ranks)
    assert (admission.skip_tokens, admission.loaded_blocks) == (24, 3)
    assert ranks.exchange.num_rounds == before + 4


def test_where_no_tier_could_have_more_nothing_is_exchanged():
    """The GPU has every skippable block, the prompt has no block, or the step loads nothing."""
    ranks = make_ranks({}, {})
    run(ranks, [1, 2, 3])
    assert not ranks.exchange.num_rounds
    run(ranks, PROMPT, 5)
    assert ranks.exchange.num_rounds == 1  # at its admission
    assert run(ranks, PROMPT, 5).skip_tokens == 24
    assert ranks.exchange.num_rounds == 1


def test_ranks_intersect_sets_of_boundaries():
    """One rank has lost the last boundary's state: both resume at the boundary before."""
    ranks = fill(make_ranks({}, {}))
    assert ranks.parts[1].host_tier[STATE].remove(digest_of(ranks, 2))
    assert ranks.match(request()).skip_tokens == 16
    assert resume(ranks).skip_tokens == 16


def test_ranks_go_by_the_slowest_of_them():
    """Loading is faster on one rank, computing on the other: neither loads."""
    slow = LoadPlanner(Rates(1.0, 0.0, 1e9), learns=False)
    ranks = fill(make_ranks({}, {}))
    ranks.parts[1]._tiering.planners.host = slow
    assert resume(ranks).skip_tokens == 0


def test_the_host_tiers_policy_does_not_affect_the_states_that_ranks_save():
    """Otherwise only the rank with a host row would give a slot to a state worth just a row."""
    sizes = {"max_slots": 1, "num_kv_blocks": 60}
    ranks = make_ranks({"num_host_states": 0, **sizes}, {"num_host_states": 30, **sizes})
    for again in range(4):
        run(ranks, PROMPT, request_id=again)
    for prompt in OTHERS:
        run(ranks, prompt[:9])
    refused = [part.stats().refused_states for part in ranks.parts]
    assert refused[0] == refused[1] > 0


def test_copies_of_ranks_pin_no_slot():
    """Copies end at different times by rank, and a pinned slot cannot be evicted."""
    ranks = make_ranks({}, {})
    late = install(ranks.parts[1], LateTransfers)
    for prompt in [PROMPT, *OTHERS]:
        run(ranks, prompt, 2)
        assert late.queues["spill"]
        assert not ranks.parts[1]._tiering.pins
        late.run(1)


class ExchangeError(Exception):
    """The error of an exchange with a dead rank."""


class Breaks:
    """An agreement of a single rank that raises at exchange ``at``."""

    def __init__(self, at):
        self.left = at

    def largest(self, values):
        self.left -= 1
        if self.left < 0:
            raise ExchangeError
        return list(values)


@pytest.mark.parametrize("at", range(4))
def test_an_exchange_that_breaks_off_leaves_nothing_held(at):
    """At each of the four exchanges, the call releases its holds."""
    agreement = Breaks(99)
    context = make_tiered(options={"agreement": agreement}, hash_secret=b"s")
    alone = Ranks([context], Exchange(1))
    fill(alone)
    agreement.left = at
    with pytest.raises(ExchangeError):
        run(alone, PROMPT, request_id="again")
    agreement.left = 99
    context.check_invariants()
    if at == 3:
        context.abort_step()
    if at >= 2:  # the request was admitted
        assert context.resume_request("again").skip_tokens == 24
        go_on(alone, PROMPT, 1, "again")
    else:
        assert resume(alone).skip_tokens == 24
    assert not any(context.host_tier.leases.values())


@pytest.fixture
def clock():
    clock = ManualClock()
    with mock.patch.object(prefetching, "time", clock), mock.patch.object(lower, "time", clock):
        yield clock


@pytest.fixture
def disks(tmp_path, clock):
    """Return two ranks whose disks have the prompt, with states after two and three blocks."""
    settings = {"disk_cache_path": tmp_path, "disk_cache_gb": 0.01, "write_on_use": 1}
    ranks = make_ranks(settings, settings)
    run(ranks, PROMPT, checkpoint_positions=[16])
    ranks.wait_for_tiers()
    ranks.reset()
    for part in ranks.parts:
        part._tiering.disk = LateTier(part.disk_tier)
    yield ranks
    for part in ranks.parts:
        part._tiering.disk.flush()
    ranks.check_invariants()
    ranks.close()


def tier_of(ranks, rank):
    return ranks.parts[rank]._tiering.disk


def prefetch(ranks, prompt=PROMPT, **options):
    """Return each rank's prefetch."""
    return ranks.of_first[id(ranks.prefetch(request(prompt), **options))]


def state_of(handles):
    """Return the state, which is equal on all ranks."""
    [state] = {handle.state for handle in handles}
    return state


def test_a_prefetch_is_done_when_it_is_on_all_ranks(disks):
    tier_of(disks, 1).is_late = True
    handles = prefetch(disks)
    disks.poll_tiers()
    assert handles[0].own_state is PrefetchState.READY
    assert state_of(handles) is PrefetchState.PENDING
    # Until then no rank uses the prefix, and all ranks report it as arriving.
    found = disks.match(request())
    assert (found.skip_tokens, found.arriving_tokens) == (0, 24)
    tier_of(disks, 1).flush()
    assert state_of(handles) is PrefetchState.PENDING  # no exchange since
    disks.poll_tiers()
    assert state_of(handles) is PrefetchState.READY
    found = disks.match(request())
    assert (found.skip_tokens, found.arriving_tokens) == (24, 0)
    before = disks.exchange.num_rounds
    disks.poll_tiers()
    assert disks.exchange.num_rounds == before
    assert run(disks, PROMPT, 2).skip_tokens == 24


def test_nothing_is_exchanged_for_a_prompt_without_a_block(disks):
    before = disks.exchange.num_rounds
    assert state_of(prefetch(disks, [1, 2])) is PrefetchState.NOTHING
    assert disks.exchange.num_rounds == before


def test_a_load_that_failed_on_one_rank_is_arriving_on_all_until_the_next_exchange(disks):
    """The rig compares ``match`` on all ranks, so that engines act alike on all."""
    tier = tier_of(disks, 1)
    tier.is_late = True
    handles = prefetch(disks)
    _, _, _, done = tier.queue.popleft()
    done(Refusal.IO_ERROR)
    assert disks.match(request()).arriving_tokens == 24
    disks.poll_tiers()
    assert state_of(handles) is PrefetchState.INCOMPLETE
    assert disks.match(request()).arriving_tokens == 0


@pytest.mark.parametrize("end", ["ready", "timed_out", "cancelled"])
def test_ranks_that_wait_find_out_together(disks, clock, end):
    tier_of(disks, 1).is_late = True
    handles = prefetch(disks, timeout_seconds=3 if end == "timed_out" else None)
    if end == "ready":
        tier_of(disks, 1).flush()
    elif end == "timed_out":
        clock.now += 4
    else:
        disks.reset()
    assert set(disks.run([handle.wait for handle in handles])) == {PrefetchState(end)}


def test_ranks_share_a_store_by_identity_and_rank(clock):
    """New processes find the entries of their rank, once all stores have answered."""
    shared = {"store": MemoryStore(), "write_on_use": 1}
    first = make_ranks(shared, shared)
    run(first, PROMPT)
    first.wait_for_tiers()
    first.close()
    second = make_ranks(shared, shared)
    handles = prefetch(second)
    assert set(second.run([handle.wait for handle in handles])) == {PrefetchState.READY}
    assert run(second, PROMPT, 2).skip_tokens == 24
    second.close()
    other_model = make_ranks(shared)  # a single rank
    [handle] = prefetch(other_model)
    assert other_model.run([handle.wait]) == (PrefetchState.NOTHING,)
    other_model.close()
