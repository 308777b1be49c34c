"""Begins, commits and aborts steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from mamba_cache.context.admission import Admitter
from mamba_cache.context.checkpoints import CheckpointPlanner, Publisher
from mamba_cache.context.requests import ActiveRequest, RequestStatus
from mamba_cache.context.stats import StatsCounters
from mamba_cache.context.step import Step, describe_request, plan_step
from mamba_cache.errors import InvalidArgumentError, StepOrderError
from mamba_cache.metadata import StepBuffers
from mamba_cache.slots import MambaSlotAllocator

__all__ = ["StepRunner"]


class StepRunner:
    """Holds the step in flight and carries its requests from one state to the next.

    Args:
        buffers: The step's tensors.
        slots: Where states are restored from and saved to.
        planner: Plans the checkpoints of decoding requests.
        admitter: Renews restores, and takes requests back.
        publisher: Makes blocks and states findable.
        counters: What is counted at commit.
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
    ) -> None:
        self._buffers = buffers
        self._slots = slots
        self._planner = planner
        self._admitter = admitter
        self._publisher = publisher
        self._counters = counters
        self._requests: tuple[ActiveRequest, ...] = ()
        self._step: Step | None = None

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
        """The requests of the step in flight."""
        return self._requests

    def require_none(self) -> None:
        """Check that no step is in flight.

        Raises:
            StepOrderError: One is.
        """
        if self._step is not None:
            raise StepOrderError("a step is in flight: commit_step or abort_step ends it")

    def begin(self, decodes: Sequence[ActiveRequest], prefills: Sequence[ActiveRequest]) -> Step:
        """Send the metadata and restore live states; on an exception the step is taken back."""
        self._requests = (*decodes, *prefills)
        try:
            for active in decodes:
                active.chunk = self._planner.plan_decode(active)
            for active in prefills:
                self._admitter.renew_restore(active)
            plan = plan_step(decodes, prefills)
            metadata = self._buffers.fill(plan)
            # Without the padding, which a kernel would look at entry by entry.
            restores = slice(len(plan.restores))
            self._slots.restore_slots(
                metadata.restore_sources[restores], metadata.restore_rows[restores]
            )
        except BaseException:
            self._preempt_all()
            raise
        scheduled = [describe_request(active, is_prefill=False) for active in decodes]
        scheduled += [describe_request(active, is_prefill=True) for active in prefills]
        self._step = Step(tuple(scheduled), metadata)
        return self._step

    def commit(self, new_tokens: Mapping[Hashable, int]) -> None:
        """Save boundary states, publish what was written, and append the sampled tokens.

        Args:
            new_tokens: Checked tokens, one for each request that samples.
        """
        metadata = self.step.metadata
        boundaries = slice(sum(a.current_chunk.boundary is not None for a in self._requests))
        self._slots.copy_live_to_slots(
            metadata.boundary_rows[boundaries], metadata.boundary_slots[boundaries]
        )
        for active in self._requests:
            self._settle(active)
            if active.request_id in new_tokens:
                active.append_token(new_tokens[active.request_id])
        self._requests, self._step = (), None

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
        """Take back the step in flight, if there is one."""
        if self._step is not None:
            self.abort()

    def forget(self) -> None:
        """Have no step in flight; what its requests hold is dealt with by the caller."""
        self._requests, self._step = (), None

    def check_tokens(self, new_tokens: Mapping[Hashable, int]) -> None:
        """Check that just the requests that sample have a token.

        Raises:
            StepOrderError: No step is in flight.
            InvalidArgumentError: A token is missing, or one is not expected.
        """
        expected = set(self.step.sampling_ids)
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

    def _settle(self, active: ActiveRequest) -> None:
        chunk = active.current_chunk
        is_decoding = active.status is RequestStatus.DECODING
        samples = active.samples
        active.num_computed = chunk.end
        if chunk.lease is not None:
            self._publisher.note_consumed(chunk.lease)
        self._publisher.publish(active, chunk)
        self._counters.computed_tokens += chunk.num_tokens
        if active.admission is not None:
            self._counters.count_admission(active.admission)
            active.admission = None
        is_current = chunk.epoch == self._slots.epoch
        if is_decoding and is_current and chunk.boundary is not None:
            self._publisher.supersede_decode_state(active, chunk.boundary)
        self._admitter.settle(active)
        active.status = RequestStatus.DECODING if samples else RequestStatus.PREFILLING

    def _preempt_all(self) -> None:
        requests = self._requests
        self.forget()
        for active in requests:
            self._admitter.release(active)
