"""Traces of requests: drawn, and turned into tokens."""

from itertools import pairwise

import numpy as np
import pytest
from drawn_traces import WORKLOADS, draw_agents, draw_conversations

from mamba_cache.cli.traces import TOKENS_PER_HASH_ID, TraceRequest, prompt_tokens


def test_tokens_follow_from_the_ids_alone():
    one = prompt_tokens(TraceRequest(0, 1_300, 1, (5, 6, 7)))
    other = prompt_tokens(TraceRequest(9, 1_024, 2, (5, 8)))
    assert (one.dtype, one.shape) == (np.int32, (1_300,))
    assert (one[:TOKENS_PER_HASH_ID] == other[:TOKENS_PER_HASH_ID]).all()
    assert (one[TOKENS_PER_HASH_ID : 2 * TOKENS_PER_HASH_ID] != other[TOKENS_PER_HASH_ID:]).any()


def test_tokens_look_random():
    tokens = prompt_tokens(TraceRequest(0, 512 * 1_000, 1, tuple(range(1_000))))
    assert 0 <= tokens.min() < 50
    assert 2**17 - 50 < tokens.max() < 2**17
    assert len(np.unique(tokens)) > 0.95 * (1 - np.exp(-512_000 / 2**17)) * 2**17
    assert len({row.tobytes() for row in tokens.reshape(1_000, 512)}) == 1_000


@pytest.mark.parametrize("name", WORKLOADS)
def test_drawn_requests_are_as_in_a_trace(name):
    requests = WORKLOADS[name](300)
    assert len(requests) == 300
    times = [request.timestamp for request in requests]
    assert times == sorted(times)
    assert requests == WORKLOADS[name](300), "a seed draws the same"


@pytest.mark.parametrize("draw", [draw_conversations, draw_agents])
def test_another_seed_draws_others(draw):
    assert draw(50, seed=1) != draw(50, seed=2)


@pytest.mark.parametrize("draw", [draw_conversations, draw_agents])
def test_an_id_names_a_whole_prefix(draw):
    """So what precedes an id is the same wherever it occurs, and a partial one occurs once."""
    prefixes, partial = {}, []
    for request in draw(400):
        *whole, last = request.hash_ids
        partial.append(last)
        for position, hash_id in enumerate(whole):
            prefix = tuple(whole[:position])
            assert prefixes.setdefault(hash_id, prefix) == prefix
    assert len(set(partial)) == 400
    assert not prefixes.keys() & set(partial)


def test_agents_share_their_beginning_and_take_turns():
    requests = draw_agents(600, num_sessions=4)
    assert len({request.hash_ids[:24] for request in requests}) == 1
    sessions = [request.hash_ids[30] for request in requests]
    assert len(set(sessions)) == 4
    assert sum(a != b for a, b in pairwise(sessions)) > 100


def test_conversations_grow_and_most_are_short():
    requests = draw_conversations(1_000)
    ends = [request.hash_ids[:-1] for request in requests]
    continued = sum(ids[:-1] in set(ends) or ids in set(ends[:n]) for n, ids in enumerate(ends))
    assert 0 < continued < 700
