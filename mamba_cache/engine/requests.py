"""The engine's record of a request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import eq

from mamba_cache.config import CacheConfig
from mamba_cache.context import Admission, PreparedRequest, ScheduledRequest
from mamba_cache.engine.drafting import Drafter
from mamba_cache.engine.results import Completion, DecodingStats, FinishReason, TokenEvent
from mamba_cache.engine.sampling import SamplingParams
from mamba_cache.errors import CapacityError

__all__ = ["EngineRequest"]


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request that is not finished.

    Where it stands, ``DynamicInferenceContext.status`` knows; it is not repeated here.

    Attributes:
        prepared: Its checked tokens and block hashes.
        sampling: How its tokens are chosen.
        submitted_at: Seconds of ``time.perf_counter``.
        reusable_blocks: Leading blocks that it need not compute if they are cached: all complete
            ones, less those of the tokens that must always be computed.
        digests: Names of its prompt's blocks: two requests with equal digests of block n agree in
            all tokens up to its end.
        tokens: Its prompt and its answer so far.
        drafter: Guesses how it goes on; None: nobody does.
        num_computed: Tokens of its sequence whose effect is in its live state.
        prefill_tokens: Tokens computed for it before decoding, those computed twice included.
        decoding: What its decoding steps brought.
        admission: What was cached when it first ran.
        first_token_at: Likewise seconds.
        branch_positions: Where a state of it is saved because others branch off there.
        waited_steps: Steps in which it let others go first.
    """

    prepared: PreparedRequest
    sampling: SamplingParams
    submitted_at: float
    reusable_blocks: int
    digests: tuple[bytes, ...]
    tokens: list[int]
    drafter: Drafter | None
    num_computed: int = 0
    prefill_tokens: int = 0
    decoding: DecodingStats = field(default_factory=DecodingStats)
    admission: Admission | None = None
    first_token_at: float | None = None
    branch_positions: set[int] = field(default_factory=set)
    waited_steps: int = 0

    @classmethod
    def make(
        cls,
        prepared: PreparedRequest,
        sampling: SamplingParams,
        config: CacheConfig,
        drafter: Drafter | None,
        submitted_at: float,
    ) -> EngineRequest:
        """Return the record of a new request, for a context with these settings."""
        reusable_tokens = max(0, len(prepared.tokens) - config.min_computed_tokens)
        return cls(
            prepared,
            sampling,
            submitted_at,
            reusable_blocks=reusable_tokens // config.block_size_tokens,
            digests=prepared.hashes.digests,
            tokens=prepared.tokens.tolist(),
            drafter=drafter,
        )

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
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens of its answer so far."""
        return self.num_tokens - self.prompt_tokens

    @property
    def tokens_left(self) -> int:
        """Tokens that it may still compute or skip."""
        return self.prompt_tokens + self.sampling.max_new_tokens - self.num_computed

    def note_admission(self, admission: Admission) -> None:
        """Note where it begins to compute; what it was before it first ran is what is reported."""
        self.num_computed = admission.skip_tokens
        if not self.prefill_tokens:
            self.admission = admission

    def propose_drafts(self, max_drafts: int, max_sequence_length: int) -> list[int]:
        """Guess its next tokens, no more of them than it can still generate."""
        useful = min(
            max_drafts,
            self.sampling.max_new_tokens - self.num_generated - 1,
            max_sequence_length - self.num_tokens,
        )
        if self.drafter is None or useful <= 0:
            return []
        return list(self.drafter.propose(self.tokens, useful)[:useful])

    def note_computed(self, scheduled: ScheduledRequest, tokens: Sequence[int]) -> DecodingStats:
        """Note its part of a committed step and the tokens that it brought; return what is new."""
        if scheduled.is_prefill:
            self.num_computed = scheduled.start + scheduled.num_tokens
            self.prefill_tokens += scheduled.num_tokens
            return DecodingStats()
        self.num_computed = scheduled.start + len(tokens)
        brought = DecodingStats(
            steps=1,
            tokens=len(tokens),
            drafted_tokens=len(scheduled.drafts),
            accepted_tokens=sum(map(eq, tokens, scheduled.drafts)),
        )
        self.decoding += brought
        return brought

    def accept(self, token: int, now: float, max_sequence_length: int) -> TokenEvent:
        """Append a sampled token; the event says whether it was the last."""
        self.tokens.append(token)
        is_first = self.first_token_at is None
        if is_first:
            self.first_token_at = now
        reason = self._finish_reason(max_sequence_length)
        completion = None if reason is None else self._complete(reason, now)
        return TokenEvent(self.request_id, token, is_first, completion)

    def fail(self, error: CapacityError, now: float) -> TokenEvent:
        """End the request without a further token."""
        completion = self._complete(FinishReason.FAILED, now, error)
        return TokenEvent(self.request_id, None, False, completion)

    def _finish_reason(self, max_sequence_length: int) -> FinishReason | None:
        if self.tokens[-1] in self.sampling.stop_tokens:
            return FinishReason.STOP
        too_long = self.num_tokens > max_sequence_length  # its last token cannot be computed
        if too_long or self.num_generated == self.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _complete(
        self, reason: FinishReason, now: float, error: CapacityError | None = None
    ) -> Completion:
        admission, first = self.admission, self.first_token_at
        return Completion(
            request_id=self.request_id,
            tokens=tuple(self.tokens[self.prompt_tokens :]),
            finish_reason=reason,
            error=error,
            ttft_seconds=None if first is None else first - self.submitted_at,
            total_seconds=now - self.submitted_at,
            prompt_tokens=self.prompt_tokens,
            kv_matched_blocks=admission.kv_matched_blocks if admission else 0,
            state_matched_blocks=admission.state_matched_blocks if admission else 0,
            skipped_tokens=admission.skip_tokens if admission else 0,
            computed_tokens=self.prefill_tokens,
            decoding=self.decoding,
            miss_reason=admission.miss_reason if admission else None,
        )
