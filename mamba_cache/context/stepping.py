"""Begins, commits and aborts steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from mamba_cache.context.admission import Admitter
from mamba_cache.context.checkpoints import CheckpointPlanner, Publisher
from mamba_cache.context.device_tokens import DeviceTokens, SentTokens
from mamba_cache.context.extractions import StepExtractions
from mamba_cache.context.requests import ActiveRequest, Chunk, RequestStatus
from mamba_cache.context.restore_order import SideStream
from mamba_cache.context.speculation import Drafts, Speculation, check_accepted
from mamba_cache.context.stats import StatsCounters
from mamba_cache.context.step import ScheduledRequest, Step, describe_request, plan_step
from mamba_cache.errors import (
    InvalidArgumentError,
    InvariantError,
    StepOrderError,
    UnwrittenStateWarning,
)
from mamba_cache.metadata import StepBuffers, StepMetadata, StepPlan
from mamba_cache.slots import MambaSlotAllocator

__all__ = ["StepRunner"]


class _Entry(NamedTuple):
    """A request of a step whose tokens are not on the host yet."""

    active: ActiveRequest
    num_releases: int
    scheduled: ScheduledRequest

    @property
    def is_current(self) -> bool:
        """Whether the request has kept its memory since."""
        return self.active.num_releases == self.num_releases

    def cut(self, tokens: list[int], count: int) -> list[int]:
        """Return the tokens that the request takes, as the device has decided."""
        if self.scheduled.is_prefill:
            return tokens[:1]
        return tokens[: max(0, min(count, self.scheduled.num_tokens))]


class StepRunner:
    """Holds the step in flight and carries its requests from one state to the next.

    Args:
        buffers: The step's tensors.
        slots: Where states are restored from and saved to.
        planner: Plans the checkpoints of decoding requests.
        admitter: Renews restores, and takes requests back.
        publisher: Makes blocks and states findable.
        counters: What is counted at commit.
        speculation: The device's side, if requests can have drafts.
        side_stream: Where restores are enqueued; None: on the current stream.
        extractions: Which layers have handed over their states.
    """

    def __init__(
        self,
        *,
        buffers: StepBuffers,
        slots: MambaSlotAllocator,
        planner: CheckpointPlanner,
        admitter: Admitter,
        publisher: Publisher,
        counters: StatsCounters,
        speculation: Speculation | None,
        side_stream: SideStream | None,
        extractions: StepExtractions,
    ) -> None:
        self._buffers = buffers
        self._slots = slots
        self._planner = planner
        self._admitter = admitter
        self._publisher = publisher
        self._counters = counters
        self._speculation = speculation
        self._side_stream = side_stream
        self._extractions = extractions
        self._has_warned = False
        self._requests: tuple[ActiveRequest, ...] = ()
        self._step: Step | None = None
        self._num_boundaries = 0
        self._uncollected: tuple[list[_Entry], SentTokens] | None = None
        self._is_advanced = False
        self._is_collecting = False

    @property
    def step(self) -> Step:
        """The step in flight.

        Raises:
            StepOrderError: There is none.
        """
        if self._step is None:
            raise StepOrderError("no step is in flight: call begin_step first")
        return self._step

    @property
    def requests(self) -> tuple[ActiveRequest, ...]:
        """The requests of the step in flight; a step that is only half begun is none."""
        return () if self._step is None else self._requests

    def require_collected(self) -> None:
        """Check that the tokens of the step before the one in flight are on the host.

        Raises:
            StepOrderError: They are not.
        """
        if self._uncollected is not None:
            raise StepOrderError("the last step is uncollected: collect_step brings its tokens")

    def require_none(self) -> None:
        """Check that no step is in flight.

        Raises:
            StepOrderError: One is.
        """
        if self._step is not None:
            raise StepOrderError("a step is in flight: commit_step or abort_step ends it")

    def begin(
        self,
        decodes: Sequence[ActiveRequest],
        prefills: Sequence[ActiveRequest],
        chunks: Sequence[Chunk],
        drafts: Drafts,
    ) -> Step:
        """Send the metadata and restore live states; on an exception the step is taken back.

        Args:
            decodes: Requests that decode.
            prefills: Requests that compute a chunk of their prompt.
            chunks: What each of ``decodes`` computes.
            drafts: Checked drafts.
        """
        self._requests = (*decodes, *prefills)
        try:
            for active, chunk in zip(decodes, chunks, strict=True):
                active.chunk = self._planner.plan_decode(active, chunk)
            for active in prefills:
                self._admitter.renew_restore(active)
            plan = plan_step(decodes, prefills)
            metadata = self._buffers.fill(plan)
            self._extractions.begin(metadata)
            self._num_boundaries = len(plan.boundaries)
            if self._speculation is not None:
                self._speculation.describe(metadata, drafts)
            self._restore(plan, metadata)
            scheduled = [describe_request(active, is_prefill=False) for active in decodes]
            scheduled += [describe_request(active, is_prefill=True) for active in prefills]
            self._step = Step(tuple(scheduled), metadata)
        except BaseException:
            self._preempt_all()
            raise
        return self._step

    def commit(self, new_tokens: Mapping[Hashable, list[int]]) -> None:
        """Save boundary states, publish what was written, and append the sampled tokens.

        Args:
            new_tokens: Checked tokens of each request that samples.
        """
        self._drop_unwritten()
        tokens = [new_tokens.get(active.request_id, []) for active in self._requests]
        if self._speculation is not None:
            self._advance(self._speculation, self._speculation.to_device(tokens))
        self._save_boundaries()
        for active, new in zip(self._requests, tokens, strict=True):
            if active.status is RequestStatus.DECODING:
                chunk, active.chunk = active.current_chunk, None
                self._settle_decode(active, chunk, new)
            else:
                self._settle_prefill(active)
                active.append_tokens(new)
        self._end_step()

    def commit_on_device(self, sampled: DeviceTokens) -> None:
        """Do what ``commit`` does as far as it needs no tokens on the host.

        Args:
            sampled: The step's tokens.

        Raises:
            StepOrderError: No step is in flight, or the last one is not collected.
            InvalidArgumentError: There is no speculation, or the tensors are of a wrong kind.
        """
        num_requests = len(self.step.requests)
        self.require_collected()
        if self._speculation is None:
            raise InvalidArgumentError(
                "tokens on the device need num_speculative_tokens of at least 1, got 0"
            )
        self._speculation.check_sampled(sampled, num_requests)
        self._drop_unwritten()
        self._advance(self._speculation, sampled)
        self._save_boundaries()
        sent = self._speculation.to_host(sampled)
        entries = []
        for active, scheduled in zip(self._requests, self.step.requests, strict=True):
            if scheduled.is_prefill:
                self._settle_prefill(active)
            else:
                active.uncollected, active.chunk = active.chunk, None
            entries.append(_Entry(active, active.num_releases, scheduled))
        self._uncollected = (entries, sent)
        self._end_step()

    def collect(self, check: Callable[[list[int]], object]) -> dict[Hashable, list[int]]:
        """Wait for the uncollected step's tokens, and do what needs them.

        Args:
            check: Raises if one of the tokens is no token id; the step stays uncollected then.

        Returns:
            The new tokens of each request that has not given its memory back since.

        Raises:
            StepOrderError: There is no uncollected step.
        """
        if self._uncollected is None:
            raise StepOrderError("no step is uncollected: commit_step with DeviceTokens makes one")
        entries, sent = self._uncollected
        tokens = [
            (entry.active, entry.cut(row, count))
            for entry, row, count in zip(entries, *sent.wait(), strict=True)
            if entry.is_current and entry.scheduled.samples
        ]
        check(list(chain.from_iterable(new for _, new in tokens)))
        self._is_collecting = True
        for active, new in tokens:
            chunk, active.uncollected = active.uncollected, None
            if chunk is None:
                active.append_tokens(new)
            else:
                self._settle_decode(active, chunk, new)
        self._uncollected = None
        self._is_collecting = False
        return {active.request_id: new for active, new in tokens}

    def abort(self) -> tuple[Hashable, ...]:
        """Take the step back, and return the ids of its requests, which are preempted.

        Raises:
            StepOrderError: No step is in flight.
        """
        ids = tuple(request.request_id for request in self.step.requests)
        self._preempt_all()
        self._counters.aborted_steps += 1
        return ids

    def drop(self) -> None:
        """Take back the step in flight, if there is one, and forget the uncollected one."""
        if self._step is not None:
            self.abort()
        self._uncollected = None

    def forget(self) -> None:
        """Have no step in flight; what its requests hold is dealt with by the caller."""
        self._end_step()
        self.note_all_used()
        self._uncollected = None
        self._is_collecting = False

    def check_invariants(self) -> None:
        """Prove that no step is collected in part.

        Raises:
            InvariantError: One is: ``collect`` broke off.
        """
        if self._is_collecting:
            raise InvariantError("the tokens of a step are collected in part")

    def check_ids(self, new_tokens: object) -> None:
        """Check that just the requests that sample have tokens.

        Raises:
            StepOrderError: No step is in flight, or the last one is not collected.
            InvalidArgumentError: A request is missing, or one is not expected.
        """
        expected = set(self.step.sampling_ids)
        self.require_collected()
        if not isinstance(new_tokens, Mapping):
            raise InvalidArgumentError(
                f"new_tokens must map request ids to tokens, got {type(new_tokens).__name__}"
            )
        missing, unexpected = expected - new_tokens.keys(), new_tokens.keys() - expected
        if missing or unexpected:
            raise InvalidArgumentError(
                f"new_tokens must name just the requests that sample, Step.sampling_ids: "
                f"missing {sorted(map(repr, missing))}, unexpected {sorted(map(repr, unexpected))}"
            )

    def check_accepted(self, new_tokens: Mapping[Hashable, Sequence[int]]) -> None:
        """Check that each request's new tokens can follow from what it computed.

        Raises:
            InvalidArgumentError: They cannot.
        """
        for active, scheduled in zip(self._requests, self.step.requests, strict=True):
            if scheduled.samples:
                check_accepted(scheduled, active.current_chunk, new_tokens[active.request_id])

    def _restore(self, plan: StepPlan, metadata: StepMetadata) -> None:
        if self._side_stream is not None:
            self._side_stream.restore(plan)
            return
        # Without the padding, which a kernel would look at entry by entry.
        planned = slice(len(plan.restores))
        self._slots.restore_slots(metadata.restore_sources[planned], metadata.restore_rows[planned])

    @property
    def cursors(self) -> torch.Tensor | None:
        """With drafts, [max_requests] int32: which live state of each request is current."""
        return None if self._speculation is None else self._speculation.cursors

    def scrub(self, decoding_rows: Sequence[int]) -> None:
        """Clear sampled tokens between two steps, but those that the next one begins with.

        Args:
            decoding_rows: Rows of the requests that decode.
        """
        if self._speculation is not None:
            self._speculation.scrub(decoding_rows)
        self.note_all_used()

    def note_all_used(self) -> None:
        """Note that something is enqueued which may have used any slot and live state."""
        if self._side_stream is not None:
            self._side_stream.end_all()

    def _advance(self, speculation: Speculation, sampled: DeviceTokens) -> None:
        if self._is_advanced:
            raise StepOrderError(
                "the device knows the step's tokens since a commit_step that broke off: "
                "abort_step takes the step back"
            )
        self._is_advanced = True
        speculation.advance(self.step.metadata, sampled)

    def _end_step(self) -> None:
        if self._side_stream is not None:
            self._side_stream.end_step()
        self._is_advanced = False
        self._extractions.end()
        self._step, self._requests = None, ()

    def _drop_unwritten(self) -> None:
        """Give up the states inside chunks unless every layer has handed over its part.

        A warning comes before anything is changed: made an error by a filter, it leaves the step
        in flight.
        """
        layers = self._extractions.missing_layers
        if not layers:
            return
        lacking = [active for active in self._requests if active.current_chunk.inside]
        if not self._has_warned:
            warnings.warn(_describe_unwritten(layers, lacking), stacklevel=5)
            self._has_warned = True
        for active in lacking:
            chunk = active.current_chunk
            active.chunk = self._planner.drop_inside(chunk)
            self._counters.unwritten_states += len(chunk.inside)

    def _save_boundaries(self) -> None:
        metadata = self.step.metadata
        # Of the plan: a chunk loses its checkpoint if the step before turns out to have reached it.
        planned = slice(self._num_boundaries)
        save = self._side_stream.save if self._side_stream else self._slots.copy_live_to_slots
        save(metadata.boundary_rows[planned], metadata.boundary_slots[planned])

    def _settle_prefill(self, active: ActiveRequest) -> None:
        chunk, samples = active.current_chunk, active.samples
        active.num_computed = chunk.end
        if chunk.lease is not None:
            self._publisher.note_consumed(chunk.lease)
        self._publisher.publish(active, chunk)
        self._counters.computed_tokens += chunk.num_tokens
        if active.admission is not None:
            self._counters.count_admission(active.admission)
            active.admission = None
        self._admitter.settle(active)
        active.status = RequestStatus.DECODING if samples else RequestStatus.PREFILLING

    def _settle_decode(self, active: ActiveRequest, chunk: Chunk, new_tokens: list[int]) -> None:
        """Make the accepted tokens of a decoding request part of its sequence."""
        outcome = self._planner.settle_decode(active, chunk, len(new_tokens))
        active.append_tokens(new_tokens)
        active.num_computed = outcome.end
        self._publisher.publish(active, outcome)
        self._counters.computed_tokens += chunk.num_tokens
        if outcome.boundary is not None and outcome.epoch == self._slots.epoch:
            self._publisher.supersede_decode_state(active, outcome.boundary)

    def _preempt_all(self) -> None:
        # Forgotten last: interrupted half-way, the step is seen to lack requests.
        for active in self._requests:
            self._admitter.release(active)
        self._end_step()


def _describe_unwritten(
    layers: Sequence[int], requests: Sequence[ActiveRequest]
) -> UnwrittenStateWarning:
    where = ", ".join(
        f"{active.request_id!r} at {[c.position for c in active.current_chunk.inside]}"
        for active in requests[:8]
    )
    return UnwrittenStateWarning(
        f"Mamba layers {list(layers)} have not handed over their states in this step, so those of "
        f"requests {where} tokens are not published, and what could be skipped is computed again. "
        "Every Mamba layer must call context.extract_checkpoint_states in every step with prefill "
        "chunks, and where a CUDA graph is replayed, the engine context.count_extractions. "
        "Further ones are only counted, in stats().unwritten_states"
    )
