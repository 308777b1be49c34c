"""The requests of a batch: one for each answer."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mamba_cache.context import PreparedRequest
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.batching.answers import AnswerSettings
from mamba_cache.integrations.transformers.batching.sampling import Draw

__all__ = ["BatchRequest", "branch_positions", "common_blocks"]


@dataclass(slots=True, eq=False)
class BatchRequest:
    """One answer to one prompt."""

    request_id: str  # what its caller calls it
    # Its prompt, checked and hashed, and its first token if that was chosen from cached logits; the
    # context knows it by another name.
    prepared: PreparedRequest
    settings: AnswerSettings  # how the answer is made
    seed: int  # of its draws
    reusable_blocks: int  # leading blocks that it need not compute if they are cached
    parent: BatchRequest | None = None  # the request of the same prompt that it is to be a fork of
    # Those that are to be forks of it, once it has its first token.
    children: list[BatchRequest] = field(default_factory=list)
    tell: Callable[[int], None] | None = None  # called with each token
    answer: list[int] = field(default_factory=list)  # its tokens so far
    # Their log-probabilities, if they are asked for.
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)  # when each was there, likewise
    most_tokens: int = 0  # of its answer, as many as it may have and as there is room for
    error: Exception | None = None  # why it could not run
    is_over: bool = False  # it has ended, one way or the other
    cached_tokens: int = 0  # of its prompt, not computed when it was first admitted
    computed: int = 0  # tokens that it had computed before the chunk that is scheduled
    admitted: int = -1  # its number in the order of admissions; -1 before
    waited_steps: int = 0  # steps in which it let others go first
    # Where a state of it is saved because others branch off there.
    branch_positions: set[int] = field(default_factory=set)
    # Seconds of ``time.perf_counter``.
    created_time: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108
    started_time: float = -1.0  # when it was first admitted; -1 before
    finished_time: float = -1.0  # when it ended; -1 before
    num_prompt_tokens: int = field(init=False)  # tokens of its prompt
    # The library's processors of its answer; None: it has none.
    processors: Any = field(init=False, default=None)
    _prompt: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prepared.tokens)

    @property
    def key(self) -> Any:
        """What the context calls it."""
        return self.prepared.request.request_id

    @property
    def prompt(self) -> list[int]:
        """Its prompt's tokens."""
        if not self._prompt:
            self._prompt = self.prepared.tokens[: self.num_prompt_tokens].tolist()
        return self._prompt

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.num_prompt_tokens + len(self.answer)

    @property
    def awaits_fork(self) -> bool:
        """Whether it will be a fork of a request that has no token yet."""
        return self.parent is not None and not self.parent.is_over and not self.parent.answer

    def begin(self) -> None:
        """Notes when it was admitted first."""
        self.started_time = time.perf_counter()

    def end(self) -> None:
        """Notes that it is over, and when."""
        self.is_over = True
        self.finished_time = time.perf_counter()

    def draw(self) -> Draw:
        """Returns how its next token is chosen."""
        tokens: list[int] = []
        if not self.answer:  # a fork that found no room draws its first token once more
            self.logprobs.clear()
        if self.settings.make_processors is not None:
            tokens = [*self.prompt, *self.answer]
            if not self.answer:
                try:
                    self.processors = self.settings.make_processors(self.prompt)
                except Exception as error:  # of this request's settings: the others go on
                    self.refuse(error)
        number = len(self.answer)
        return Draw(self.settings, self.seed, number, tokens, self.processors, self.refuse)

    def refuse(self, error: Exception) -> None:
        """Note that its own settings, processors or streamer keep it from going on."""
        if self.error is None:
            self.error = InvalidArgumentError(str(error) or repr(error))
            self.error.__cause__ = error


def common_blocks(request: BatchRequest, other: BatchRequest) -> int:
    """Counts the leading blocks that ``request`` need not compute once ``other`` has.

    Each digest names the whole prefix up to its block's end, so a binary search finds the first
    that differs.
    """
    own, its = request.prepared.hashes.digests, other.prepared.hashes.digests
    limit = min(request.reusable_blocks, len(its))
    return bisect_left(range(limit), True, key=lambda block: own[block] != its[block])


def branch_positions(
    request: BatchRequest, queued: Iterable[BatchRequest], *, start: int, block_size_tokens: int
) -> list[int]:
    """Returns where queued requests branch off one that computes from ``start`` on, ascending."""
    found = {
        common_blocks(other, request) * block_size_tokens
        for other in queued
        if other is not request
    }
    return sorted(p for p in found - request.branch_positions if p > start)
