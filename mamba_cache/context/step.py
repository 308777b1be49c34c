"""A step as the embedder sees it, and its plan as plain values."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mamba_cache._indices import ZERO_SOURCE
from mamba_cache.context.requests import ActiveRequest
from mamba_cache.metadata import (
    BoundaryEntry,
    CheckpointEntry,
    SequenceSlice,
    StepMetadata,
    StepPlan,
)

__all__ = ["ScheduledRequest", "Step", "describe_request", "plan_step"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        request_id: The request.
        row: Its row in the block tables and the live states.
        start: Tokens of its sequence before this step, as far as they are known on the host.
        num_tokens: Tokens computed in this step, drafts included.
        skip_tokens: Tokens that a state restored in this step made needless to compute.
        is_prefill: Whether the tokens are a chunk of the prompt rather than decoded ones.
        samples: Whether the last known token is computed, so that ``commit_step`` needs the next.
        drafts: Which of a decoding request's tokens are drafts; none where the device alone knows
            them.
    """

    request_id: Hashable
    row: int
    start: int
    num_tokens: int
    skip_tokens: int
    is_prefill: bool
    samples: bool
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What the forward computes.

    Attributes:
        requests: The batch in the order of the metadata's rows: decodes first, then prefills.
        metadata: What the model's layers read.
    """

    requests: tuple[ScheduledRequest, ...]
    metadata: StepMetadata

    @property
    def sampling_ids(self) -> tuple[Hashable, ...]:
        """Requests whose next token must be given to ``commit_step``."""
        return tuple(request.request_id for request in self.requests if request.samples)


def plan_step(decodes: Sequence[ActiveRequest], prefills: Sequence[ActiveRequest]) -> StepPlan:
    """Collect what a step does from the chunks of its requests, as plain values.

    Args:
        decodes: Requests that decode.
        prefills: Requests that compute a chunk of their prompt.
    """
    restores, boundaries = [], []
    for index, active in enumerate((*decodes, *prefills)):
        chunk = active.current_chunk
        if chunk.is_first:
            source = ZERO_SOURCE if chunk.lease is None else chunk.lease.slot
            restores.append((source, active.row))
        if chunk.boundary is not None:
            boundaries.append(BoundaryEntry(index, chunk.boundary.position, chunk.boundary.slot))
    return StepPlan(
        decodes=[_decode_slice(active) for active in decodes],
        prefills=[_prefill_slice(active) for active in prefills],
        checkpoints=[
            CheckpointEntry(index, checkpoint.position, checkpoint.slot)
            for index, active in enumerate(prefills)
            for checkpoint in active.current_chunk.inside
        ],
        restores=restores,
        boundaries=boundaries,
    )


def describe_request(active: ActiveRequest, *, is_prefill: bool) -> ScheduledRequest:
    """Return a request's part of the step that its chunk is for."""
    chunk = active.current_chunk
    return ScheduledRequest(
        request_id=active.request_id,
        row=active.row,
        start=chunk.start,
        num_tokens=chunk.num_tokens,
        skip_tokens=chunk.start if chunk.is_first else 0,
        is_prefill=is_prefill,
        samples=active.samples if is_prefill else True,
        drafts=chunk.drafts or (),
    )


def _decode_slice(active: ActiveRequest) -> SequenceSlice:
    """Return what is known of a decoding request's tokens; the device completes it with drafts."""
    chunk = active.current_chunk
    tokens = np.zeros(chunk.num_tokens, dtype=np.int32)
    tokens[:1] = active.tokens(active.num_tokens - 1, active.num_tokens)
    tokens[1:] = chunk.drafts or 0
    return SequenceSlice(row=active.row, start=active.most_computed, token_ids=tokens)


def _prefill_slice(active: ActiveRequest) -> SequenceSlice:
    chunk = active.current_chunk
    return SequenceSlice(
        row=active.row,
        start=chunk.start,
        token_ids=active.tokens(chunk.start, chunk.end),
        first_writable=active.num_shared_tokens,
    )
