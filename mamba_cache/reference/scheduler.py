"""The scheduler: which requests take part in a step, and with how many tokens.

Requests that begin alike share work that is not done yet. Of several prompts submitted together,
one computes what they have in common. It is told to save a state where each of the others branches
off; those may wait for it, and then resume from there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress

from mamba_cache.context import DynamicInferenceContext, RequestStatus, Step
from mamba_cache.errors import (
    BlockCapacityError,
    CapacityError,
    StepOrderError,
    UnknownRequestError,
)
from mamba_cache.reference.requests import EngineRequest

__all__ = [
    "Scheduler",
    "branch_positions",
    "common_blocks",
    "is_worth_waiting",
]


class Scheduler:
    """Fills steps: decoding requests first, then prompts begun, then preempted, then queued ones.

    Whoever was admitted earlier has precedence: when memory runs out, the youngest request gives
    its memory back and resumes later. So the oldest always gets on, and with it the whole engine.

    It keeps the requests that are not finished, in the order in which they came. Who of them runs,
    in what order, and how far each is, it asks the context each time: a request that the context
    does not know is queued. So after an interruption there is nothing here that could disagree.

    Args:
        context: Where requests run.
        max_wait_steps: Steps in which a queued request may wait for a prefix that another one
            computes; 0: nobody waits.
        prefetch_seconds: How long one may wait for what the disk has of its prompt.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        *,
        max_wait_steps: int,
        prefetch_seconds: float = 0.0,
    ) -> None:
        self._context = context
        self._prefetch_seconds = prefetch_seconds
        self._block_size = context.config.block_size_tokens
        # Without slots nothing can be resumed from, so waiting would gain nothing.
        self._max_wait_steps = max_wait_steps if context.slot_allocator.max_slots else 0
        self._requests: dict[Hashable, EngineRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(list(self._requests.values()))

    @property
    def tokens_left(self) -> int:
        """Tokens that all requests together may still compute or skip."""
        running = self._context.statuses()
        return sum(
            request.prompt_tokens
            + request.sampling.max_new_tokens
            - (self._context.progress(request_id).num_computed if request_id in running else 0)
            for request_id, request in self._requests.items()
        )

    @property
    def failed(self) -> list[EngineRequest]:
        """Requests that cannot run, not even alone, and are still to be told so."""
        return [request for request in self._requests.values() if request.error is not None]

    def knows(self, request: EngineRequest) -> bool:
        """Say whether a request, and not another of its id, is among them."""
        return self._requests.get(request.request_id) is request

    def find(self, request_id: Hashable) -> EngineRequest:
        """Return a request that is not finished."""
        return self._requests[request_id]

    def output(self, request: EngineRequest, start: int = 0) -> Sequence[int]:
        """Return what a request generated, but the first ``start`` tokens of it."""
        try:
            return self._context.output(request.request_id, start)
        except UnknownRequestError:  # not admitted yet, or not any more
            return request.last_output[start:]

    def add(self, request: EngineRequest) -> None:
        """Queue a request of an id that is not in use."""
        self._requests[request.request_id] = request

    def remove(self, request_id: Hashable) -> None:
        """Forget a request, or its failure, and take back what it holds.

        What it cached stays findable.

        Raises:
            UnknownRequestError: There is no such request, or it is finished.
        """
        known = self._requests.pop(request_id, None) is not None
        # Interrupted here, the context has a request that is not known; ``recover`` ends it.
        if not known or request_id in self._context.statuses():
            self._context.finish(request_id)

    def forget(self, request: EngineRequest) -> None:
        """Forget a request that was not admitted, if it is the one of its id."""
        if self.knows(request):
            del self._requests[request.request_id]

    def fork(
        self, request: EngineRequest, sample_first: Callable[[EngineRequest], int]
    ) -> list[EngineRequest]:
        """Fork a request that has its first token by now, for as many as there is room for.

        The others are computed by themselves, and find what of the prompt is cached.

        Args:
            request: The request.
            sample_first: Returns the first token of each fork.

        Returns:
            The forks.
        """
        config, rows = self._context.config, self._context.request_table
        num_decoding = len(self._with_status(RequestStatus.DECODING))
        room = max(0, min(rows.num_free_rows, config.max_tokens - num_decoding))
        forks = [fork for fork in request.forks if self.knows(fork)][:room]
        with suppress(CapacityError):
            self._context.fork(
                request.request_id,
                [fork.request_id for fork in forks],
                last_tokens=[sample_first(fork) for fork in forks],
            )
            return forks
        return []

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in list(self._requests):
            self.remove(request_id)

    def reset(self) -> None:
        """Forget all requests; the context's owner has reset it."""
        self._requests.clear()

    def recover(self) -> None:
        """Take back what a call that broke off has left: a step, or a request half removed."""
        with suppress(StepOrderError):  # there may be none in flight
            self._context.abort_step()
        for request_id in self._context.statuses():
            if request_id not in self._requests:
                self._context.finish(request_id)

    def begin_step(self) -> Step | None:
        """Begin a step with all who can take part.

        Returns:
            The step; None if no request is left that could run.
        """
        self._prefetch()
        while True:
            while (shortage := self._schedule()) and not self._has_work():
                self._make_room(*shortage)
            handles = [request.prefetch for request in self._requests.values()]
            arriving = [each for each in handles if each is not None and not each.is_done]
            if self._has_work() or not arriving:
                break
            arriving[0].wait()
        drafts = self._propose_drafts()
        while self._has_work():
            decoding = self._with_status(RequestStatus.DECODING)
            try:
                return self._context.begin_step(drafts=drafts)
            except BlockCapacityError as error:  # chunks have their blocks: a decoding one lacks it
                if drafts:
                    drafts = {}  # a guess is not worth another request's place
                else:
                    self._make_room(decoding[-1], error)
        return None

    def _prefetch(self) -> None:
        """Have disk and store bring what they have of queued requests; steps go on meanwhile."""
        if self._context.disk_tier is None and self._context.store_tier is None:
            return
        self._context.poll_tiers()
        statuses = self._context.statuses()
        for request in self._requests.values():
            if request.prefetch is None and request.request_id not in statuses:
                request.prefetch = self._context.prefetch(
                    request.prepared, timeout_seconds=self._prefetch_seconds
                )

    def _propose_drafts(self) -> dict[Hashable, list[int]]:
        """Collect drafts for the step, the oldest request's first, while its buffers last."""
        config = self._context.config
        if not config.num_speculative_tokens:
            return {}
        decoding = self._with_status(RequestStatus.DECODING)
        # Chunks are scheduled only into what is left if everybody brings all drafts that there
        # can be, so where this room ends before the drafts, there is no chunk.
        room = config.max_tokens - len(decoding)
        drafts = {}
        for request in decoding:
            max_drafts = min(config.num_speculative_tokens, room)
            output = self._context.output(request.request_id)
            proposed = request.propose_drafts(output, max_drafts, config.max_sequence_length)
            if proposed:
                drafts[request.request_id] = proposed
            room -= len(proposed)
        return drafts

    def _schedule(self) -> tuple[EngineRequest, CapacityError] | None:
        """Schedule chunks while the token budget lasts; return who was the first not to fit."""
        config, statuses = self._context.config, self._context.statuses()
        num_decoding = len(self._with_status(RequestStatus.DECODING))
        budget = config.max_tokens - num_decoding * config.max_decode_tokens
        queue = {
            request_id: request
            for request_id, request in self._requests.items()
            if request_id not in statuses
            and request.error is None
            and not self._awaits_fork(request)
            and not request.awaits_prefetch
        }
        for place, requests in (
            (self._continue, self._with_status(RequestStatus.PREFILLING)),
            (self._resume, self._with_status(RequestStatus.PREEMPTED)),
            (self._admit, list(queue.values())),
        ):
            for request in requests:
                if budget <= 0:
                    return None
                try:
                    budget -= place(request, budget, queue)
                except CapacityError as error:
                    # Those behind it stay behind it: small ones must not starve a large one.
                    return request, error
        return None

    def _continue(self, request: EngineRequest, budget: int, queue: _Queue) -> int:
        progress = self._context.progress(request.request_id)
        start = progress.num_computed
        positions = self._branches_off(request, start, queue)
        num_tokens = self._context.schedule_prefill(
            request.request_id,
            chunk_tokens=self._chunk_tokens(
                start, request.prompt_tokens + progress.num_generated, budget
            ),
            checkpoint_positions=positions,
        )
        request.branch_positions.update(positions)
        return num_tokens

    def _resume(self, request: EngineRequest, budget: int, _: _Queue) -> int:
        # Where it will start is not known yet, but that it is the end of a block.
        progress = self._context.progress(request.request_id)
        num_tokens = request.prompt_tokens + progress.num_generated
        chunk_tokens = self._chunk_tokens(0, num_tokens, budget)
        admission = self._context.resume_request(request.request_id, chunk_tokens=chunk_tokens)
        request.note_admission(admission)
        return admission.chunk_tokens

    def _admit(self, request: EngineRequest, budget: int, queue: _Queue) -> int:
        skip_tokens = self._context.match(request.prepared).skip_tokens
        if self._waits(request, skip_tokens):
            request.waited_steps += 1
            return 0
        positions = self._branches_off(request, skip_tokens, queue)
        admission = self._context.add_request(
            request.prepared,
            chunk_tokens=self._chunk_tokens(skip_tokens, request.prompt_tokens, budget),
            checkpoint_positions=positions,
        )
        del queue[request.request_id]
        request.branch_positions.update(positions)
        request.note_admission(admission)
        return admission.chunk_tokens

    def _chunk_tokens(self, start: int, end: int, budget: int) -> int:
        """Return how many tokens to compute, up to a block's end if not to ``end``."""
        if end - start <= budget:
            return end - start
        whole_blocks = (start + budget) // self._block_size * self._block_size - start
        return whole_blocks if whole_blocks > 0 else budget

    def _branches_off(self, request: EngineRequest, start: int, queue: _Queue) -> list[int]:
        return branch_positions(
            request, queue.values(), start=start, block_size_tokens=self._block_size
        )

    def _awaits_fork(self, request: EngineRequest) -> bool:
        """Say whether a queued request will be a fork of one that has no token yet."""
        other = request.fork_of
        return (
            other is not None
            and self.knows(other)
            and other.error is None
            and not self.output(other)
        )

    def _waits(self, request: EngineRequest, skip_tokens: int) -> bool:
        return request.waited_steps < self._max_wait_steps and is_worth_waiting(
            request,
            [
                (other, self._context.progress(other.request_id).num_computed)
                for other in self._with_status(RequestStatus.SCHEDULED)
            ],
            skip_tokens=skip_tokens,
            block_size_tokens=self._block_size,
        )

    def _make_room(self, request: EngineRequest, error: CapacityError) -> None:
        """Preempt the youngest request that holds memory; if none is left, give up."""
        holding = self._with_status(*(set(RequestStatus) - {RequestStatus.PREEMPTED}))
        if len(holding) > 1:
            self._context.preempt(holding[-1].request_id)
            return
        detail = f"request {request.request_id!r} does not fit even alone"
        request.last_output = self.output(request)
        request.error = type(error)(error.required, error.available, detail)
        if request.request_id in self._context.statuses():
            self._context.finish(request.request_id)

    def _has_work(self) -> bool:
        return bool(self._with_status(RequestStatus.SCHEDULED, RequestStatus.DECODING))

    def _with_status(self, *wanted: RequestStatus) -> list[EngineRequest]:
        """Return requests that can run and are in one of the states ``wanted``, oldest first."""
        return [
            request
            for request_id, status in self._context.statuses().items()
            if status in wanted
            and (request := self._requests.get(request_id)) is not None
            and request.error is None
        ]


_Queue = dict[Hashable, EngineRequest]
"""Requests that are not admitted, in the order in which they came."""


def common_blocks(request: EngineRequest, other: EngineRequest) -> int:
    """Count the leading blocks that ``request`` need not compute once ``other`` has.

    Each digest names the whole prefix up to its block's end, so where one differs, all later ones
    do: a binary search finds the first.
    """
    limit = min(request.reusable_blocks, len(other.digests))
    return bisect_left(
        range(limit), True, key=lambda block: request.digests[block] != other.digests[block]
    )


def branch_positions(
    request: EngineRequest, queued: Iterable[EngineRequest], *, start: int, block_size_tokens: int
) -> list[int]:
    """Return where queued requests branch off one that computes from ``start`` on, ascending.

    States before ``start`` cannot be saved any more, and what the request was told before is not
    repeated. It may be among those that are queued.
    """
    found = {
        common_blocks(other, request) * block_size_tokens
        for other in queued
        if other is not request
    }
    return sorted(p for p in found - request.branch_positions if p > start)


def is_worth_waiting(
    request: EngineRequest,
    scheduled: Iterable[tuple[EngineRequest, int]],
    *,
    skip_tokens: int,
    block_size_tokens: int,
) -> bool:
    """Return whether one of ``scheduled`` will save a state of a longer prefix of a queued request.

    Args:
        request: The queued request.
        scheduled: Requests that compute a part of their prompts in this step, each with the tokens
            that it has computed before.
        skip_tokens: What the queued one could skip at once.
        block_size_tokens: Tokens of a block.
    """
    for other, num_computed in scheduled:
        position = common_blocks(request, other) * block_size_tokens
        if position > max(skip_tokens, num_computed) and position in other.branch_positions:
            return True
    return False
