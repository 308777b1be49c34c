"""Prefetches: loads from disk and store to the host tier for one request, and their progress."""

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
    """Estimates of load times for each tier; the host's planner also estimates compute time."""

    host: LoadPlanner
    disk: LoadPlanner
    store: LoadPlanner

    def compute_seconds(self, num_tokens: int) -> float:
        """Return the estimated time to compute a number of tokens."""
        return num_tokens / self.host.rates.tokens_per_second


@dataclass(frozen=True, slots=True)
class PromptEntries:
    """Derives the entries of one prompt: the KV of each block, the state at its end."""

    hashes: BlockHashes
    identity: bytes
    tenant: bytes
    rank: int
    block_size_tokens: int
    payload_bytes: Mapping[EntryKind, int]

    def key(self, kind: EntryKind, index: int) -> EntryKey:
        """Return the key of an entry; most entries need no more."""
        return EntryKey(self.identity, self.tenant, kind, self.hashes.digests[index], self.rank)

    def facts(self, kind: EntryKind, index: int) -> EntryFacts:
        """Return the facts that an entry is verified against."""
        num_tokens = (index + 1) * self.block_size_tokens
        return EntryFacts(self.key(kind, index), num_tokens, self.payload_bytes[kind])


class PrefetchState(str, Enum):
    """State of a prefetch. Where ranks differ, the member listed last here is the state of all."""

    NOTHING = "nothing"
    """No load would let the request skip more tokens than it can skip already."""

    READY = "ready"
    """All entries have arrived and are verified: a match finds them."""

    INCOMPLETE = "incomplete"
    """All loads have ended, and an entry was missing, damaged, or found no room. Or a tier failed:
    the other loads go on, and their entries are verified and kept."""

    TIMED_OUT = "timed_out"
    """The deadline has passed. Entries that arrive later are verified and kept."""

    CANCELLED = "cancelled"
    """The prefetch was cancelled. Entries that arrive later are dropped."""

    PENDING = "pending"
    """Entries are being loaded."""


STATES: Final = tuple(PrefetchState)

_FAILURES: Final = frozenset({Refusal.TIMEOUT, Refusal.IO_ERROR})
"""Refusals of a dead tier: it would refuse each entry, one after the other."""


class Prefetch:
    """The handle of one request's loads from lower tiers to the host tier.

    Made by ``DynamicInferenceContext.prefetch``. An engine schedules the request when ``is_done``,
    whether or not all entries arrived: ``add_request`` uses those that did. Any thread may read
    the handle, wait and cancel. A store is first asked for its entries. After its answer the loads
    begin in the next call of the context, or in ``wait`` if the thread that made the handle waits.

    With several ranks a prefetch is done when it is done on all ranks and each rank knows. Ranks
    exchange this in ``prefetch`` and ``poll_tiers`` of the context, and in ``wait`` of the thread
    that made the handle. The state is the same on all ranks.

    Attributes:
        request_id: Id of the request.
        skip_tokens: Tokens that the request need not compute once all entries have arrived.
        num_entries: Number of KV blocks and states that are loaded; 0 while ``is_asking``.
        num_bytes: Size of these entries.
        num_arrived: Number of these entries that have arrived and are verified.
        is_asking: Whether the store's answer is still awaited, so that no load has begun.
        is_cancelled: Whether the prefetch was cancelled before it ended.
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
        self._num_ended = self.num_arrived = 0
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
        """State of the prefetch; with several ranks, the state that they agreed on."""
        return self._agreed if self._needs_agreement else self.own_state

    def agree(self, state: PrefetchState) -> None:
        """Set the state that all ranks agreed on."""
        with self._changed:
            self._agreed = state
            self._changed.notify_all()

    @property
    def own_state(self) -> PrefetchState:
        """State of the prefetch on this rank."""
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
            # A prefetch that is late stays late, whatever arrives.
            self._is_late = self._seconds_left <= 0
            return PrefetchState.TIMED_OUT if self._is_late else PrefetchState.PENDING

    @property
    def is_done(self) -> bool:
        """Whether the prefetch is no longer pending: the request can be added."""
        return self.state is not PrefetchState.PENDING

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The reasons of failed loads, one for each."""
        with self._changed:
            return tuple(self._refusals)

    def wait(self) -> PrefetchState:
        """Wait until the prefetch is done, at the latest until its deadline; return its state."""
        while True:
            with self._changed:
                while not self.is_done and not self._can_go_on:
                    is_pending = self.own_state is PrefetchState.PENDING
                    left = self._seconds_left if is_pending else threading.TIMEOUT_MAX
                    self._changed.wait(max(0.0, min(left, threading.TIMEOUT_MAX)))
                if self.is_done:
                    return self.state
            assert self.go_on is not None, "_can_go_on has checked it"
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
        """Cancel the loads. Their rows are free when the reads have ended."""
        with self._changed:
            if self.is_asking or self._num_ended < self.num_entries:
                self.is_cancelled = True
            self._changed.notify_all()

    def end_within(self, seconds: float) -> None:
        """Move the deadline to ``seconds`` from now, unless it is earlier already."""
        with self._changed:
            self._deadline = min(self._deadline, time.monotonic() + seconds)

    def answer(self) -> None:
        """Record that the store has answered."""
        with self._changed:
            self._is_answered = True
            self._changed.notify_all()

    def begin(self, skip_tokens: int, num_entries: int, num_bytes: int) -> None:
        """Set what is loaded: the question to the store is settled."""
        with self._changed:
            self.skip_tokens, self.num_entries, self.num_bytes = skip_tokens, num_entries, num_bytes
            self.is_asking = False
            self._began = time.monotonic()
            self._changed.notify_all()

    def end_one(self, refusal: Refusal | None) -> None:
        """Count an entry whose load has ended."""
        with self._changed:
            self._num_ended += 1
            if refusal is None:
                self.num_arrived += 1
            else:
                self._refusals.append(refusal)
            self._ended = time.monotonic()
            self._changed.notify_all()

    @property
    def is_answered(self) -> bool:
        """Whether the store's answer has come, or no longer matters."""
        return self.is_asking and (self._is_answered or self.is_given_up)

    @property
    def is_given_up(self) -> bool:
        """Whether the prefetch is late or cancelled."""
        return self.own_state in (PrefetchState.TIMED_OUT, PrefetchState.CANCELLED)

    @property
    def is_over(self) -> bool:
        """Whether all loads have ended, also those of a late or cancelled prefetch."""
        return not self.is_asking and self._num_ended == self.num_entries

    @property
    def has_failed(self) -> bool:
        """Whether a tier failed to answer for an entry: the boundary cannot be reached."""
        return any(each in _FAILURES for each in self._refusals)

    @property
    def seconds(self) -> float:
        """Duration of all loads, once they have ended."""
        return self._ended - self._began


@dataclass(slots=True, eq=False)
class Asked:
    """A request with a prefetch that is not finished."""

    match: PrefixMatch  # on the GPU and the host tier
    entries: PromptEntries
    prefetch: Prefetch
    is_trial: bool  # whether it loads even if computing seems faster
    boundary: bytes = b""  # digest of the prefix that is loaded
    planner: LoadPlanner | None = None  # records the load time
    is_agreed: bool = False  # whether all ranks have agreed on the outcome


class Flight:
    """The load of one entry, shared by all prefetches that need it."""

    def __init__(self, prefetch: Prefetch, end_row: Done) -> None:
        self._lock = threading.Lock()
        self._prefetches = [prefetch]
        self._end_row = end_row
        self.is_over = False

    def join(self, prefetch: Prefetch) -> bool:
        """Add a prefetch; return False if the load has ended."""
        with self._lock:
            if not self.is_over:
                self._prefetches.append(prefetch)
            return not self.is_over

    def end(self, refusal: Refusal | None) -> None:
        """Publish or release the row, and then count the entry in the prefetches."""
        with self._lock:
            self.is_over = True
            if refusal is None and all(each.is_cancelled for each in self._prefetches):
                refusal = Refusal.ABORTED
            self._end_row(refusal)
            for each in self._prefetches:
                each.end_one(refusal)
