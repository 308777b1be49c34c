"""The engine's results: tokens as they come, completions, counts of drafts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from mamba_cache.context import Admission
from mamba_cache.errors import CapacityError

__all__ = ["Completion", "DecodingStats", "FinishReason", "TokenEvent"]


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    """It generated one of its stop tokens."""

    LENGTH = "length"
    """It reached ``max_new_tokens``, or the context's ``max_sequence_length``."""

    FAILED = "failed"
    """It needs more memory than there is, even when it runs alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingStats:
    """What decoding steps brought; add those of several requests with ``+``.

    Attributes:
        steps: Steps in which the request decoded.
        tokens: Tokens generated in them.
        drafted_tokens: Drafts that were verified.
        accepted_tokens: Drafts that were right, and became part of the answer.
    """

    steps: int = 0
    tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: DecodingStats) -> DecodingStats:
        """Return what both brought together."""
        return DecodingStats(
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            drafted_tokens=self.drafted_tokens + other.drafted_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
        )

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one request in one step, on average; 1 without drafts, 0 without steps."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of a request.

    Attributes:
        request_id: The request.
        tokens: What it generated.
        finish_reason: Why it ended.
        error: What was short, if it failed.
        ttft_seconds: From ``submit`` to its first token; None if it has none.
        admission: What was cached when it first ran; None if it did not, as a fork.
        skipped_tokens: Tokens of the prompt that were not computed; of a fork all.
        computed_tokens: Tokens computed before decoding; more than the rest of the prompt if the
            request was preempted, or its step aborted, and some had to be computed again.
    """

    request_id: Hashable
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    error: CapacityError | None
    ttft_seconds: float | None
    admission: Admission | None
    skipped_tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of a request, or the end of one that failed.

    Attributes:
        request_id: The request.
        token: The token; None if the request failed.
        completion: What became of the request, with its last event.
    """

    request_id: Hashable
    token: int | None
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        """Whether the request ended."""
        return self.completion is not None
