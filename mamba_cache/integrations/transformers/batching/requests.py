"""The requests of a batch: one for each answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mamba_cache.context import Admission
from mamba_cache.context.scheduler import QueuedRequest
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.batching.answers import AnswerSettings

__all__ = ["BatchRequest"]


@dataclass(slots=True, eq=False, kw_only=True)
class BatchRequest(QueuedRequest):
    """One answer to one prompt."""

    request_id: str  # its caller's name for it; ``key`` is the context's
    settings: AnswerSettings  # how the answer is made
    seed: int  # of its draws
    first_token: int | None = None  # of its answer, if that is known beforehand
    tell: Callable[[int], None] | None = None  # called with each token
    answer: list[int] = field(default_factory=list)  # its tokens so far
    # Their log-probabilities, if they are asked for.
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)  # when each was there, likewise
    max_tokens: int = 0  # of its answer, as many as it may have and as there is room for
    fault: Exception | None = None  # what failed its last step; None: that was computed
    is_over: bool = False  # it has ended, one way or the other
    cached_tokens: int = 0  # of its prompt, not computed when it was first admitted
    # Seconds of ``time.perf_counter``.
    created_time: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108
    started_time: float = -1.0  # when it was first admitted; -1 before
    finished_time: float = -1.0  # when it ended; -1 before
    # The library's processors of its answer; None: it has none.
    processors: Any = field(init=False, default=None)
    _prompt: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """Its prompt's tokens."""
        if not self._prompt:
            self._prompt = self.prepared.tokens.tolist()
        return self._prompt

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prepared.tokens) + len(self.answer)

    def note_admission(self, admission: Admission) -> None:
        """Note what was cached, and when it was admitted first."""
        if self.started_time < 0:
            self.cached_tokens = admission.skip_tokens
            self.begin()

    def begin(self) -> None:
        """Note when it was admitted first."""
        self.started_time = time.perf_counter()

    def end(self) -> None:
        """Note that it is over, and when."""
        self.is_over = True
        self.finished_time = time.perf_counter()

    def begin_answer(self) -> None:
        """Make the processors of its answer; a fork that found no room begins once more."""
        self.logprobs.clear()
        if self.settings.make_processors is not None:
            try:
                self.processors = self.settings.make_processors(self.prompt)
            except Exception as error:  # of this request's settings: the others go on
                self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Note that its own settings, processors or streamer keep it from going on."""
        if self.error is None:
            self.error = InvalidArgumentError(str(error) or repr(error))
            self.error.__cause__ = error
