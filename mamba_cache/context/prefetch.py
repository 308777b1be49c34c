"""Loads from disk and store into the host tier, and write-back."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final

from mamba_cache.cache import BlockHashes
from mamba_cache.cache.sequence import PrefixMatch
from mamba_cache.config import CacheConfig
from mamba_cache.protocols import RankAgreement
from mamba_cache.tiers import LoadPlanner, Refusal
from mamba_cache.tiers.entry import EntryFacts, EntryKey, EntryKind
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.lower import Done, LowerTier
from mamba_cache.tiers.planner import largest, quickest

__all__ = ["LowerTierLink", "Planners", "Prefetch", "PrefetchState", "PromptEntries"]

_PATIENCE_SECONDS: Final = 5.0
"""How long a call that breaks off waits for what lower tiers were handed."""

_TRY_EVERY: Final = 16
"""One of so many prefetches that a caller waits for loads even if that is slower than computing:
otherwise a tier that was slow once is never measured again."""


@dataclass(slots=True)
class Planners:
    """What loads from each place take; that of the host tier also says what computing takes."""

    host: LoadPlanner
    disk: LoadPlanner
    store: LoadPlanner

    def seconds(
        self, num_tokens: int, *, host_bytes: int = 0, disk_bytes: int = 0, store_bytes: int = 0
    ) -> float:
        """Return how long it takes to compute so many tokens and load so many bytes."""
        return (
            num_tokens / self.host.rates.tokens_per_second
            + self.host.load_seconds(host_bytes)
            + self.disk.load_seconds(disk_bytes)
            + self.store.load_seconds(store_bytes)
        )


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
    """How far a prefetch is."""

    PENDING = "pending"
    """Entries are on their way."""

    READY = "ready"
    """All have arrived and are verified: a match finds them."""

    NOTHING = "nothing"
    """There is nothing to bring that would let the request skip more than it does anyway."""

    INCOMPLETE = "incomplete"
    """All is over, and an entry was missing, damaged, or found no room. Or a tier failed: nobody
    waits for the rest, which is verified and kept like anything else."""

    TIMED_OUT = "timed_out"
    """The deadline has passed. What arrives later is verified and kept like anything else."""

    CANCELLED = "cancelled"
    """Somebody cancelled it. What arrives later is dropped."""


_STATES: Final = (
    PrefetchState.NOTHING,
    PrefetchState.READY,
    PrefetchState.INCOMPLETE,
    PrefetchState.TIMED_OUT,
    PrefetchState.CANCELLED,
    PrefetchState.PENDING,
)
"""Of several ranks' states the last one here is that of all."""


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


class _Place(Enum):
    """Where an entry lies."""

    HOST = 0
    TIER = 1
    STORE = 2
    NOWHERE = 3


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of whose prefix lower tiers may have more."""

    match: PrefixMatch  # what the GPU and the host tier had of it
    entries: PromptEntries
    prefetch: Prefetch  # what it waits for
    is_trial: bool  # whether it loads even if computing is faster


class _Flight:
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


class LowerTierLink:
    """Offers entries of the host tier to lower tiers, and brings them back.

    What it reads and writes of the host tier's rows is leased; the lower tiers' threads end the
    leases by the host tier's ``end_later``. All calls come from the context's thread.
    ``is_waited_for`` says that the caller waits for each prefetch. Then none takes longer than
    computing its tokens, and now and then one is brought although computing is faster.
    """

    def __init__(
        self,
        config: CacheConfig,
        host: HostTier,
        planners: Planners,
        *,
        has_kv: bool,
        tier: LowerTier | None = None,
        store: LowerTier | None = None,
        is_waited_for: bool = False,
        agreement: RankAgreement | None = None,
    ) -> None:
        self._agreement = agreement
        # What is not done, or not agreed on yet by ranks, which have all begun it in this order.
        self._open: list[_Asked] = []
        self.tier, self.store = tier, store
        self._host, self._planners = host, planners
        self._block_size = config.block_size_tokens
        self._min_computed = config.min_computed_tokens
        self._has_kv = has_kv
        self._is_waited_for = is_waited_for
        self._num_prefetches = 0
        # With the digest of the boundary that each brings, and who learns from it.
        self._under_way: list[tuple[bytes, Prefetch, LoadPlanner | None]] = []
        self._flights: dict[EntryKey, _Flight] = {}
        self._has_broken_off = False

    @property
    def tiers(self) -> list[LowerTier]:
        """All of them, from the top down."""
        return [each for each in (self.tier, self.store) if each is not None]

    def close(self) -> None:
        """End the lower tiers; what is queued is given up."""
        for tier in self.tiers:
            tier.close()

    def abandon(self) -> None:
        """End them for a context that is gone, and cancel what somebody may still wait for."""
        self.close()
        self.reset()

    def flush(self) -> None:
        """Wait until the lower tiers have ended what they were given."""
        for tier in self.tiers:
            tier.flush()

    @contextmanager
    def _taking_back(self) -> Iterator[None]:
        """Have no row left to a lower tier that was not handed it, where a call breaks off."""
        try:
            yield
        except BaseException:
            self._has_broken_off = True
            self._take_back()
            raise

    def _take_back(self) -> None:
        """End all that lower tiers were to do, once they have done what they were handed."""
        if all(tier.flush(_PATIENCE_SECONDS) for tier in self.tiers):
            self._host.end_lower()
            for flight in self._flights.values():
                if not flight.is_over:
                    flight.end(Refusal.ABORTED)
            self._flights.clear()
            self._has_broken_off = False

    def offer(self, facts: EntryFacts) -> None:
        """Offer an entry of the host tier to be stored; whether it is, a lower tier decides."""
        with self._taking_back():
            for tier in self.tiers:
                self._offer_to(tier, facts)

    def _offer_to(self, tier: LowerTier, facts: EntryFacts) -> None:
        if not tier.is_healthy:
            return
        lease = self._host.read(facts, for_lower=True)
        if isinstance(lease, Refusal):
            return
        end_row = partial(self._host.end_later, lease)
        if not tier.put(facts, self._host.buffer(lease), end_row):
            self._host.release(lease)

    def offer_used(self, blocks: int, entries: PromptEntries) -> None:
        """Offer what a hit has used and the host tier has."""
        tiers = [tier for tier in self.tiers if blocks and tier.is_healthy]
        if not tiers:
            return
        used = [(EntryKind.KV, index) for index in range(blocks)] if self._has_kv else []
        used.append((EntryKind.STATE, blocks - 1))
        keys = [entries.key(*each) for each in used]
        for tier in tiers:
            for each, key, is_stored in zip(used, keys, tier.has_many(keys), strict=True):
                if not is_stored and self._host.has(key.kind, key.digest):
                    self._offer_to(tier, entries.facts(*each))

    def prefetch(
        self,
        request_id: Hashable,
        match: PrefixMatch,
        entries: PromptEntries,
        timeout_seconds: float | None,
    ) -> Prefetch:
        """Begin to bring what lets a request skip the most, if that is quicker than computing."""
        if not self.tiers:
            return Prefetch(request_id, match.skip_tokens, timeout_seconds)
        prefetch = Prefetch(
            request_id,
            match.skip_tokens,
            timeout_seconds,
            needs_agreement=self._agreement is not None,
        )
        if self._is_waited_for:  # no longer than computing what could be skipped takes
            num_tokens = self._usable_blocks(match) * self._block_size - match.skip_tokens
            prefetch.end_within(self._planners.seconds(num_tokens))
        self._num_prefetches += 1
        is_trial = self._is_waited_for and self._num_prefetches % _TRY_EVERY == 0
        asked = _Asked(match, entries, prefetch, is_trial)
        if self._agreement is not None and match.state_matched_blocks >= self._usable_blocks(match):
            prefetch.agree(PrefetchState.NOTHING)  # as it is on all ranks
            return prefetch
        with self._taking_back():
            if self._ask(asked):
                prefetch.is_asking = True
            elif self._agreement is None:
                self._begin(asked)
            else:
                prefetch.is_asking = True
                prefetch.answer()
        self._open.append(asked)
        self.agree()
        return prefetch

    def agree(self) -> None:
        """Begin and end what all ranks can: all of them call it alike.

        A prefetch begins when the stores of all ranks have answered, so that all bring the same
        boundary, and is done when it is on all.
        """
        if not self._open:
            return
        pending = _STATES.index(PrefetchState.PENDING)
        own = [
            (0 if each.is_answered else pending)
            if each.is_asking
            else _STATES.index(each.own_state)
            for each in (asked.prefetch for asked in self._open)
        ]
        states = largest(own, self._agreement)
        for asked, state in zip(list(self._open), states, strict=True):
            if state == pending:
                continue
            outcome = _STATES[int(state)]
            if asked.prefetch.is_asking:
                with self._taking_back():
                    if self._begin(asked):
                        continue
                outcome = PrefetchState.NOTHING
            self._open.remove(asked)
            asked.prefetch.agree(outcome)

    def remove(self, key: EntryKey) -> None:
        """Have an entry that is known to be wrong not found again."""
        for tier in self.tiers:
            tier.remove(key)

    def arriving_tokens(self, hashes: BlockHashes) -> int:
        """Say how many tokens of a prompt can be skipped once what is under way has arrived."""
        reached = 0
        for boundary, prefetch, _ in self._under_way:
            # What has failed on one of several ranks is over when all of them know.
            is_alone = self._agreement is None
            if prefetch.has_failed if is_alone else prefetch.is_done:
                continue
            blocks = prefetch.skip_tokens // self._block_size
            if 0 < blocks <= len(hashes) and hashes.digest(blocks - 1) == boundary:
                reached = max(reached, prefetch.skip_tokens)
        return reached

    def poll(self) -> None:
        """Forget what is over, learn from it, and go on where a store has answered."""
        if self._agreement is None:
            self.agree()
        for under_way in list(self._under_way):
            _, prefetch, planner = under_way
            if prefetch.is_over and prefetch.is_done:
                self._under_way.remove(under_way)
                if not prefetch.refusals and planner is not None:
                    planner.record_load(prefetch.num_bytes, prefetch.seconds)
        for key in [key for key, flight in self._flights.items() if flight.is_over]:
            del self._flights[key]

    def reset(self) -> None:
        """Cancel what is under way."""
        if self._has_broken_off:
            self._take_back()
        for _, prefetch, _ in self._under_way:
            prefetch.cancel()
        for asked in self._open:
            asked.prefetch.cancel()
            asked.prefetch.agree(PrefetchState.CANCELLED)
        self._open.clear()
        self._under_way.clear()
        self._flights.clear()

    def _ask(self, asked: _Asked) -> bool:
        """Ask the store what it has of a prefix; False if there is nothing to ask or to gain."""
        store, match = self.store, asked.match
        if store is None or not store.is_healthy:
            return False
        entries = self._entries_of(match)
        keys = [asked.entries.key(*each) for each in entries]
        places = zip(keys, self._places_of(keys), strict=True)
        unknown = [key for key, place in places if place is _Place.NOWHERE]
        # At best all blocks come from there, and one state.
        num_bytes = self._host.row_bytes(EntryKind.STATE) if unknown else 0
        num_bytes += sum(self._host.row_bytes(k.kind) for k in unknown if k.kind is EntryKind.KV)
        tokens = self._usable_blocks(match) * self._block_size
        loading = self._planners.seconds(match.prompt_tokens - tokens, store_bytes=num_bytes)
        if not unknown or loading >= self._seconds_without(asked):
            return False
        return store.ask(unknown, lambda _: asked.prefetch.answer())

    def _begin(self, asked: _Asked) -> bool:
        """Begin to bring what is best for a request; False if nothing is."""
        prefetch, skip_tokens = asked.prefetch, asked.match.skip_tokens
        blocks, needed = self._plan(asked)
        if not blocks:
            prefetch.begin(skip_tokens, 0, 0)
            return False
        if self._is_waited_for:  # no longer than computing it takes
            num_tokens = blocks * self._block_size - skip_tokens
            prefetch.end_within(self._planners.seconds(num_tokens))
        read = [self._host.read(facts) for facts, place in needed if place is _Place.HOST]
        held = [lease for lease in read if not isinstance(lease, Refusal)]
        wanted = [(facts, place) for facts, place in needed if place is not _Place.HOST]
        places = {place for _, place in wanted}
        # What is under way already is there sooner, and teaches nobody what it takes.
        is_alone = not any(facts.key in self._flights for facts, _ in wanted)
        num_bytes = sum(facts.payload_bytes for facts, _ in wanted)
        prefetch.begin(blocks * self._block_size, len(wanted), num_bytes)
        for facts, place in wanted:
            tier = self.tier if place is _Place.TIER else self.store
            assert tier is not None, "it has the entry"
            self._load(facts, prefetch, tier)
        self._host.use(held)
        for lease in held:
            self._host.release(lease)
        planner = None
        if is_alone and len(places) == 1:
            of_store = _Place.STORE in places
            planner = self._planners.store if of_store else self._planners.disk
        boundary = asked.entries.hashes.digest(blocks - 1)
        self._under_way.append((boundary, prefetch, planner))
        return True

    def _plan(self, asked: _Asked) -> tuple[int, list[tuple[EntryFacts, _Place]]]:
        """Choose how many blocks to bring; 0 if it is best to bring nothing.

        With them come the entries that are needed for it, in the order of the prefix, and where
        they lie.
        """
        match, is_alone = asked.match, self._agreement is None
        first, usable = match.state_matched_blocks, self._usable_blocks(match)
        entries = [] if asked.prefetch.is_given_up else self._entries_of(match)
        if first >= usable or (is_alone and not entries):
            return 0, []
        keys = [asked.entries.key(*each) for each in entries]
        where = dict(zip(entries, self._places_of(keys), strict=True))
        on_gpu = min(match.kv_matched_blocks, usable)
        most_blocks = self._host.num_rows(EntryKind.KV)  # that are there at once
        size = {kind: self._host.row_bytes(kind) for kind in EntryKind}
        # Of staying where the request is, and of each boundary after that.
        takes = [math.inf] * (usable - first + 1)
        takes[0] = self._seconds_without(asked)
        of_blocks = dict.fromkeys(_Place, 0)  # bytes of the blocks before a boundary
        for index in range(min(first, on_gpu), usable if entries else 0):
            if self._has_kv and index >= on_gpu:
                place = where[EntryKind.KV, index]
                if place is _Place.NOWHERE or index - on_gpu >= most_blocks:
                    break
                of_blocks[place] += size[EntryKind.KV]
            place = _Place.NOWHERE if index < first else where[EntryKind.STATE, index]
            if place is _Place.NOWHERE:
                continue
            tier_bytes, store_bytes = (
                of_blocks[each] + (size[EntryKind.STATE] if place is each else 0)
                for each in (_Place.TIER, _Place.STORE)
            )
            if is_alone and not tier_bytes and not store_bytes:
                continue  # others may have to bring what this rank has
            tokens = (index + 1) * self._block_size
            takes[index - first + 1] = self._planners.seconds(
                match.prompt_tokens - tokens, disk_bytes=tier_bytes, store_bytes=store_bytes
            )
        chosen = first - 1 + quickest(takes, self._agreement)
        if chosen < first:
            return 0, []
        needed = [(EntryKind.STATE, chosen)]  # first: nothing else takes as long to read and verify
        needed += [(EntryKind.KV, index) for index in range(on_gpu, chosen + 1) if self._has_kv]
        return chosen + 1, [(asked.entries.facts(*each), where[each]) for each in needed]

    def _usable_blocks(self, match: PrefixMatch) -> int:
        """Return how many blocks of a prompt can be skipped at most."""
        return max(0, match.prompt_tokens - self._min_computed) // self._block_size

    def _entries_of(self, match: PrefixMatch) -> list[tuple[EntryKind, int]]:
        """Return what could let a request skip more: blocks that are not there, and states."""
        usable = self._usable_blocks(match)
        first = match.state_matched_blocks
        # Of several ranks one that can bring nothing still says what it has in host memory.
        is_of_use = self._agreement is not None or any(tier.is_healthy for tier in self.tiers)
        if not is_of_use:
            return []
        on_gpu = min(match.kv_matched_blocks, usable) if self._has_kv else usable
        blocks = [(EntryKind.KV, index) for index in range(on_gpu, usable)]
        return blocks + [(EntryKind.STATE, index) for index in range(first, usable)]

    def _places_of(self, keys: Sequence[EntryKey]) -> list[_Place]:
        """Say of each entry where it lies, the highest place first."""
        places = [
            _Place.HOST if self._host.has(key.kind, key.digest) else _Place.NOWHERE for key in keys
        ]
        for tier, place in ((self.tier, _Place.TIER), (self.store, _Place.STORE)):
            if tier is not None and tier.is_healthy:
                for index, is_there in enumerate(tier.has_many(keys)):
                    if is_there and places[index] is _Place.NOWHERE:
                        places[index] = place
        return places

    def _seconds_without(self, asked: _Asked) -> float:
        """Return how long a request takes if nothing is brought; almost forever in a trial."""
        if asked.is_trial:
            return sys.float_info.max
        return self._planners.seconds(asked.match.prompt_tokens - asked.match.skip_tokens)

    def _load(self, facts: EntryFacts, prefetch: Prefetch, tier: LowerTier) -> None:
        """Begin to bring one entry."""
        flight = self._flights.get(facts.key)
        if flight is not None and flight.join(prefetch):
            return
        lease = self._host.reserve(facts, for_lower=True)
        if lease is None:
            prefetch.end_one(Refusal.ABORTED)  # there is no row, or a spill brings it just now
            return
        flight = _Flight(prefetch, partial(self._host.end_later, lease))
        self._flights[facts.key] = flight
        if not tier.load(facts, self._host.buffer(lease), flight.end):
            del self._flights[facts.key]
            self._host.release(lease, "queue_full")
            prefetch.end_one(Refusal.ABORTED)
