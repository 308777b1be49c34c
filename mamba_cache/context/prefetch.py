"""What is being brought from disk and store to the host tier for a request, and how far it is."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from mamba_cache.cache import BlockHashes
from mamba_cache.cache.sequence import PrefixMatch
from mamba_cache.tiers import LoadPlanner, Refusal
from mamba_cache.tiers.entry import EntryFacts, EntryKey, EntryKind
from mamba_cache.tiers.lower import Done

__all__ = ["STATES", "Asked", "Flight", "Planners", "Prefetch", "PrefetchState", "PromptEntries"]


@dataclass(slots=True)
class Planners:
    """What loads from each place take; that of the host tier also says what computing takes."""

    host: LoadPlanner
    disk: LoadPlanner
    store: LoadPlanner

    def compute_seconds(self, num_tokens: int) -> float:
        """Return how long it takes to compute so many tokens."""
        return num_tokens / self.host.rates.tokens_per_second


@dataclass(frozen=True, slots=True)
class PromptEntries:
    """Derives the entries of one prompt: of a kind, of a block or of the state at its end."""

    hashes: BlockHashes
    identity: bytes
    tenant: bytes
    rank: int
    block_size_tokens: int
    payload_bytes: Mapping[EntryKind, int]

    def key(self, kind: EntryKind, index: int) -> EntryKey:
        """Name an entry, which is all that is needed of most."""
        return EntryKey(self.identity, self.tenant, kind, self.hashes.digest(index), self.rank)

    def facts(self, kind: EntryKind, index: int) -> EntryFacts:
        """Derive what an entry must be."""
        num_tokens = (index + 1) * self.block_size_tokens
        return EntryFacts(self.key(kind, index), num_tokens, self.payload_bytes[kind])


class PrefetchState(str, Enum):
    """How far a prefetch is. Of several ranks' states the last one here is that of all."""

    NOTHING = "nothing"
    """There is nothing to bring that would let the request skip more than it does anyway."""

    READY = "ready"
    """All have arrived and are verified: a match finds them."""

    INCOMPLETE = "incomplete"
    """All is over, and an entry was missing, damaged, or found no room. Or a tier failed: nobody
    waits for the rest, which is verified and kept like anything else."""

    TIMED_OUT = "timed_out"
    """The deadline has passed. What arrives later is verified and kept like anything else."""

    CANCELLED = "cancelled"
    """Somebody cancelled it. What arrives later is dropped."""

    PENDING = "pending"
    """Entries are on their way."""


STATES: Final = tuple(PrefetchState)

_FAILURES: Final = frozenset({Refusal.TIMEOUT, Refusal.IO_ERROR})
"""What a tier that is dead says; it would say the same of each entry, one after the other."""


class Prefetch:
    """What of one request is being brought from lower tiers to the host tier.

    Made by ``DynamicInferenceContext.prefetch``. An engine schedules the request when ``is_done``,
    with or without what was to be brought: ``add_request`` takes what is there. Any thread may
    look, wait and cancel. A store must be asked first what it has; when it has answered, the next
    call of the context goes on, or ``wait`` in the thread that asked.

    Over several ranks it is done when it is on all of them and they have told each other, which
    they do in ``prefetch`` and ``poll_tiers`` of the context, and in ``wait`` of the thread that
    asked. Its state is the same on all of them.

    Attributes:
        request_id: Of the request.
        skip_tokens: Tokens that it need not compute once all is there.
        num_entries: KV blocks and states that are brought, once that is known.
        num_bytes: What they take.
        num_arrived: Those of them that are there and verified.
        is_asking: Whether it is not known yet what there is to bring.
        is_cancelled: Whether it was cancelled before it was over.
        go_on: Called by ``wait`` when there is an answer that the context has not seen.
    """

    def __init__(
        self,
        request_id: Hashable,
        skip_tokens: int,
        timeout_seconds: float | None,
        *,
        needs_agreement: bool = False,
    ) -> None:
        self._needs_agreement = needs_agreement
        self._agreed = PrefetchState.PENDING
        self.request_id = request_id
        self.skip_tokens = skip_tokens
        self.num_entries = self.num_bytes = 0
        self._changed = threading.Condition()
        self._num_over = self.num_arrived = 0
        self._refusals: list[Refusal] = []
        self.is_cancelled = self._is_late = False
        self._began = time.monotonic()
        self._ended = self._began
        self._deadline = math.inf
        if timeout_seconds is not None:
            self.end_within(timeout_seconds)
        self.is_asking = self._is_answered = False
        self._thread = threading.get_ident()
        self.go_on: Callable[[], object] | None = None

    @property
    def state(self) -> PrefetchState:
        """How far it is."""
        return self._agreed if self._needs_agreement else self.own_state

    def agree(self, state: PrefetchState) -> None:
        """Say what it came to, for all ranks know it now."""
        with self._changed:
            self._agreed = state
            self._changed.notify_all()

    @property
    def own_state(self) -> PrefetchState:
        """How far it is on this rank."""
        with self._changed:
            if self.is_cancelled:
                return PrefetchState.CANCELLED
            if self._is_late:
                return PrefetchState.TIMED_OUT
            if self.is_over:
                if not self.num_entries:
                    return PrefetchState.NOTHING
                is_whole = self.num_arrived == self.num_entries
                return PrefetchState.READY if is_whole else PrefetchState.INCOMPLETE
            if self.has_failed:
                return PrefetchState.INCOMPLETE
            # Once late, it is late for good, whatever arrives.
            self._is_late = self._seconds_left <= 0
            return PrefetchState.TIMED_OUT if self._is_late else PrefetchState.PENDING

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for: the request may be added."""
        return self.state is not PrefetchState.PENDING

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Why entries did not come, one for each that did not."""
        with self._changed:
            return tuple(self._refusals)

    def wait(self) -> PrefetchState:
        """Wait until it is done, which is at its deadline at the latest."""
        while True:
            with self._changed:
                while not self.is_done and not self._can_go_on:
                    is_pending = self.own_state is PrefetchState.PENDING
                    left = self._seconds_left if is_pending else threading.TIMEOUT_MAX
                    self._changed.wait(max(0.0, min(left, threading.TIMEOUT_MAX)))
                if self.is_done:
                    return self.state
            assert self.go_on is not None, "it can go on"
            self.go_on()

    @property
    def _can_go_on(self) -> bool:
        if self.go_on is None or self._thread != threading.get_ident():
            return False
        if self._needs_agreement:
            return self.is_answered or self.own_state is not PrefetchState.PENDING
        return self.is_asking and self._is_answered

    @property
    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def cancel(self) -> None:
        """Say that nobody wants it any more. Rows are free when their reads are over."""
        with self._changed:
            if self.is_asking or self._num_over < self.num_entries:
                self.is_cancelled = True
            self._changed.notify_all()

    def end_within(self, seconds: float) -> None:
        """Bring the deadline forward to so many seconds from now."""
        with self._changed:
            self._deadline = min(self._deadline, time.monotonic() + seconds)

    def answer(self) -> None:
        """Say that it can be known now."""
        with self._changed:
            self._is_answered = True
            self._changed.notify_all()

    def begin(self, skip_tokens: int, num_entries: int, num_bytes: int) -> None:
        """Say what is brought."""
        with self._changed:
            self.skip_tokens, self.num_entries, self.num_bytes = skip_tokens, num_entries, num_bytes
            self.is_asking = False
            self._began = time.monotonic()
            self._changed.notify_all()

    def end_one(self, refusal: Refusal | None) -> None:
        """Count an entry whose read is over."""
        with self._changed:
            self._num_over += 1
            if refusal is None:
                self.num_arrived += 1
            else:
                self._refusals.append(refusal)
            self._ended = time.monotonic()
            self._changed.notify_all()

    @property
    def is_answered(self) -> bool:
        """Whether what it waits for to be known is known, or nobody wants to know it any more."""
        return self.is_asking and (self._is_answered or self.is_given_up)

    @property
    def is_given_up(self) -> bool:
        """Whether it is too late, or cancelled."""
        return self.own_state in (PrefetchState.TIMED_OUT, PrefetchState.CANCELLED)

    @property
    def is_over(self) -> bool:
        """Whether all its reads are over, cancelled or late or not."""
        return not self.is_asking and self._num_over == self.num_entries

    @property
    def has_failed(self) -> bool:
        """Whether a tier did not answer for an entry, so that its boundary is out of reach."""
        return any(each in _FAILURES for each in self._refusals)

    @property
    def seconds(self) -> float:
        """What it took, once it is over."""
        return self._ended - self._began


@dataclass(slots=True, eq=False)
class Asked:
    """A request of whose prefix lower tiers may have more, and what is being brought of it."""

    match: PrefixMatch  # what the GPU and the host tier had of it
    entries: PromptEntries
    prefetch: Prefetch  # what it waits for
    is_trial: bool  # whether it loads even if computing is faster
    boundary: bytes = b""  # the digest of the prefix that is brought
    planner: LoadPlanner | None = None  # what learns from the load
    is_agreed: bool = False  # on what it came to, by all ranks


class Flight:
    """One entry that is being brought, for all prefetches that want it."""

    def __init__(self, prefetch: Prefetch, end_row: Done) -> None:
        self._lock = threading.Lock()
        self._prefetches = [prefetch]
        self._end_row = end_row
        self.is_over = False

    def join(self, prefetch: Prefetch) -> bool:
        """Have it brought for one more; False if it is over."""
        with self._lock:
            if not self.is_over:
                self._prefetches.append(prefetch)
            return not self.is_over

    def end(self, refusal: Refusal | None) -> None:
        """Give the row up or have it published, and only then tell the prefetches."""
        with self._lock:
            self.is_over = True
            if refusal is None and all(each.is_cancelled for each in self._prefetches):
                refusal = Refusal.ABORTED
            self._end_row(refusal)
            for each in self._prefetches:
                each.end_one(refusal)
