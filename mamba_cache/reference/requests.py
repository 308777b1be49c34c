"""The engine's record of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import cast

from mamba_cache.context import Admission, ScheduledRequest
from mamba_cache.context.scheduler import QueuedRequest
from mamba_cache.errors import CapacityError
from mamba_cache.reference.drafting import Drafter
from mamba_cache.reference.results import Completion, DecodingStats, FinishReason, TokenEvent
from mamba_cache.reference.sampling import SamplingParams

__all__ = ["EngineRequest"]


@dataclass(slots=True, eq=False, kw_only=True)
class EngineRequest(QueuedRequest):
    """What the engine keeps of a request beside what the context knows of it."""

    sampling: SamplingParams
    submitted_at: float  # seconds of ``time.perf_counter``
    drafter: Drafter | None
    num_told: int = 0  # tokens of its answer that events were made of
    prefill_tokens: int = 0  # computed before decoding, those computed twice included
    decoding: DecodingStats = field(default_factory=DecodingStats)
    admission: Admission | None = None  # what was cached when it first ran
    first_token_at: float | None = None  # likewise seconds
    _tokens: list[int] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.prepared.tokens)

    def note_admission(self, admission: Admission) -> None:
        """Note what was cached when it first ran: that is what is reported."""
        if not self.prefill_tokens and not self.num_told:  # a fork has tokens without any prefill
            self.admission = admission

    def propose_drafts(
        self, output: Sequence[int], max_drafts: int, max_sequence_length: int
    ) -> list[int]:
        """Guess its next tokens, no more of them than it can still generate."""
        useful = min(
            max_drafts,
            self.sampling.max_new_tokens - len(output) - 1,
            max_sequence_length - self.prompt_tokens - len(output),
        )
        if self.drafter is None or useful <= 0:
            return []
        # Prompt and answer in one list, which grows: to join them anew takes time in each step.
        tokens: list[int] = self._tokens or self.prepared.tokens.tolist()
        self._tokens = tokens
        tokens += output[len(tokens) - self.prompt_tokens :]
        return list(self.drafter.propose(tokens, useful)[:useful])

    def note_computed(self, scheduled: ScheduledRequest, tokens: Sequence[int]) -> DecodingStats:
        """Note its part of a committed step and the tokens that it brought; return what is new."""
        if scheduled.is_prefill:
            self.prefill_tokens += scheduled.num_tokens
            return DecodingStats()
        brought = DecodingStats(
            steps=1,
            tokens=len(tokens),
            drafted_tokens=len(scheduled.drafts),
            accepted_tokens=sum(map(eq, tokens, scheduled.drafts)),
        )
        self.decoding += brought
        return brought

    def events(
        self, output: Callable[[int], Sequence[int]], now: float, max_sequence_length: int
    ) -> list[TokenEvent]:
        """Return the events since the last ones; ``output`` returns tokens from a number on."""
        events = []
        for number, token in enumerate(output(self.num_told), self.num_told + 1):
            reason = self._finish_reason(token, number, max_sequence_length)
            done = None if reason is None else self._complete(reason, output(0)[:number], now)
            events.append(TokenEvent(self.key, token, number == 1, done))
            if done is not None:
                return events
        if self.error is not None:
            done = self._complete(FinishReason.FAILED, output(0), now)
            events.append(TokenEvent(self.key, None, False, done))
        return events

    def note_events(self, events: Sequence[TokenEvent], now: float) -> None:
        """Note that events were made."""
        self.num_told += sum(event.token is not None for event in events)
        if self.num_told and self.first_token_at is None:
            self.first_token_at = now

    def _finish_reason(
        self, token: int, number: int, max_sequence_length: int
    ) -> FinishReason | None:
        if token in self.sampling.stop_tokens:
            return FinishReason.STOP
        # Its last token cannot be computed.
        too_long = self.prompt_tokens + number > max_sequence_length
        if too_long or number == self.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _complete(self, reason: FinishReason, output: Sequence[int], now: float) -> Completion:
        admission = self.admission
        first = self.first_token_at or (now if output else None)
        is_fork = admission is None and bool(output)
        return Completion(
            request_id=self.key,
            tokens=tuple(output),
            finish_reason=reason,
            error=cast("CapacityError | None", self.error),
            ttft_seconds=None if first is None else first - self.submitted_at,
            total_seconds=now - self.submitted_at,
            prompt_tokens=self.prompt_tokens,
            kv_matched_blocks=admission.kv_matched_blocks if admission else 0,
            state_matched_blocks=admission.state_matched_blocks if admission else 0,
            skipped_tokens=admission.skip_tokens if admission else self.prompt_tokens * is_fork,
            computed_tokens=self.prefill_tokens,
            decoding=self.decoding,
            miss_reason=admission.miss_reason if admission else None,
        )
