"""The scheduler: chooses the requests of each step, and their numbers of tokens.

Queued requests with a common prefix share its computation. One of them computes the prefix, and
saves a state where each of the others branches off. The others may wait for that state, and resume
from it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mamba_cache.context.context import DynamicInferenceContext
from mamba_cache.context.prefetch import Prefetch
from mamba_cache.context.requests import Admission, PreparedRequest, RequestStatus
from mamba_cache.context.step import Step
from mamba_cache.errors import (
    BlockCapacityError,
    CapacityError,
    StepOrderError,
    UnknownRequestError,
)

__all__ = ["QueuedRequest", "Scheduler", "common_blocks"]

_Drafts = Mapping[Hashable, Sequence[int]]


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest:
    """The scheduler's record of an unfinished request."""

    prepared: PreparedRequest  # with checked tokens and block hashes
    reusable_blocks: int
    fork_of: QueuedRequest | None = None
    forks: Sequence[QueuedRequest] = ()  # requests that become forks of this request
    branch_positions: set[int] = field(default_factory=set)
    waited_steps: int = 0  # number of steps spent waiting for another request's prefix
    prefetch: Prefetch | None = None  # of its prefix from disk and store; None: not begun
    error: Exception | None = None  # why the request cannot run; it is never scheduled again
    last_output: Sequence[int] = ()  # tokens generated before the error
    number: int = -1  # precedence: lower numbers come first

    @property
    def key(self) -> Hashable:
        """Id of the request in the context."""
        return self.prepared.request.request_id

    @property
    def name(self) -> Hashable:
        """Name of the request for its caller."""
        return self.key

    def note_admission(self, admission: Admission) -> None:
        """Record an admission; a hook for subclasses that report it."""


_Request = TypeVar("_Request", bound=QueuedRequest)


class Scheduler(Generic[_Request]):
    """Fills steps: first decoding requests, then begun prompts, preempted and queued requests.

    Earlier requests have precedence. When memory runs out, the newest request with memory is
    preempted, and resumes later. So the oldest request always advances, and finally all do.

    The scheduler has the unfinished requests in order of arrival. Their status and progress are
    read from the context each time: a request that is not in the context is queued. So an
    interruption cannot make scheduler and context disagree.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        *,
        max_wait_steps: int,
        prefetch_seconds: float = 0.0,
        find: Callable[[_Request], int] | None = None,
        propose: Callable[[list[_Request]], _Drafts] | None = None,
    ) -> None:
        self._context = context
        self._prefetch_seconds = prefetch_seconds
        self._find = find
        self._propose = propose
        self._block_size = context.config.block_size_tokens
        self._min_chunk = context.config.min_computed_tokens
        # Without slots no request can resume from a state, so waiting is useless.
        self._max_wait_steps = max_wait_steps if context.slot_allocator.max_slots else 0
        self.max_chunk_tokens = context.config.max_tokens  # maximum prompt tokens in one step
        self.max_requests = context.config.max_requests  # maximum number of requests with memory
        self.is_lockstep = False  # whether requests decode only in steps without prompts
        self._requests: dict[Hashable, _Request] = {}
        self._num_added = 0
        self._queue: dict[Hashable, _Request] | None = None  # queued requests, cached for one step

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[_Request]:
        return iter(list(self._requests.values()))

    @property
    def is_steady(self) -> bool:
        """Whether every request decodes."""
        return len(self._context.request_table.decoding_rows) == len(self._requests)

    @property
    def failed(self) -> list[_Request]:
        """Requests that cannot run, even alone, and have not been removed yet."""
        return [request for request in self._requests.values() if request.error is not None]

    def knows(self, request: QueuedRequest) -> bool:
        """Return whether this very request, not another one of its id, is unfinished."""
        return self._requests.get(request.key) is request

    def find(self, request_id: Hashable) -> _Request:
        """Return an unfinished request."""
        return self._requests[request_id]

    def output(self, request: QueuedRequest, start: int = 0) -> Sequence[int]:
        """Return the generated tokens of a request, without the first ``start`` tokens."""
        try:
            return self._context.output(request.key, start)
        except UnknownRequestError:  # not admitted yet, or failed
            return request.last_output[start:]

    def add(self, request: _Request) -> None:
        """Queue a request; its id must not be in use."""
        request.number = self._num_added
        self._num_added += 1
        self._requests[request.key] = request

    def remove(self, request_id: Hashable) -> None:
        """Remove a request, also one that failed, and release its memory.

        Its published blocks and states stay cached.
        """
        known = self._requests.pop(request_id, None) is not None
        # If interrupted here, the context still has the request; ``recover`` finishes it.
        try:
            self._context.finish(request_id)
        except UnknownRequestError:
            if not known:  # a queued request is not in the context
                raise

    def rename(self, request_id: Hashable, request: _Request) -> None:
        """Record that ``request`` was ``request_id`` before; its precedence stays."""
        del self._requests[request_id]
        self._requests[request.key] = request

    def fork(self, request: _Request, sample_first: Callable[[_Request], int]) -> list[_Request]:
        """Fork a request that has its first token, for as many of its forks as there is room for.

        The remaining forks are run as ordinary requests, which find the cached prompt.
        """
        config, rows = self._context.config, self._context.request_table
        room = min(
            rows.num_free_rows,
            config.max_tokens - len(rows.decoding_rows) * config.max_decode_tokens,
            self.max_requests - len(self._holding()),
        )
        waiting = [self._requests[fork.key] for fork in request.forks if self.knows(fork)]
        forks = waiting[: max(room, 0)]
        while forks:
            keys, tokens = [fork.key for fork in forks], [sample_first(fork) for fork in forks]
            try:
                self._context.fork(request.key, keys, last_tokens=tokens)
                break
            except BlockCapacityError as error:
                forks = forks[: error.available]
        return forks

    def clear(self) -> None:
        """Remove all requests."""
        for request_id in list(self._requests):
            self.remove(request_id)

    def reset(self) -> None:
        """Forget all requests, after the context was reset."""
        self._requests.clear()

    def recover(self) -> None:
        """Clean up after an interrupted call: abort its step, finish requests half removed."""
        with suppress(StepOrderError):  # there may be none in flight
            self._context.abort_step()
        for request_id in self._context.statuses():
            if request_id not in self._requests:
                self._context.finish(request_id)

    def preempt_all(self) -> None:
        """Abort the step in flight and preempt all requests, which keep their tokens.

        The requests resume from cached states. Call this after a forward was interrupted: it may
        have written any live state, also of requests that it did not compute.
        """
        self.recover()
        for request in self._holding():
            self._context.preempt(request.key)

    def begin_step(self, *, leaves_out: Collection[Hashable] = ()) -> Step | None:
        """Begin a step with all requests that can run, without decoding ones in ``leaves_out``."""
        self._prefetch()
        if not self.is_steady:
            self._fill_step()
        drafts = self._propose(self._with_status(RequestStatus.DECODING)) if self._propose else {}
        while self._has_work():
            chunks, decoding = self._context.request_table.scheduled_chunks, None
            if self.is_lockstep and chunks:
                decoding = []
            elif leaves_out:
                names = [one.key for one in self._with_status(RequestStatus.DECODING)]
                decoding = [name for name in names if name not in leaves_out]
                if not decoding and not chunks:
                    return None
            try:
                return self._context.begin_step(decoding, drafts=drafts or None)
            except BlockCapacityError as error:
                shortage = error
            if drafts:
                drafts = {}  # dropping drafts is better than preempting a request
            else:  # chunks have their blocks already: a decoding request lacks one
                self._make_room(self._with_status(RequestStatus.DECODING)[-1], shortage)
        return None

    def _prefetch(self) -> None:
        """Begin prefetches for queued requests; steps go on meanwhile."""
        if self._context.disk_tier is None and self._context.store_tier is None:
            return
        self._context.poll_tiers()
        statuses = self._context.statuses()
        for request in self._requests.values():
            if request.prefetch is None and request.key not in statuses:
                request.prefetch = self._context.prefetch(
                    request.prepared, timeout_seconds=self._prefetch_seconds
                )

    def _fill_step(self) -> None:
        """Schedule chunks until the step has work, or no request is left that could run."""
        while True:
            while (shortage := self._schedule()) and not self._has_work():
                self._make_room(*shortage)
            handles = [] if self._has_work() else [one.prefetch for one in self]
            arriving = [each for each in handles if each is not None and not each.is_done]
            if not arriving:
                self._queue = None
                return
            arriving[0].wait()

    def _schedule(self) -> tuple[_Request, CapacityError] | None:
        """Schedule chunks while the token budget lasts; return the first that did not fit."""
        config, self._queue = self._context.config, None
        num_decoding = len(self._context.request_table.decoding_rows)
        budget = min(
            self.max_chunk_tokens, config.max_tokens - num_decoding * config.max_decode_tokens
        )
        room = self.max_requests - len(self._holding())
        for place, status in (
            (self._continue, RequestStatus.PREFILLING),
            (self._resume, RequestStatus.PREEMPTED),
            (self._admit, None),
        ):
            is_new = place != self._continue
            if is_new and room <= 0:  # without reading the queue
                return None
            requests = self._with_status(status) if status else list(self._queued().values())
            for request in requests:
                if budget <= 0 or (is_new and room <= 0):
                    return None
                try:
                    num_tokens = place(request, budget)
                except CapacityError as error:
                    # Later requests must wait too: small ones must not starve a large one.
                    return request, error
                budget -= num_tokens
                room -= is_new and num_tokens > 0
        return None

    def _queued(self) -> dict[Hashable, _Request]:
        """Return the requests that can be admitted, in order of arrival."""
        if self._queue is None:
            statuses = self._context.statuses()
            self._queue = {
                request_id: request
                for request_id, request in self._requests.items()
                if request_id not in statuses
                and request.error is None
                and not self._awaits_fork(request)
                and (request.prefetch is None or request.prefetch.is_done)
            }
        return self._queue

    def _continue(self, request: _Request, budget: int) -> int:
        table = self._context.request_table
        active = table.find(request.key)
        start = table.num_computed.item(active.row)
        positions = self._branches_off(request, start)
        num_tokens = self._context.schedule_prefill(
            request.key,
            chunk_tokens=self._chunk_tokens(start, active.num_known, budget),
            checkpoint_positions=positions,
        )
        request.branch_positions.update(positions)
        return num_tokens

    def _resume(self, request: _Request, budget: int) -> int:
        # The start is not known yet, only that it is a block boundary: 0 stands for it.
        num_known = self._context.request_table.find(request.key).num_known
        chunk_tokens = self._chunk_tokens(0, num_known, budget)
        admission = self._context.resume_request(request.key, chunk_tokens=chunk_tokens)
        request.note_admission(admission)
        return admission.chunk_tokens

    def _admit(self, request: _Request, budget: int) -> int:
        if self._find is not None:
            skip_tokens = self._find(request)
        else:
            skip_tokens = self._context.match(request.prepared).skip_tokens
        if self._waits(request, skip_tokens):
            request.waited_steps += 1
            return 0
        positions = self._branches_off(request, skip_tokens)
        admission = self._context.add_request(
            request.prepared,
            chunk_tokens=self._chunk_tokens(skip_tokens, len(request.prepared.tokens), budget),
            checkpoint_positions=positions,
        )
        del self._queued()[request.key]
        request.branch_positions.update(positions)
        request.note_admission(admission)
        return admission.chunk_tokens

    def _chunk_tokens(self, start: int, end: int, budget: int) -> int:
        """Return the tokens of the next chunk within ``budget``, up to ``end`` or a block's end."""
        left = end - start
        if left <= budget:
            return left
        whole_blocks = (start + budget) // self._block_size * self._block_size - start
        size = whole_blocks if whole_blocks > 0 else budget
        # A prompt's last chunk must not be shorter than min_computed_tokens.
        too_few = left - size < self._min_chunk and size > self._min_chunk
        return size - (self._min_chunk - 1) if too_few else size

    def _branches_off(self, request: _Request, start: int) -> list[int]:
        """Return positions from ``start`` where queued requests branch off a request, ascending.

        States before ``start`` cannot be saved any more. Positions that the request has already are
        left out. The request itself may be queued.
        """
        own, block = request.prepared.chain.digests, start // self._block_size
        found = set()
        for other in self._queued().values() if block < len(own) else ():
            others = other.prepared.chain.digests
            # Most requests share no block from ``start`` on: comparing one digest shows it.
            if other is not request and block < len(others) and others[block] == own[block]:
                found.add(common_blocks(other, request) * self._block_size)
        return sorted(found - request.branch_positions)

    def _awaits_fork(self, request: _Request) -> bool:
        """Return whether a queued request will be a fork of a request that has no token yet."""
        other = request.fork_of
        return (
            other is not None
            and self.knows(other)
            and other.error is None
            and not self.output(other)
        )

    def _waits(self, request: _Request, skip_tokens: int) -> bool:
        """Return whether a scheduled request will save a state that lets ``request`` skip more."""
        if request.waited_steps >= self._max_wait_steps:
            return False
        # Usually none do: then the statuses are not read.
        branching = [other for other in self._requests.values() if other.branch_positions]
        statuses = self._context.statuses() if branching else {}
        table = self._context.request_table
        for other in branching:
            if statuses.get(other.key) is not RequestStatus.SCHEDULED:
                continue
            computed = table.num_computed.item(table.find(other.key).row)
            position = common_blocks(request, other) * self._block_size
            if position > max(skip_tokens, computed) and position in other.branch_positions:
                return True
        return False

    def _make_room(self, request: _Request, error: CapacityError) -> None:
        """Preempt the newest request with memory; if there is no other, fail ``request``."""
        holding = self._holding()
        if len(holding) > 1:
            self._context.preempt(holding[-1].key)
            return
        detail = f"request {request.name!r} does not fit even alone"
        request.last_output = self.output(request)
        request.error = type(error)(error.required, error.available, detail)
        if request.key in self._context.statuses():
            self._context.finish(request.key)

    def _has_work(self) -> bool:
        table = self._context.request_table
        return bool(table.decoding_rows or table.scheduled_chunks)

    def _holding(self) -> list[_Request]:
        return self._with_status(*(set(RequestStatus) - {RequestStatus.PREEMPTED}))

    def _with_status(self, *allowed: RequestStatus) -> list[_Request]:
        """Return requests without error whose status is one of ``allowed``, oldest first."""
        found = [
            request
            for request_id, status in self._context.statuses().items()
            if status in allowed
            and (request := self._requests.get(request_id)) is not None
            and request.error is None
        ]
        return sorted(found, key=lambda request: request.number)


def common_blocks(request: QueuedRequest, other: QueuedRequest) -> int:
    """Return the number of leading blocks that ``request`` can reuse from ``other``.

    A digest names the whole prefix up to its block's end, so after the first difference all digests
    differ: a binary search finds it.
    """
    own, others = request.prepared.chain.digests, other.prepared.hashes.digests
    limit = min(request.reusable_blocks, len(others))
    return bisect_left(range(limit), True, key=lambda block: own[block] != others[block])
