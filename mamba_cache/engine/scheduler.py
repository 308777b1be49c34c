"""Decides who takes part in a step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from mamba_cache.context import DynamicInferenceContext, RequestStatus, Step
from mamba_cache.engine.requests import EngineRequest
from mamba_cache.engine.waiting import branch_positions, is_worth_waiting
from mamba_cache.errors import BlockCapacityError, CapacityError, InvalidArgumentError

__all__ = ["Scheduler", "Shortage"]


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request, and what there is not enough of for it."""

    request: EngineRequest
    error: CapacityError


class Scheduler:
    """Fills steps: decoding requests first, then prompts begun, then preempted, then queued ones.

    Whoever was admitted earlier has precedence: when memory runs out, the youngest request gives
    its memory back and resumes later. So the oldest always gets on, and with it the whole engine.

    Args:
        context: Where requests run.
        max_wait_steps: Steps in which a queued request may wait for a prefix that another one
            computes; 0: nobody waits.

    Attributes:
        failed: Requests that were taken out because they do not fit even alone; whoever reports
            them clears the list.
    """

    def __init__(self, context: DynamicInferenceContext, *, max_wait_steps: int) -> None:
        self.failed: list[Shortage] = []
        self._context = context
        self._block_size = context.config.block_size_tokens
        # Without slots nothing can be resumed from, so waiting would gain nothing.
        self._max_wait_steps = max_wait_steps if context.slot_allocator.max_slots else 0
        self._queue: dict[Hashable, EngineRequest] = {}
        self._running: dict[Hashable, EngineRequest] = {}  # oldest first

    def __len__(self) -> int:
        # A failure that is not told yet counts: its request's caller is still waiting.
        return len(self._queue) + len(self._running) + len(self.failed)

    def __contains__(self, request_id: Hashable) -> bool:
        return (
            request_id in self._queue
            or request_id in self._running
            or any(shortage.request.request_id == request_id for shortage in self.failed)
        )

    @property
    def tokens_left(self) -> int:
        """Tokens that all requests together may still compute or skip."""
        requests = (*self._queue.values(), *self._running.values())
        return sum(request.tokens_left for request in requests)

    def running(self, request_id: Hashable) -> EngineRequest:
        """Return a request that was admitted."""
        return self._running[request_id]

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidArgumentError: Its id is not hashable, or in use.
        """
        request_id = request.request_id
        _check_hashable(request_id)
        if request_id in self:
            raise InvalidArgumentError(f"request id {request_id!r} is in use")
        self._queue[request_id] = request

    def remove(self, request_id: Hashable) -> None:
        """Forget a request, or its failure, and take back what it holds.

        What it cached stays findable.

        Raises:
            UnknownRequestError: There is no such request, or it is finished.
            InvalidArgumentError: The id is not hashable.
        """
        _check_hashable(request_id)
        untold = [x for x in self.failed if x.request.request_id == request_id]
        if untold:
            self.failed.remove(*untold)
        elif request_id in self._queue:
            del self._queue[request_id]
        else:
            self._context.finish(request_id)
            del self._running[request_id]

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in (*self._queue, *self._running):
            self.remove(request_id)
        self.failed.clear()

    def begin_step(self) -> Step | None:
        """Begin a step with all who can take part.

        Returns:
            The step; None if no request is left that could run.
        """
        while (shortage := self._schedule()) and not self._has_work():
            self._make_room(shortage)
        drafts = self._propose_drafts()
        while self._has_work():
            decoding = self._with_status(RequestStatus.DECODING)
            try:
                return self._context.begin_step(drafts=drafts)
            except BlockCapacityError as error:  # chunks have their blocks: a decoding one lacks it
                if drafts:
                    drafts = {}  # a guess is not worth another request's place
                else:
                    self._make_room(Shortage(decoding[-1], error))
        return None

    def _propose_drafts(self) -> dict[Hashable, list[int]]:
        """Collect drafts for the step, the oldest request's first, while its buffers last."""
        config = self._context.config
        decoding = self._with_status(RequestStatus.DECODING)
        # Chunks are scheduled only into what is left if everybody brings all drafts that there
        # can be, so where this room ends before the drafts, there is no chunk.
        room = config.max_tokens - len(decoding)
        drafts = {}
        for request in decoding:
            max_drafts = min(config.num_speculative_tokens, room)
            proposed = request.propose_drafts(max_drafts, config.max_sequence_length)
            if proposed:
                drafts[request.request_id] = proposed
            room -= len(proposed)
        return drafts

    def _schedule(self) -> Shortage | None:
        """Schedule chunks while the token budget lasts; return who was the first not to fit."""
        config, decoding = self._context.config, self._with_status(RequestStatus.DECODING)
        budget = config.max_tokens - len(decoding) * config.max_decode_tokens
        for place, requests in (
            (self._continue, self._with_status(RequestStatus.PREFILLING)),
            (self._resume, self._with_status(RequestStatus.PREEMPTED)),
            (self._admit, list(self._queue.values())),
        ):
            for request in requests:
                if budget <= 0:
                    return None
                try:
                    budget -= place(request, budget)
                except CapacityError as error:
                    # Those behind it stay behind it: small ones must not starve a large one.
                    return Shortage(request, error)
        return None

    def _continue(self, request: EngineRequest, budget: int) -> int:
        start = request.num_computed
        positions = self._branches_off(request, start)
        num_tokens = self._context.schedule_prefill(
            request.request_id,
            chunk_tokens=self._chunk_tokens(start, request.num_tokens, budget),
            checkpoint_positions=positions,
        )
        request.branch_positions.update(positions)
        return num_tokens

    def _resume(self, request: EngineRequest, budget: int) -> int:
        # Where it will start is not known yet, but that it is the end of a block.
        chunk_tokens = self._chunk_tokens(0, request.num_tokens, budget)
        admission = self._context.resume_request(request.request_id, chunk_tokens=chunk_tokens)
        request.note_admission(admission)
        return admission.chunk_tokens

    def _admit(self, request: EngineRequest, budget: int) -> int:
        skip_tokens = self._context.match(request.prepared).skip_tokens
        if self._waits(request, skip_tokens):
            request.waited_steps += 1
            return 0
        positions = self._branches_off(request, skip_tokens)
        admission = self._context.add_request(
            request.prepared,
            chunk_tokens=self._chunk_tokens(skip_tokens, request.num_tokens, budget),
            checkpoint_positions=positions,
        )
        request.branch_positions.update(positions)
        self._running[request.request_id] = self._queue.pop(request.request_id)
        request.note_admission(admission)
        return admission.chunk_tokens

    def _chunk_tokens(self, start: int, end: int, budget: int) -> int:
        """Return how many tokens to compute, up to a block's end if not to ``end``."""
        if end - start <= budget:
            return end - start
        whole_blocks = (start + budget) // self._block_size * self._block_size - start
        return whole_blocks if whole_blocks > 0 else budget

    def _branches_off(self, request: EngineRequest, start: int) -> list[int]:
        return branch_positions(
            request, self._queue.values(), start=start, block_size_tokens=self._block_size
        )

    def _waits(self, request: EngineRequest, skip_tokens: int) -> bool:
        return request.waited_steps < self._max_wait_steps and is_worth_waiting(
            request,
            self._with_status(RequestStatus.SCHEDULED),
            skip_tokens=skip_tokens,
            block_size_tokens=self._block_size,
        )

    def _make_room(self, shortage: Shortage) -> None:
        """Preempt the youngest request that holds memory; if none is left, give up."""
        holding = self._with_status(*(set(RequestStatus) - {RequestStatus.PREEMPTED}))
        if len(holding) > 1:
            self._context.preempt(holding[-1].request_id)
            return
        error = shortage.error
        detail = f"request {shortage.request.request_id!r} does not fit even alone"
        self.remove(shortage.request.request_id)
        self.failed.append(
            Shortage(shortage.request, type(error)(error.required, error.available, detail))
        )

    def _has_work(self) -> bool:
        return bool(self._with_status(RequestStatus.SCHEDULED, RequestStatus.DECODING))

    def _with_status(self, *wanted: RequestStatus) -> list[EngineRequest]:
        return [
            request
            for request_id, request in self._running.items()
            if self._context.status(request_id) in wanted
        ]


def _check_hashable(request_id: object) -> None:
    try:
        hash(request_id)  # whether a tuple has a hash depends on what is in it
    except TypeError:
        raise InvalidArgumentError(f"a request id must be hashable, got {request_id!r}") from None
