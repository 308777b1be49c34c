"""Workloads: random requests in the form of a trace.

``python tests/support/drawn_traces.py agents > agents.jsonl`` writes one to replay.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice

import numpy as np

from mamba_cache.cli.traces import TOKENS_PER_HASH_ID, TraceRequest


def draw_conversations(num_requests: int = 4_000, *, seed: int = 0) -> list[TraceRequest]:
    """Draw a chat service's requests: conversations that grow turn by turn, and single questions.

    They begin with one of a few system prompts. A user returns after about a minute, to four of ten
    conversations; the other conversations end.
    """
    rng = np.random.default_rng(seed)
    draw = _new_ids()
    systems = [draw(length) for length in (2, 4, 8, 16)]

    def turns(start: float) -> Iterator[_Turn]:
        context = list(systems[rng.choice(4, p=(0.4, 0.3, 0.2, 0.1))])
        now = start
        while True:
            context += draw(int(rng.lognormal(1.5, 1.2)))
            yield _Turn(now, tuple(context), int(rng.integers(1, TOKENS_PER_HASH_ID)))
            now += 5_000 + rng.exponential(60_000)
            if rng.random() > 0.4 or len(context) > 250:
                return

    return _interleave(turns, _arrivals(rng, mean_ms=300), num_requests, draw, rng)


def draw_agents(
    num_requests: int = 2_000, *, num_sessions: int = 30, seed: int = 0
) -> list[TraceRequest]:
    """Draw the requests of coding agents: a few long sessions, which take turns.

    All begin with one system prompt. Each turn adds the output of a tool; a long session continues
    from a summary. Most turns follow at once, some wait for a person.
    """
    rng = np.random.default_rng(seed)
    draw = _new_ids()
    system = draw(24)

    def turns(start: float) -> Iterator[_Turn]:
        now = start
        task = draw(int(rng.integers(20, 60)))
        summary: list[int] = []
        while True:
            context = [*system, *task, *summary]
            limit = rng.integers(340, 480)
            while len(context) < limit:
                yield _Turn(now, tuple(context), int(rng.integers(1, TOKENS_PER_HASH_ID)))
                now += rng.exponential(8_000) + (rng.random() < 0.05) * rng.exponential(400_000)
                context += draw(1 + int(rng.exponential(7)))
            summary = draw(int(rng.integers(5, 60)))

    starts = iter(sorted(rng.uniform(0, 1_200_000, num_sessions).tolist()))
    return _interleave(turns, starts, num_requests, draw, rng)


def draw_documents(num_requests: int = 4_000, *, seed: int = 0) -> list[TraceRequest]:
    """Draw questions about documents, some more popular than others; half of all prompts come once.

    All begin with one system prompt. The popular documents change over time. A question comes after
    the whole document, or after a part of it.
    """
    rng = np.random.default_rng(seed)
    draw = _new_ids()
    system = draw(4)
    documents = [draw(int(rng.integers(10, 80))) for _ in range(60)]
    weights = 1 / np.arange(1, len(documents) + 1)
    weights /= weights.sum()
    numbers = count()

    def turns(start: float) -> Iterator[_Turn]:
        number = next(numbers)
        if rng.random() < 0.5:
            context = [*system, *draw(int(rng.integers(2, 60)))]
        else:
            rank = int(rng.choice(len(documents), p=weights))
            document = documents[(rank + number // 1_000 * 7) % len(documents)]
            part = len(document) if rng.random() < 0.7 else int(rng.integers(1, len(document)))
            context = [*system, *document[:part], *draw(int(rng.integers(0, 4)))]
        yield _Turn(start, tuple(context), int(rng.integers(1, TOKENS_PER_HASH_ID)))

    return _interleave(turns, _arrivals(rng, mean_ms=300), num_requests, draw, rng)


def draw_mixed(num_requests: int = 4_000, *, seed: int = 0) -> list[TraceRequest]:
    """Draw one service's requests: conversations, agents, documents and single prompts in turn.

    Their shares change every 500 requests.
    """
    rng = np.random.default_rng(seed)
    parts = [
        draw_conversations(num_requests, seed=seed + 1),
        draw_agents(num_requests, num_sessions=12, seed=seed + 2),
        draw_documents(num_requests, seed=seed + 3),
    ]
    sources = [iter(part) for part in parts]
    requests: list[TraceRequest] = []
    shares = np.full(len(parts), 1 / len(parts))
    while len(requests) < num_requests:
        if len(requests) % 500 == 0:
            shares = rng.dirichlet(np.ones(len(parts)))
        kind = int(rng.choice(len(parts), p=shares))
        request = next(sources[kind], None)
        if request is None:  # an agents' trace ends with its sessions
            return requests
        ids = tuple(hash_id * len(parts) + kind for hash_id in request.hash_ids)
        requests.append(replace(request, hash_ids=ids))
    return requests


def draw_loop(
    num_requests: int = 4_000, *, num_prompts: int = 100, seed: int = 0
) -> list[TraceRequest]:
    """Draw prompts that repeat in the same order; there are more prompts than slots."""
    draw = _new_ids()
    rng = np.random.default_rng(seed)
    prompts = [draw(int(rng.integers(4, 20))) for _ in range(num_prompts)]
    return [_request_of(prompts[number % num_prompts]) for number in range(num_requests)]


def draw_scan(num_requests: int = 4_000, *, num_hot: int = 20, seed: int = 0) -> list[TraceRequest]:
    """Draw a few prompts that repeat, among many that occur once."""
    draw = _new_ids()
    rng = np.random.default_rng(seed)
    hot = [draw(int(rng.integers(4, 20))) for _ in range(num_hot)]
    return [
        _request_of(hot[rng.integers(num_hot)] if rng.random() < 0.2 else draw(12))
        for number in range(num_requests)
    ]


def draw_flip(
    num_requests: int = 40_000, *, flips_at: int = 20_000, seed: int = 0
) -> list[TraceRequest]:
    """Draw two classes of chats, of short and of long prompts; the long ones stop returning.

    Until request ``flips_at`` both classes return once, later only the short chats. They are also
    two classes of the adaptive policy, which distinguishes prompts with fewer than 8 new blocks
    from longer ones.
    """
    draw = _new_ids()
    rng = np.random.default_rng(seed)
    returning: list[tuple[int, list[int]]] = []
    requests: list[TraceRequest] = []
    while len(requests) < num_requests:
        number = len(requests)
        if returning and returning[0][0] <= number:
            _, ids = heapq.heappop(returning)
            requests.append(_request_of(ids))
            continue
        is_long = rng.random() < 0.5
        ids = draw(24 if is_long else 6)
        requests.append(_request_of(ids))
        if not is_long or number < flips_at:
            heapq.heappush(returning, (number + 1 + int(rng.exponential(60)), [*ids, *draw(2)]))
    return requests


WORKLOADS: dict[str, Callable[..., list[TraceRequest]]] = {
    "agents": draw_agents,
    "conversations": draw_conversations,
    "documents": draw_documents,
    "flip": draw_flip,
    "loop": draw_loop,
    "mixed": draw_mixed,
    "scan": draw_scan,
}
"""Workloads by name: functions of the number of requests, which has a default."""


@dataclass(order=True, slots=True)
class _Turn:
    time: float
    hash_ids: tuple[int, ...] = field(compare=False)
    tail_tokens: int = field(compare=False)


def _new_ids() -> Callable[[int], list[int]]:
    """Return a function that draws unused hash ids."""
    ids = count()
    return lambda number: list(islice(ids, number))


def _arrivals(rng: np.random.Generator, *, mean_ms: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.exponential(mean_ms)
        yield now


def _interleave(
    turns: Callable[[float], Iterator[_Turn]],
    starts: Iterator[float],
    num_requests: int,
    draw: Callable[[int], list[int]],
    rng: np.random.Generator,
) -> list[TraceRequest]:
    """Return the first requests of sessions that begin at ``starts``, in order of time."""
    requests: list[TraceRequest] = []
    waiting: list[tuple[_Turn, int, Iterator[_Turn]]] = []
    numbers = count()
    upcoming = next(starts, None)
    while len(requests) < num_requests and (waiting or upcoming is not None):
        if upcoming is not None and (not waiting or upcoming <= waiting[0][0].time):
            session = turns(upcoming)
            upcoming = next(starts, None)
        else:
            turn, _, session = heapq.heappop(waiting)
            requests.append(_as_request(turn, draw, rng))
        following = next(session, None)
        if following is not None:
            heapq.heappush(waiting, (following, next(numbers), session))
    return requests


def _as_request(
    turn: _Turn, draw: Callable[[int], list[int]], rng: np.random.Generator
) -> TraceRequest:
    return TraceRequest(
        input_length=len(turn.hash_ids) * TOKENS_PER_HASH_ID + turn.tail_tokens,
        output_length=1 + int(rng.exponential(300)),
        hash_ids=(*turn.hash_ids, *draw(1)),
    )


def _request_of(ids: list[int]) -> TraceRequest:
    """Return a request of whole blocks plus one token."""
    return TraceRequest(len(ids) * TOKENS_PER_HASH_ID + 1, 1, tuple(ids))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--limit", type=int, help="requests; default: the workload's own number")
    options = parser.parse_args()
    limit = () if options.limit is None else (options.limit,)
    for drawn in WORKLOADS[options.workload](*limit):
        line = {"input_length": drawn.input_length, "output_length": drawn.output_length}
        line |= {"hash_ids": drawn.hash_ids}
        print(json.dumps(line))
