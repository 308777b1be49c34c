"""Requests of the engine, and what it tells of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from mamba_cache.context import Admission, MissReason, PreparedRequest, ScheduledRequest
from mamba_cache.engine.sampling import SamplingParams
from mamba_cache.errors import CapacityError

__all__ = ["Completion", "EngineRequest", "FinishReason", "TokenEvent"]


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    """It generated one of its stop tokens."""

    LENGTH = "length"
    """It reached ``max_new_tokens``, or the context's ``max_sequence_length``."""

    FAILED = "failed"
    """It needs more memory than there is, even when it runs alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of a request.

    Attributes:
        request_id: The request.
        tokens: What it generated.
        finish_reason: Why it ended.
        error: What was short, if it failed.
        ttft_seconds: From ``submit`` to its first token; None if it has none.
        total_seconds: From ``submit`` to its end.
        prompt_tokens: Tokens of the prompt.
        kv_matched_blocks: Blocks of the prompt that were cached when it first ran.
        state_matched_blocks: How many of them lie before the state that it resumed from.
        skipped_tokens: Tokens of the prompt that were not computed.
        computed_tokens: Tokens computed before decoding; more than the rest of the prompt if the
            request was preempted, or its step aborted, and some had to be computed again.
        miss_reason: Why nothing was skipped; None if something was.
    """

    request_id: Hashable
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    error: CapacityError | None
    ttft_seconds: float | None
    total_seconds: float
    prompt_tokens: int
    kv_matched_blocks: int
    state_matched_blocks: int
    skipped_tokens: int
    computed_tokens: int
    miss_reason: MissReason | None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of a request, or the end of one that failed.

    Attributes:
        request_id: The request.
        token: The token; None if the request failed.
        is_first: Whether it is the request's first.
        completion: What became of the request, with its last event.
    """

    request_id: Hashable
    token: int | None
    is_first: bool
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        """Whether the request ended."""
        return self.completion is not None


@dataclass(slots=True, eq=False)
class EngineRequest:
    """The engine's record of a request that is not finished.

    Where it stands, ``DynamicInferenceContext.status`` knows; it is not repeated here.

    Attributes:
        prepared: Its checked tokens and block hashes.
        sampling: How its tokens are chosen.
        submitted_at: Seconds of ``time.perf_counter``.
        reusable_blocks: Leading blocks that it need not compute if they are cached: all complete
            ones, less those of the tokens that must always be computed.
        digests: Names of its prompt's blocks: two requests with equal digests of block n agree in
            all tokens up to its end.
        generated: Its tokens so far.
        num_computed: Tokens of its sequence whose effect is in its live state.
        prefill_tokens: Tokens computed for it before decoding, those computed twice included.
        admission: What was cached when it first ran.
        first_token_at: Likewise seconds.
        branch_positions: Where a state of it is saved because others branch off there.
        waited_steps: Steps in which it let others go first.
    """

    prepared: PreparedRequest
    sampling: SamplingParams
    submitted_at: float
    reusable_blocks: int
    digests: tuple[bytes, ...] = ()
    generated: list[int] = field(default_factory=list)
    num_computed: int = 0
    prefill_tokens: int = 0
    admission: Admission | None = None
    first_token_at: float | None = None
    branch_positions: set[int] = field(default_factory=set)
    waited_steps: int = 0

    @property
    def request_id(self) -> Hashable:
        """The caller's name for it."""
        return self.prepared.request.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.prepared.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what was generated."""
        return self.prompt_tokens + len(self.generated)

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still compute or skip."""
        return self.prompt_tokens + self.sampling.max_new_tokens - self.num_computed

    def note_admission(self, admission: Admission) -> None:
        """Note where it begins to compute; what it was before it first ran is what is reported."""
        self.num_computed = admission.skip_tokens
        if not self.prefill_tokens:
            self.admission = admission

    def note_computed(self, scheduled: ScheduledRequest) -> None:
        """Note its part of a step that is committed."""
        self.num_computed = scheduled.start + scheduled.num_tokens
        if scheduled.is_prefill:
            self.prefill_tokens += scheduled.num_tokens

    def finish_reason(self, max_sequence_length: int) -> FinishReason | None:
        """Say why it has all its tokens; None if it goes on."""
        if self.generated[-1] in self.sampling.stop_tokens:
            return FinishReason.STOP
        too_long = self.num_tokens > max_sequence_length  # its last token cannot be computed
        if too_long or len(self.generated) == self.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def complete(
        self, reason: FinishReason, now: float, error: CapacityError | None = None
    ) -> Completion:
        """Sum up the request, which ends at ``now``."""
        admission, first = self.admission, self.first_token_at
        return Completion(
            request_id=self.request_id,
            tokens=tuple(self.generated),
            finish_reason=reason,
            error=error,
            ttft_seconds=None if first is None else first - self.submitted_at,
            total_seconds=now - self.submitted_at,
            prompt_tokens=self.prompt_tokens,
            kv_matched_blocks=admission.kv_matched_blocks if admission else 0,
            state_matched_blocks=admission.state_matched_blocks if admission else 0,
            skipped_tokens=admission.skip_tokens if admission else 0,
            computed_tokens=self.prefill_tokens,
            miss_reason=admission.miss_reason if admission else None,
        )
