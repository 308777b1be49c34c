"""What a lower tier, such as a disk, keeps of the host tier, and what is brought back from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from mamba_cache.blocks import BlockHashes
from mamba_cache.context.matching import PrefixMatch
from mamba_cache.tiers import (
    Drop,
    EntryFacts,
    EntryKey,
    EntryKind,
    HostLease,
    HostTier,
    LoadPlanner,
    LowerTier,
    Rates,
    Refusal,
    Resumption,
)

__all__ = ["LowerTierLink", "Prefetch", "PrefetchState"]

_ASSUMED: Final = Rates(bytes_per_second=2e9, latency_seconds=1e-3)
"""Of a disk, until it is measured."""

_FactsOf = Callable[[EntryKind, int], EntryFacts]
"""What a request derives of the entry of a kind at one of its blocks."""


class PrefetchState(str, Enum):
    """How far a prefetch is."""

    PENDING = "pending"
    """Entries are on their way."""

    READY = "ready"
    """All have arrived and are verified: a match finds them."""

    NOTHING = "nothing"
    """There is nothing to bring that would let the request skip more than it does anyway."""

    INCOMPLETE = "incomplete"
    """All is over, and an entry was missing, damaged, or found no room."""

    TIMED_OUT = "timed_out"
    """The deadline has passed. What arrives later is verified and kept like anything else."""

    CANCELLED = "cancelled"
    """Somebody cancelled it. What arrives later is dropped."""


class Prefetch:
    """What of one request is being brought from a lower tier to the host tier.

    Made by ``DynamicInferenceContext.prefetch``. An engine schedules the request when ``is_done``,
    with or without what was to be brought: ``add_request`` takes what is there. Any thread may
    look, wait and cancel.

    Attributes:
        request_id: Of the request.
        skip_tokens: Tokens that it need not compute once all is there.
        num_entries: KV blocks and states that are brought.
        num_bytes: What they take.
    """

    def __init__(
        self,
        request_id: Hashable,
        skip_tokens: int,
        num_entries: int,
        num_bytes: int,
        timeout_seconds: float | None,
    ) -> None:
        self.request_id = request_id
        self.skip_tokens = skip_tokens
        self.num_entries = num_entries
        self.num_bytes = num_bytes
        self._changed = threading.Condition()
        self._num_over = self._num_arrived = 0
        self._refusals: list[Refusal] = []
        self._is_cancelled = self._is_late = False
        self._began = time.monotonic()
        self._ended = self._began
        self._deadline = None if timeout_seconds is None else self._began + timeout_seconds

    @property
    def state(self) -> PrefetchState:
        """How far it is."""
        with self._changed:
            if self._is_cancelled:
                return PrefetchState.CANCELLED
            if self._is_late:
                return PrefetchState.TIMED_OUT
            if self._num_over == self.num_entries:
                if not self.num_entries:
                    return PrefetchState.NOTHING
                is_whole = self._num_arrived == self.num_entries
                return PrefetchState.READY if is_whole else PrefetchState.INCOMPLETE
            # Once late, it is late for good, whatever arrives.
            self._is_late = self._deadline is not None and time.monotonic() >= self._deadline
            return PrefetchState.TIMED_OUT if self._is_late else PrefetchState.PENDING

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for: the request may be added."""
        return self.state is not PrefetchState.PENDING

    @property
    def num_arrived(self) -> int:
        """Entries that are there and verified."""
        return self._num_arrived

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Why entries did not come, one for each that did not."""
        with self._changed:
            return tuple(self._refusals)

    def wait(self) -> PrefetchState:
        """Wait until it is done, which is at its deadline at the latest."""
        with self._changed:
            while not self.is_done:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                self._changed.wait(None if left is None else max(left, 0.0))
        return self.state

    def cancel(self) -> None:
        """Say that nobody wants it any more. Rows are free when their reads are over."""
        with self._changed:
            if self._num_over < self.num_entries:
                self._is_cancelled = True
            self._changed.notify_all()

    def end_one(self, refusal: Refusal | None) -> None:
        """Count an entry whose read is over."""
        with self._changed:
            self._num_over += 1
            if refusal is None:
                self._num_arrived += 1
            else:
                self._refusals.append(refusal)
            self._ended = time.monotonic()
            self._changed.notify_all()

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has cancelled it before it was over."""
        return self._is_cancelled

    @property
    def is_over(self) -> bool:
        """Whether all its reads are over, cancelled or late or not."""
        return self._num_over == self.num_entries

    @property
    def seconds(self) -> float:
        """What it took, once it is over."""
        return self._ended - self._began


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to bring.

    Attributes:
        blocks: Blocks before the boundary.
        wanted: Entries that are to be brought, in the order of the prefix.
        kept: Entries of the host tier that are needed besides.
    """

    blocks: int
    wanted: Sequence[EntryFacts]
    kept: Sequence[EntryFacts]


class _Flight:
    """One entry that is being brought, for all prefetches that want it."""

    def __init__(self, prefetch: Prefetch) -> None:
        self._lock = threading.Lock()
        self._prefetches = [prefetch]
        self.is_over = False

    def join(self, prefetch: Prefetch) -> bool:
        """Have it brought for one more; False if it is over."""
        with self._lock:
            if not self.is_over:
                self._prefetches.append(prefetch)
            return not self.is_over

    def end(self, refusal: Refusal | None, end_row: Callable[[Refusal | None], None]) -> None:
        """Give the row up or have it published, and only then tell the prefetches."""
        with self._lock:
            self.is_over = True
            if refusal is None and all(each.is_cancelled for each in self._prefetches):
                refusal = Refusal.ABORTED
            end_row(refusal)
            for each in self._prefetches:
                each.end_one(refusal)


class LowerTierLink:
    """Offers entries of the host tier to a lower tier, and brings them back.

    What it reads and writes of the host tier's rows is leased; the lower tier's threads end the
    leases by the host tier's ``end_later``. All calls come from the context's thread.

    Args:
        host: The host tier.
        tier: The lower tier.
        block_size_tokens: Tokens of a block.
        min_computed_tokens: Tokens of a prompt that are computed in any case.
        has_kv: Whether blocks hold anything.
        host_planner: Knows how fast prompts are computed.
        planner: Decides what is brought. Default: by what it turns out to take.
    """

    def __init__(
        self,
        host: HostTier,
        tier: LowerTier,
        *,
        block_size_tokens: int,
        min_computed_tokens: int,
        has_kv: bool,
        host_planner: LoadPlanner,
        planner: LoadPlanner | None = None,
    ) -> None:
        self.tier = tier
        self._host = host
        self._block_size = block_size_tokens
        self._min_computed = min_computed_tokens
        self._has_kv = has_kv
        self._host_planner = host_planner
        self._planner = LoadPlanner(_ASSUMED) if planner is None else planner
        self._under_way: dict[bytes, Prefetch] = {}
        self._flights: dict[EntryKey, _Flight] = {}

    def offer(self, facts: EntryFacts) -> None:
        """Offer an entry of the host tier to be stored; whether it is, the lower tier decides."""
        if not self.tier.is_healthy:
            return
        lease = self._host.read(facts, for_lower=True)
        if isinstance(lease, Refusal):
            return
        if not self.tier.put(facts, self._host.buffer(lease), self._ending(lease)):
            self._host.release(lease)

    def offer_used(
        self, blocks: int, key_of: Callable[[EntryKind, int], EntryKey], facts_of: _FactsOf
    ) -> None:
        """Offer what a hit has used and the host tier has.

        Args:
            blocks: Blocks before the boundary that it resumes from.
            key_of: Names an entry, which is all that is needed of those that are stored.
            facts_of: Derives it.
        """
        if not blocks or not self.tier.is_healthy:
            return
        used = [(EntryKind.KV, index) for index in range(blocks)] if self._has_kv else []
        used.append((EntryKind.STATE, blocks - 1))
        keys = [key_of(*each) for each in used]
        for each, key, is_stored in zip(used, keys, self.tier.has_many(keys), strict=True):
            if not is_stored and self._host.has(key.kind, key.digest):
                self.offer(facts_of(*each))

    def prefetch(
        self,
        request_id: Hashable,
        match: PrefixMatch,
        hashes: BlockHashes,
        facts_of: _FactsOf,
        timeout_seconds: float | None,
    ) -> Prefetch:
        """Begin to bring what lets a request skip the most, if that is quicker than computing.

        Args:
            request_id: Of the request.
            match: What the GPU and the host tier have of it.
            hashes: Hashes of its complete blocks.
            facts_of: Derives the entries.
            timeout_seconds: When it is to be given up; None: never.
        """
        plan = self._plan(match, hashes, facts_of)
        if plan is None:
            return Prefetch(request_id, match.skip_tokens, 0, 0, timeout_seconds)
        prefetch = self.bring(
            plan.wanted,
            plan.kept,
            request_id=request_id,
            skip_tokens=plan.blocks * self._block_size,
            timeout_seconds=timeout_seconds,
        )
        self._under_way[hashes.digest(plan.blocks - 1)] = prefetch
        return prefetch

    def bring(
        self,
        wanted: Sequence[EntryFacts],
        kept: Sequence[EntryFacts] = (),
        *,
        request_id: Hashable,
        skip_tokens: int,
        timeout_seconds: float | None,
    ) -> Prefetch:
        """Begin to bring entries, whether that is quicker than computing or not.

        Args:
            wanted: Entries that the host tier does not have.
            kept: Entries that it has, and that must not make room for what comes.
            request_id: Of the request.
            skip_tokens: What it can skip then.
            timeout_seconds: When it is to be given up; None: never.
        """
        num_bytes = sum(facts.payload_bytes for facts in wanted)
        prefetch = Prefetch(request_id, skip_tokens, len(wanted), num_bytes, timeout_seconds)
        read = [self._host.read(facts) for facts in kept]
        held = [lease for lease in read if not isinstance(lease, Refusal)]
        for facts in wanted:
            self._load(facts, prefetch)
        self._host.use(held)
        for lease in held:
            self._host.release(lease)
        return prefetch

    def arriving_tokens(self, hashes: BlockHashes) -> int:
        """Say how many tokens of a prompt can be skipped once what is under way has arrived."""
        reached = 0
        for boundary, prefetch in self._under_way.items():
            blocks = prefetch.skip_tokens // self._block_size
            if blocks <= len(hashes) and hashes.digest(blocks - 1) == boundary:
                reached = max(reached, prefetch.skip_tokens)
        return reached

    def poll(self) -> None:
        """Forget what is over, and learn from it how fast the lower tier is."""
        for boundary, prefetch in list(self._under_way.items()):
            if prefetch.is_over:
                del self._under_way[boundary]
                if not prefetch.refusals:
                    self._planner.record_load(prefetch.num_bytes, prefetch.seconds)
        for key in [key for key, flight in self._flights.items() if flight.is_over]:
            del self._flights[key]

    def reset(self) -> None:
        """Cancel what is under way."""
        for prefetch in self._under_way.values():
            prefetch.cancel()
        self._under_way.clear()
        self._flights.clear()

    def _plan(self, match: PrefixMatch, hashes: BlockHashes, facts_of: _FactsOf) -> _Plan | None:
        """Choose the boundary to bring; None if it is best to bring nothing."""
        usable = max(0, match.prompt_tokens - self._min_computed) // self._block_size
        first, on_gpu = match.state_matched_blocks, match.kv_matched_blocks
        if first >= usable or not self.tier.is_healthy:
            return None
        states = [facts_of(EntryKind.STATE, index) for index in range(first, usable)]
        blocks = list(self._blocks(range(min(on_gpu, usable), usable), facts_of))
        found = self.tier.has_many([facts.key for facts in [*blocks, *states]])
        is_below = dict(zip((facts.key for facts in [*blocks, *states]), found, strict=True))
        reach = usable
        for index, facts in enumerate(blocks, start=min(on_gpu, usable)):
            if not is_below[facts.key] and not self._is_in_host(facts):
                reach = index
                break
        plans: dict[Resumption, _Plan] = {}
        for index, state in enumerate(states[: max(0, reach - first)], start=first):
            if is_below[state.key] or self._is_in_host(state):
                needed = [*blocks[: max(0, index + 1 - on_gpu)], state]
                wanted = [facts for facts in needed if not self._is_in_host(facts)]
                kept = [facts for facts in needed if self._is_in_host(facts)]
                num_bytes = sum(facts.payload_bytes for facts in wanted)
                if wanted:
                    resumption = Resumption((index + 1) * self._block_size, num_bytes)
                    plans[resumption] = _Plan(index + 1, wanted, kept)
        speed = self._host_planner.rates.tokens_per_second
        self._planner.rates = self._planner.rates._replace(tokens_per_second=speed)
        stay = Resumption(match.skip_tokens, 0)
        return plans.get(self._planner.choose([stay, *plans], match.prompt_tokens))

    def _load(self, facts: EntryFacts, prefetch: Prefetch) -> None:
        """Begin to bring one entry."""
        flight = self._flights.get(facts.key)
        if flight is not None and flight.join(prefetch):
            return
        lease = self._host.reserve(facts, for_lower=True)
        if lease is None:
            prefetch.end_one(Refusal.ABORTED)  # there is no row, or a spill brings it just now
            return
        flight = self._flights[facts.key] = _Flight(prefetch)
        end_row = self._ending(lease)

        def done(refusal: Refusal | None) -> None:
            flight.end(refusal, end_row)

        if not self.tier.load(facts, self._host.buffer(lease), done):
            del self._flights[facts.key]
            self._host.cancel(lease, Drop.QUEUE_FULL)
            prefetch.end_one(Refusal.ABORTED)

    def _ending(self, lease: HostLease) -> Callable[[Refusal | None], None]:
        host = self._host

        def end(refusal: Refusal | None) -> None:
            host.end_later(lease, refusal)

        return end

    def _blocks(self, indices: range, facts_of: _FactsOf) -> Iterator[EntryFacts]:
        if self._has_kv:
            for index in indices:
                yield facts_of(EntryKind.KV, index)

    def _is_in_host(self, facts: EntryFacts) -> bool:
        return self._host.has(facts.key.kind, facts.key.digest)
