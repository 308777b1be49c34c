"""Traces of requests: read, drawn, and turned into tokens."""

import json
from itertools import pairwise

import numpy as np
import pytest

from mamba_cache.bench.workload import (
    TOKENS_PER_HASH_ID,
    WORKLOADS,
    TraceRequest,
    draw_agents,
    draw_conversations,
    prompt_tokens,
    read_trace,
)
from mamba_cache.errors import InvalidArgumentError

LINE = {"timestamp": 7, "input_length": 600, "output_length": 5, "hash_ids": [3, 9]}


@pytest.fixture
def trace(tmp_path):
    def write(*lines):
        path = tmp_path / "trace.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts), encoding="utf-8")
        return path

    return write


def test_a_trace_is_read_in_order_up_to_the_limit(trace):
    path = trace(LINE, LINE | {"timestamp": 8, "more": True}, LINE)
    first, second = read_trace(path, 2)
    assert first == TraceRequest(7, 600, 5, (3, 9))
    assert second.timestamp == 8
    assert len(read_trace(path)) == 3


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 of the trace: "),
        ("[]", "line 2 of the trace: "),
        ({"timestamp": 1}, "line 2 of the trace lacks 'input_length'"),
        (LINE | {"hash_ids": [3]}, r"line 2 of the trace: 600 prompt tokens need 2 hash_ids"),
        (LINE | {"hash_ids": [3, 9, 4]}, "got 3"),
        (LINE | {"hash_ids": [3, "x"]}, "hash_ids"),
        (LINE | {"input_length": 0}, "input_length must be an int >= 1, got 0"),
        (LINE | {"input_length": 600.5}, "got 600.5"),
        (LINE | {"output_length": -1}, "output_length must be an int >= 0, got -1"),
    ],
)
def test_a_bad_line_is_named(trace, line, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        read_trace(trace(LINE, line))


def test_a_file_without_requests_is_refused(trace, tmp_path):
    with pytest.raises(InvalidArgumentError, match="holds no request"):
        read_trace(trace())
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_trace(tmp_path / "binary")


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
