"""Times a chat: total time of the first tokens of all its answers.

Each request is timed three ways in turn: by plain transformers, through the prefix cache, and as
one bare forward of its new tokens over a cache of transformers with all tokens of earlier requests,
which is the time of a prefix cache without overhead. The prefix cache gets the system prompt's end
as a checkpoint.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from measuring import Measurement, progress
from models import Subject, copy_of, evictions

from mamba_cache.integrations.transformers import PrefixCache

_WAYS = {
    "plain_ms": "plain transformers",
    "cached_ms": "through the cache",
    "bare_ms": "the new tokens alone",
}


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat to measure: users take turns, and all have the same system prompt."""

    system_tokens: int = 3000  # tokens of the system prompt
    users: int = 2  # number of users
    turns: int = 8  # turns of each user
    message_tokens: int = 128  # tokens of each message
    answer_tokens: int = 8  # tokens of each answer

    @property
    def requests(self) -> int:
        """Number of answers."""
        return self.users * self.turns

    @property
    def tokens(self) -> int:
        """Number of different tokens that go through the model."""
        return self.system_tokens + self.requests * (self.message_tokens + self.answer_tokens)


@dataclass(frozen=True, slots=True)
class _Request:
    """One request of a chat, and the milliseconds to its answer's first token, by way."""

    turn: int
    user: int
    prompt_tokens: int
    new_tokens: int
    skipped_tokens: int
    plain_ms: float
    cached_ms: float
    bare_ms: float

    def with_medians_of(self, others: Sequence[_Request]) -> _Request:
        """Return the same request with the medians of those of several chats."""
        medians = {way: statistics.median(getattr(one, way) for one in others) for way in _WAYS}
        skipped = statistics.median_low(one.skipped_tokens for one in others)
        return replace(self, skipped_tokens=skipped, **medians)


@dataclass(slots=True)
class _User:
    """A user's side of the chat."""

    history: torch.Tensor  # [1, length] all tokens so far, or those of the system prompt
    past: Any = None  # transformers' cache of these tokens


def measure_chat(
    subject: Subject, chat: Chat, rounds: int
) -> tuple[list[Measurement], dict[str, Any]]:
    """Measure a chat, each round with another system prompt and other messages.

    Returns:
        The figures, and the chat with the median of each request's times.
    """
    cache = subject.prefix_cache(
        num_tokens=(rounds + 1) * chat.tokens, num_calls=(rounds + 1) * chat.requests
    )
    kept = []
    with cache:
        for number in range(rounds + 1):
            progress(f"chat: round {number} of {rounds}")
            gc.collect()
            requests = list(_requests(subject, chat, cache))
            kept += [requests] if number else []
        num_evicted = evictions(cache)
    medians = [asdict(same[0].with_medians_of(same)) for same in zip(*kept, strict=True)]
    totals = {
        way: [sum(getattr(one, way) for one in requests) for requests in kept] for way in _WAYS
    }
    figures = list(_figures(subject, chat, totals, num_evicted))
    return figures, asdict(chat) | {"totals_ms": totals, "requests": medians}


def _requests(subject: Subject, chat: Chat, cache: PrefixCache) -> Iterator[_Request]:
    """Yield each request of one chat."""
    system = subject.random(chat.system_tokens)
    computed = subject.fill(system)
    users = [_User(system) for _ in range(chat.users)]
    for turn in range(chat.turns):
        for index, user in enumerate(users):
            if user.past is None:
                # The first request computes the system prompt; other users find it cached.
                user.past = copy_of(computed) if index else subject.new_cache()
            prompt = torch.cat([user.history, subject.random(chat.message_tokens)], dim=1)
            new = prompt[:, user.past.get_seq_length() :]
            bare = 1e3 * subject.time(partial(subject.forward, new, user.past))
            plain = 1e3 * subject.first_token(subject.model, prompt).seconds
            before = cache.stats().skipped_tokens
            answered = subject.first_token(
                cache, prompt, max_new_tokens=chat.answer_tokens, checkpoints=[chat.system_tokens]
            )
            user.history, cached = answered.ids, 1e3 * answered.seconds
            skipped = cache.stats().skipped_tokens - before
            answer = user.history[:, prompt.shape[1] : -1]  # its last token was not computed
            if answer.shape[1]:
                subject.fill(answer, user.past)
            yield _Request(
                turn + 1, index + 1, prompt.shape[1], new.shape[1], skipped, plain, cached, bare
            )


def _figures(
    subject: Subject, chat: Chat, totals: dict[str, list[float]], num_evicted: int
) -> Iterator[Measurement]:
    title = f"chat of {chat.users} users and {chat.turns} turns"
    medians = {way: statistics.median(totals[way]) for way in _WAYS}
    for way, name in _WAYS.items():
        rounds = len(totals[way])
        detail = f"{min(totals[way]):,.0f} to {max(totals[way]):,.0f} ms"
        yield Measurement(
            f"{title}, first tokens, {name}", medians[way], "ms", runs=rounds, detail=detail
        )
    over = medians["cached_ms"] / medians["bare_ms"]
    yield Measurement(f"{title}, over the new tokens alone", over, "x")
    faster = medians["plain_ms"] / medians["cached_ms"]
    yield Measurement(f"{title}, faster than plain", faster, "x")
    yield Measurement(f"{title}, given up for lack of memory", num_evicted, "")
