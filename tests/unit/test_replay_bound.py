"""The bound of a trace: exact on small traces, and never exceeded."""

from itertools import product

import pytest
from drawn_traces import WORKLOADS
from trace_bound import bound_of

from mamba_cache.cli.replay import run_replay
from mamba_cache.cli.traces import TraceRequest


def request(*ids, tail=1, tenant=None):
    size = len(ids) * 8 + tail
    return TraceRequest(size, 1, ids, block_size=8, tenant=tenant)


def blocks(requests, num_states):
    """Return the number of skipped blocks by the bound."""
    return bound_of(requests, num_states) * sum(each.input_length for each in requests) / 8


def exact(requests, num_states):
    """Return the most blocks that whole states can skip, by trying all sets of kept states.

    Between two requests, any subset of the kept and just passed boundaries may be kept.
    """
    best = {frozenset(): 0}
    for each in requests:
        path = [each.hash_ids[:n] for n in range(1, len(each.hash_ids) + 1)]
        usable = [prefix for prefix in path if 8 * len(prefix) < each.input_length]
        after = {}
        for kept, skipped in best.items():
            gained = max((len(prefix) for prefix in usable if prefix in kept), default=0)
            choices = [*kept, *(prefix for prefix in path if prefix not in kept)]
            for is_in in product((False, True), repeat=len(choices)):
                now = frozenset(c for c, chosen in zip(choices, is_in, strict=True) if chosen)
                if len(now) <= num_states:
                    after[now] = max(after.get(now, 0), skipped + gained)
        best = after
    return max(best.values())


TURNS = [request(1, 2, 3), request(4, 5), request(1, 2, 3), request(4, 5)]
CASES = {
    "one state serves what comes next": (
        [request(1, 2, 3), request(1, 2, 3), request(4, 5), request(1, 2, 3)],
        {0: 0, 1: 6, None: 6},
    ),
    "room is shared by what is kept at once": (TURNS, {1: 3, 2: 5, None: 5}),
    "where prompts part, one state does for all": (
        [request(1, 2, end) for end in (3, 4, 5)], {1: 4}
    ),
    "a prompt of whole blocks resumes a block earlier": (
        [request(1, 2, tail=0)] * 2, {9: 1}
    ),
    "tenants share nothing": (
        [request(1, 2, tenant=tenant) for tenant in "aba"], {9: 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_bound_of_small_traces(name):
    requests, wanted = CASES[name]
    for num_states, skipped in wanted.items():
        assert blocks(requests, num_states) == pytest.approx(skipped)


def test_requests_that_share_nothing_have_a_bound_of_nothing():
    assert blocks([request(1), request(2), request()], 3) == 0


@pytest.mark.parametrize("num_states", [1, 2])
def test_no_way_to_keep_whole_states_exceeds_it(rng, num_states):
    for _ in range(8):
        heads = [(1,), (1, 2), (3,)]
        requests = [
            request(*heads[rng.integers(3)], *rng.integers(10, 12, rng.integers(0, 2)).tolist())
            for _ in range(6)
        ]
        found, best = blocks(requests, num_states), exact(requests, num_states)
        assert best <= found + 1e-6
        assert found <= exact(requests, 9) + 1e-6


@pytest.mark.parametrize("name", ["conversations", "agents"])
def test_no_replay_exceeds_it(name):
    requests, budgets = WORKLOADS[name](70), [1, 40]
    result = run_replay(requests, slots=budgets, kv_blocks=3000, policies=["adaptive"])
    bounds = [bound_of(requests, slots) for slots in budgets]
    for record, bound in zip(result["records"], bounds, strict=True):
        assert record["token_hit_rate"] <= bound + 1e-4
    assert 0 < bounds[0] < bounds[1]
