"""Tiers below the GPU: spills to host memory, and loads that requests resume from."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from mamba_cache._checks import check_kind
from mamba_cache._guard import weak_callback
from mamba_cache.cache import (
    AdaptiveSlotPolicy,
    BlockHashes,
    ExtraKey,
    KVBlockAllocator,
    PromptFacts,
    SlotLease,
    SlotPool,
    StateProposal,
)
from mamba_cache.cache.sequence import CachedSequence, PrefixMatch
from mamba_cache.config import CacheConfig
from mamba_cache.context.prefetch import (
    STATES,
    Asked,
    Flight,
    Planners,
    Prefetch,
    PrefetchState,
    PromptEntries,
)
from mamba_cache.context.requests import ActiveRequest, PlannedLoad
from mamba_cache.context.tier_memory import Ticket, make_host_tier, open_lower_tiers
from mamba_cache.errors import InvalidArgumentError, InvariantError, MambaCacheError
from mamba_cache.events import Removed
from mamba_cache.protocols import RankAgreement
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.tiers import CacheIdentity, LoadPlanner, Rates, Refusal, TierStats
from mamba_cache.tiers.entry import EntryFacts, EntryKey, EntryKind
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.identity import tenant_digest
from mamba_cache.tiers.lower import LowerTier
from mamba_cache.tiers.planner import largest, quickest
from mamba_cache.tiers.rows import RowLease
from mamba_cache.tiers.transfers import CopyJob, Mark

__all__ = ["NoTiers", "Tiering", "make_tiering"]

_MAX_COPIES: Final = 256
"""Number of entries whose copies to the host tier may be under way at once."""

_CLEANUP_SECONDS: Final = 5.0
"""How long an interrupted call waits for the jobs of lower tiers."""

_TRIAL_EVERY: Final = 16
"""Where a caller waits for prefetches, each n-th one loads even if computing seems faster:
otherwise a tier that was slow once would never be measured again."""

_ASSUMED: Final = Rates(), Rates(2e9, 1e-3), Rates(1e9, 2e-3)
"""Rates of host memory, a disk and a store until they are measured."""

_UNMEASURED: Final = Rates(bytes_per_second=1e18, latency_seconds=0.0, tokens_per_second=1e-6)
"""Rates of loads that seem to cost nothing: each tier is tried, and so measured."""


@dataclass(slots=True, eq=False)
class _Offer:
    """An entry on the GPU that is to be spilled."""

    place: int  # the entry's slot or KV block
    facts: EntryFacts
    generation: int  # of the place, which differs once the place holds another entry
    proposal: StateProposal | None = None
    pin: SlotLease | None = None  # keeps the slot from eviction during the copy
    lease: RowLease | None = None  # on the row that is written, once reserved


_Spill: TypeAlias = "tuple[Ticket, list[_Offer]]"


_Place: TypeAlias = "HostTier | LowerTier | None"
"""The tier that holds an entry; None: no tier does."""


class Tiering:
    """Spills published entries from the GPU to the host tier, and loads entries for requests.

    A spill holds no lease on the GPU. Its copy is discarded if the slot or block was freed in the
    meantime. So no allocation waits for a copy, and none fails because of one.

    A host policy that knows prompts helps to choose the states to save. A state that is worth a
    row but no slot still gets a slot (``wants``), which is evicted first. The slot is pinned until
    its copy is done. At most half of all slots are pinned.

    A load writes to blocks and a slot that the request has reserved, as if to compute them. They
    are published when the step is committed, and only if every byte was verified by then.

    Each rank has tiers of its own, whose contents differ. All ranks decide together where a request
    resumes and whether its load succeeded. With several ranks nothing else here changes what is on
    the GPU: the host policy does not choose states, and no slot is pinned, because the worth of a
    row and the end of a copy differ between ranks.
    """

    def __init__(
        self,
        config: CacheConfig,
        tensors: Mapping[EntryKind, Sequence[torch.Tensor]],
        device: torch.device,
        kv_blocks: KVBlockAllocator,
        slots: SlotPool,
        *,
        identity: CacheIdentity | None,
        planner: LoadPlanner | None = None,
        is_waited_for: bool = False,
        agreement: RankAgreement | None = None,
    ) -> None:
        self._agreement = agreement
        self._slots = slots
        self._block_size = config.block_size_tokens
        self._min_computed = config.min_computed_tokens
        self.identify(identity)
        self._secret = config.hash_secret or os.urandom(32)
        self._has_kv = bool(tensors[EntryKind.KV])
        # A caller that waits for its copies never passes requests to this policy.
        knows_prompts = isinstance(slots.policy, AdaptiveSlotPolicy) and not is_waited_for
        policy = AdaptiveSlotPolicy() if knows_prompts else None
        self.host, self.transfers = make_host_tier(config, tensors, device, policy)
        assumed = (_UNMEASURED,) * 3 if is_waited_for else _ASSUMED
        of_host, of_disk, of_store = (LoadPlanner(rates) for rates in assumed)
        self.planners = Planners(planner or of_host, of_disk, of_store)
        self.disk, self.store = open_lower_tiers(config, identity, self.host)
        # A caller that waits for its copies has no older ones under way, and needs no limit.
        self._max_copies = sys.maxsize if is_waited_for else _MAX_COPIES
        self._row_bytes = {kind: self.host[kind].memory.row_bytes for kind in EntryKind}
        self._keeps_kv = self._has_kv and bool(self.host[EntryKind.KV].memory.num_rows)
        self._max_pins = slots.max_slots // 2
        self._is_waited_for, self._num_prefetches = is_waited_for, 0
        self._asked: list[Asked] = []  # in the same order on all ranks
        self._flights: dict[EntryKey, Flight] = {}
        self._needs_cleanup = False
        # Lower tiers that store at the first use get every state, through a slot and a host row.
        self._admits_all = bool(self.lower_tiers) and config.write_on_use == 1
        self._offers: list[_Offer] = []
        self._spills: list[_Spill] = []
        self._retiring: list[tuple[Ticket, list[RowLease]]] = []
        self._begun: tuple[Mark, int] | None = None
        self._timed: list[tuple[Mark, Mark, int]] = []
        self._generations = {
            EntryKind.STATE: slots.generations,
            EntryKind.KV: np.zeros(kv_blocks.pool_size, np.int64),
        }
        kv_blocks.listeners.add(weak_callback(self._on_removed), Removed)

    def identify(self, identity: CacheIdentity | None) -> None:
        """Set the identity of entries from now on; None: a random one, of this object alone."""
        self._identity = os.urandom(32) if identity is None else identity.digest
        self._rank = 0 if identity is None else identity.rank

    @property
    def lower_tiers(self) -> list[LowerTier]:
        """The tiers below host memory, from the top down."""
        return [tier for tier in (self.disk, self.store) if tier is not None]

    @property
    def num_offers(self) -> int:
        """Number of offered entries whose copies have not begun."""
        return len(self._offers)

    def find(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Return a match that is extended by the host tier and counts tokens that are arriving."""
        self.poll()  # includes entries that have arrived from lower tiers
        match = self.extend(match, hashes)
        return replace(match, arriving_tokens=self._arriving_tokens(hashes))

    def extend(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Return a match that is extended by the host tier, if loading is faster than computing.

        Ranks agree on the result, unless the GPU already has all that can be skipped.
        """
        first, digests = match.state_matched_blocks, hashes.digests

        def place_of(kind: EntryKind, index: int) -> _Place:
            return self.host if digests[index] in self.host[kind] else None

        seconds = self.planners.compute_seconds(match.prompt_tokens - match.skip_tokens)
        blocks = self._best_boundary(match, place_of, {self.host: self.planners.host}, seconds)
        if blocks == first:
            return match
        return replace(
            match,
            state_matched_blocks=blocks,
            skip_tokens=blocks * self._block_size,
            miss_reason=None,
            loaded_blocks=max(0, blocks - match.kv_matched_blocks),
            loads_state=True,
        )

    def _best_boundary(
        self,
        match: PrefixMatch,
        place_of: Callable[[EntryKind, int], _Place],
        planners: Mapping[_Place, LoadPlanner],
        seconds: float,
    ) -> int:
        """Return the boundary, in blocks, from which the rest of a prompt is done soonest.

        From the match's own boundary that takes ``seconds``. A later boundary needs its state and
        all blocks before it. ``place_of`` returns the place of each; ``planners`` time the loads.
        """
        first, usable = match.state_matched_blocks, self._usable_blocks(match)
        if first >= usable:
            return first
        on_gpu = min(match.kv_matched_blocks, usable) if self._has_kv else usable
        max_blocks = self.host[EntryKind.KV].memory.num_rows  # all must be there at once
        # Ranks compare these lists item by item, so every possible boundary has an item.
        totals = [seconds] + [math.inf] * (usable - first)
        of_blocks: Counter[_Place] = Counter()  # bytes of the blocks before a boundary, by place
        for index in range(min(first, on_gpu), usable):
            if index >= on_gpu:
                place = place_of(EntryKind.KV, index)
                if place is None or index - on_gpu >= max_blocks:
                    break
                of_blocks[place] += self._row_bytes[EntryKind.KV]
            place = None if index < first else place_of(EntryKind.STATE, index)
            if place is None:
                continue
            num_bytes = of_blocks + Counter({place: self._row_bytes[EntryKind.STATE]})
            loads = [planners[each].load_seconds(num_bytes[each]) for each in planners]
            # Another rank may have to load an entry that this rank has.
            if any(loads) or self._agreement is not None:
                num_tokens = match.prompt_tokens - (index + 1) * self._block_size
                totals[index - first + 1] = self.planners.compute_seconds(num_tokens) + sum(loads)
        return first + quickest(totals, self._agreement)

    def resume(
        self, sequence: CachedSequence, match: PrefixMatch
    ) -> tuple[PrefixMatch, PlannedLoad | None]:
        """Choose where a sequence resumes; lease the rows if it must load."""
        self.poll()
        refused: PrefixMatch | None = None
        while (extended := self.extend(match, sequence.hashes)).loads_state:
            assert extended != refused, "a refused entry is not found again"
            # Checked before anything is evicted: a call that raises must have changed nothing.
            index, blocks = extended.state_matched_blocks - 1, match.block_ids
            block = blocks[index] if index < len(blocks) else None
            if not self._slots.can_reserve(block, blocks):
                break
            load = self._read(sequence, extended)
            if load is not None:
                return extended, load
            refused = extended  # a damaged entry is not found again
        return match, None

    def _read(self, sequence: CachedSequence, match: PrefixMatch) -> PlannedLoad | None:
        """Lease the rows that a match resumes from; None if a row is missing on any rank."""
        blocks, entries = match.state_matched_blocks, self._entries(sequence)
        first = min(match.kv_matched_blocks, blocks) if self._has_kv else blocks
        needed = self._needed(first, blocks)
        load, is_refused = PlannedLoad([], first), True
        try:
            for kind, index in needed:
                lease = self.host[kind].read(entries.facts(kind, index))
                if isinstance(lease, Refusal):
                    break
                load.leases.append(lease)
            [is_refused] = self._on_any_rank([len(load.leases) < len(needed)])
        finally:
            if is_refused:
                self.cancel(load)
        return None if is_refused else load

    def _needed(self, first: int, blocks: int) -> list[tuple[EntryKind, int]]:
        """Return the entries up to a boundary: the blocks from ``first``, then the state."""
        kv = range(first, blocks) if self._has_kv else ()
        return [*((EntryKind.KV, index) for index in kv), (EntryKind.STATE, blocks - 1)]

    def _on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        return [value > 0 for value in largest([float(flag) for flag in flags], self._agreement)]

    def begin_request(self, facts: PromptFacts) -> object:
        """Pass a prompt to the host tier's policy, if that knows prompts."""
        return self.host[EntryKind.STATE].begin_request(facts)

    def remove(self, kind: EntryKind, cache_salt: ExtraKey, digest: bytes) -> None:
        """Remove an entry that is known to be wrong from all tiers."""
        tenant = self._tenant(cache_salt)
        self._remove_below(EntryKey(self._identity, tenant, kind, digest, self._rank))
        self.host.poll()  # includes an entry that has just arrived from a lower tier
        self.host[kind].remove(digest)

    def cancel(self, load: PlannedLoad) -> None:
        """Release the rows of a load that will not be used, once nothing reads them."""
        leases, load.leases = load.leases, []
        if load.ticket is None:
            for lease in leases:
                lease.rows.release(lease)
        elif leases:
            self._retiring.append((load.ticket, leases))

    def begin(self, requests: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """Enqueue the loads of a step; return the requests whose loads failed."""
        loading = [active for active in requests if active.current_chunk.load is not None]
        is_begun = not loading or self.load([active.current_load for active in loading])
        return [] if is_begun else loading

    def load(self, loads: Sequence[PlannedLoad]) -> bool:
        """Enqueue copies of rows to the blocks and the slot of each load.

        Return False, and release the rows, if this fails on any rank.
        """
        jobs: list[CopyJob] = []
        for load in loads:
            load.first_job = len(jobs)
            places = [*load.blocks, load.current_checkpoint.slot]
            pairs = zip(places, load.leases, strict=True)
            jobs += [CopyJob(lease.facts.key.kind, place, lease.row) for place, lease in pairs]
        ticket: Ticket | None = None
        try:
            ticket = self.transfers.load(jobs)
        except Exception:
            # Some copies may be under way: their memory must not be reused before they end.
            self.transfers.wait()
            self.host.refused["copy_failed"] += len(jobs)
        for load in loads:
            load.ticket = ticket
        [has_failed] = self._on_any_rank([ticket is None])
        if has_failed:
            self.transfers.wait()
            for load in loads:
                self.cancel(load)
        return not has_failed

    def begin_forward(self, num_tokens: int) -> None:
        """Begin to time a forward that computes prompts."""
        self._begun = (self.transfers.mark(), num_tokens) if num_tokens else None

    def end_forward(self) -> None:
        """End the timing: the whole forward is enqueued."""
        if self._begun is not None:
            begun, num_tokens = self._begun
            self._timed.append((begun, self.transfers.mark(), num_tokens))
            self._begun = None

    def end_step(self) -> None:
        """Begin to spill the entries that were published."""
        self.end_forward()
        self.pump()

    def verify(self, requests: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """Return the requests of a step whose loads were damaged.

        This waits only if ``commit_step`` is given tokens that are still on the device: tokens
        reach the host long after the step's loads are done.
        """
        loading = [active for active in requests if active.current_chunk.load is not None]
        self.end_loads([active.current_load for active in loading])
        return [active for active in loading if active.current_load.is_damaged]

    def end_loads(self, loads: Sequence[PlannedLoad]) -> None:
        """Wait for loads, agree on all ranks which are damaged, and end them."""
        # An earlier call that was interrupted may have ended some, on all ranks.
        unknown = [load for load in loads if load.is_damaged is None]
        if unknown:
            bad = [self._damaged_rows(load) for load in unknown]
            verdicts = self._on_any_rank([bool(rows) for rows in bad])
            for load, rows, is_damaged in zip(unknown, bad, verdicts, strict=True):
                self._end_load(load, rows, is_damaged=is_damaged)

    def _damaged_rows(self, load: PlannedLoad) -> set[int]:
        """Wait for a load; return the positions of its damaged rows."""
        assert load.ticket is not None, "a load is enqueued when its step begins"
        load.ticket.wait()
        first, last = load.first_job, load.first_job + len(load.leases)
        return {index - first for index in load.ticket.damaged() if first <= index < last}

    def _end_load(self, load: PlannedLoad, bad: set[int], *, is_damaged: bool) -> None:
        """Release the rows of a finished load; remove its damaged entries."""
        assert load.ticket is not None, "a load is enqueued when its step begins"
        load.is_damaged = is_damaged
        if not is_damaged:
            self.host.use(load.leases)
            self.host.restored_total += len(load.leases)
        self.planners.host.record_load(load.ticket.num_bytes, load.ticket.seconds())
        leases, load.leases = load.leases, []
        for index, lease in enumerate(leases):
            if index in bad:
                lease.rows.refuse(lease, Refusal.PAYLOAD_DIGEST)
                self._remove_below(lease.facts.key)  # lower tiers may hold the damaged bytes
            else:
                lease.rows.release(lease)

    @property
    def _takes_offers(self) -> bool:
        """Whether entries that are published now may be spilled."""
        return True

    def offer_blocks(
        self,
        sequence: CachedSequence,
        first: int,
        blocks: Sequence[int],
        holders: Sequence[int | None],
    ) -> None:
        """Offer the published blocks of a sequence for spilling."""
        if not (self._keeps_kv and self._takes_offers):
            return
        hashes, known = sequence.hashes, self.host[EntryKind.KV]
        entries = self._entries(sequence)
        for index, (block, holder) in enumerate(zip(blocks, holders, strict=True), first):
            if block == holder and hashes.digests[index] not in known:
                self.offer_entry(block, entries.facts(EntryKind.KV, index))

    def wants(self, sequence: CachedSequence, proposals: Sequence[StateProposal]) -> list[bool]:
        """Return for each state of a request whether it is worth a host row and has none.

        With several ranks the answer is False, because ranks would differ.
        """
        if self._agreement is not None:
            return [False] * len(proposals)
        if self._admits_all:
            worth = [True] * len(proposals)
        else:
            own = [each._replace(prompt=sequence.prompt_seen_below) for each in proposals]
            worth = self.host[EntryKind.STATE].would_admit(own)
        hashes = sequence.hashes
        return [
            is_worth
            and not (
                each.hash_ids is None
                and hashes.digests[each.num_blocks - 1] in self.host[EntryKind.STATE]
            )
            for is_worth, each in zip(worth, proposals, strict=True)
        ]

    def offer_state(
        self, sequence: CachedSequence, position: int, slot: int, proposal: StateProposal | None
    ) -> None:
        """Offer a published state of a sequence for spilling."""
        index = position // self._block_size - 1
        digest = sequence.chain.digests[index]
        if self._takes_offers and digest not in self.host[EntryKind.STATE]:
            if proposal is not None:
                proposal = proposal._replace(
                    prompt=sequence.prompt_seen_below,
                    is_asked=proposal.is_asked or self._admits_all,
                )
            facts = self._entries(sequence).facts(EntryKind.STATE, index)
            self.offer_entry(slot, facts, proposal)

    def offer_entry(
        self, place: int, facts: EntryFacts, proposal: StateProposal | None = None
    ) -> None:
        """Offer the published entry in a slot or KV block for spilling."""
        generation = self._generations[facts.key.kind].item(place)
        self._offers.append(_Offer(place, facts, generation, proposal))

    def pump(self) -> None:
        """End finished copies and begin those of offered entries, without waiting."""
        self.poll()
        if not self._offers:
            return
        room = self._max_copies - sum(len(offers) for _, offers in self._spills)
        jobs: list[CopyJob] = []
        taken: list[_Offer] = []
        for offer in self._offers:
            if not self._is_current(offer):
                self.host.dropped["gone"] += 1
                continue
            if len(jobs) >= room:
                self.host.dropped["queue_full"] += 1
                continue
            offer.lease = self.host[offer.facts.key.kind].reserve(
                offer.facts, proposal=offer.proposal
            )
            if offer.lease is None:
                continue
            may_pin = self._agreement is None and len(self.pins) < self._max_pins
            if offer.proposal is not None and may_pin:
                offer.pin = self._slots.pin(offer.place)
            taken.append(offer)
            jobs.append(CopyJob(offer.facts.key.kind, offer.place, offer.lease.row))
        self._offers = []
        if not jobs:
            return
        try:
            ticket = self.transfers.spill(jobs)
        except Exception:
            self.transfers.wait()
            for offer in taken:
                self._end_spill(offer, "copy_failed")
            return
        self._spills.append((ticket, taken))
        self.poll()

    def poll(self) -> None:
        """End finished copies and finished jobs of lower tiers, without waiting."""
        self.host.poll()
        while self._spills and self._spills[0][0].is_done():
            _, offers = self._spills[0]
            for offer in offers:
                self._end_spill(offer)
            del self._spills[0]
        while self._retiring and self._retiring[0][0].is_done():
            for lease in self._retiring[0][1]:
                lease.rows.release(lease)
            del self._retiring[0]
        self._poll_prefetches()
        self._read_times()

    def _read_times(self) -> None:
        """Record the times of forwards that have ended."""
        while self._timed:
            begun, ended, num_tokens = self._timed[0]
            seconds = self.transfers.seconds_between(begun, ended)
            if seconds is None:
                return
            self.planners.host.record_prefill(num_tokens, seconds)
            del self._timed[0]

    def wait(self) -> None:
        """Wait until all copies are done and all host memory is there; then poll."""
        self.transfers.wait()
        self.host.wait_for_memory()
        self.poll()

    def reset(self) -> None:
        """Forget all entries, offers and copies, once the copies are done."""
        self._end_all()
        self.host.reset()

    def let_go(self) -> None:
        """Drop all offers and copies of an interrupted call, and entries if rows are still held."""
        self._end_all()
        try:
            self.host.poll()
            is_idle = not any(self.host.leases.values())
        except MambaCacheError:  # a change of the host tier was interrupted
            is_idle = False
        if not is_idle:
            self.host.reset()

    def _end_all(self) -> None:
        """Forget all offers, copies and prefetches, once the copies are done."""
        self.transfers.wait()
        self._offers, self._spills, self._retiring = [], [], []
        self._begun, self._timed = None, []
        self._cancel_prefetches()

    def stats(self) -> tuple[TierStats, ...]:
        """Return the contents and counters of each tier, from the top down."""
        return (self.host.stats(), *(tier.stats() for tier in self.lower_tiers))

    def flush(self) -> None:
        """Wait until lower tiers have finished their jobs; then poll."""
        for tier in self.lower_tiers:
            tier.flush()
        self.poll()

    def close(self) -> None:
        """Close the lower tiers once their jobs are finished."""
        self.flush()
        for tier in self.lower_tiers:
            tier.close()

    def abandon(self) -> None:
        """Close the lower tiers of a context that no longer exists; cancel its prefetches."""
        for tier in self.lower_tiers:
            tier.close()
        self._cancel_prefetches()

    def check_invariants(self, loads: Iterable[PlannedLoad] = ()) -> None:
        """Check each tier, and that rows are held only for ``loads`` and copies under way."""
        self.host.check_invariants()
        for tier in self.lower_tiers:
            tier.check_invariants()
        held = [lease for load in loads for lease in load.leases]
        held += [lease for _, leases in self._retiring for lease in leases]
        held += [o.lease for _, offers in self._spills for o in offers if o.lease is not None]
        for kind, leases in self.host.leases.items():
            if {each for each in held if each.facts.key.kind is kind} != set(leases):
                raise InvariantError(f"rows of {kind} are held for no load and no copy")

    def _entries(self, sequence: CachedSequence) -> PromptEntries:
        return self.entries(sequence.hashes, sequence.request.cache_salt)

    def entries(self, hashes: BlockHashes, cache_salt: ExtraKey) -> PromptEntries:
        """Return an object that derives the keys and facts of a prompt's entries."""
        tenant = self._tenant(cache_salt)
        return PromptEntries(
            hashes, self._identity, tenant, self._rank, self._block_size, self._row_bytes
        )

    def _tenant(self, cache_salt: ExtraKey) -> bytes:
        return tenant_digest(self._secret, cache_salt)

    def _is_current(self, offer: _Offer) -> bool:
        """Return whether an offered entry is still in its place."""
        return self._generations[offer.facts.key.kind].item(offer.place) == offer.generation

    def _end_spill(self, offer: _Offer, failure: str | None = None) -> None:
        """End a finished copy; discard it if the entry left its place meanwhile."""
        assert offer.lease is not None, "a copy that was begun has a row"
        pin, offer.pin = offer.pin, None
        if pin is not None:
            self._slots.unpin(pin)
        if failure is None and not self._is_current(offer):
            failure = "gone"
        is_kept = False
        if failure is None:
            is_kept = offer.lease.rows.complete(offer.lease)
        else:
            offer.lease.rows.release(offer.lease, failure)
        offer.lease = None
        if is_kept:
            self.offer_below(offer.facts)

    @property
    def pins(self) -> list[SlotLease]:
        """Pins of the slots that copies read."""
        return [o.pin for _, offers in self._spills for o in offers if o.pin is not None]

    def _on_removed(self, event: Removed) -> None:
        """Discard the spills of removed blocks."""
        if (self._offers or self._spills) and event.kind == "block":
            self._generations[EntryKind.KV][[*event.block_ids]] += 1

    # Disk and store.

    @contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        """End the leases of lower tiers if the call is interrupted."""
        try:
            yield
        except BaseException:
            self._needs_cleanup = True
            self._end_lower_work()
            raise

    def _end_lower_work(self) -> None:
        """Wait for the jobs of lower tiers, then end their leases and flights."""
        if all(tier.flush(_CLEANUP_SECONDS) for tier in self.lower_tiers):
            try:
                self.host.end_lower()
            except MambaCacheError:  # a change of the host tier was interrupted
                self.transfers.wait()
                self.host.reset()
                self.host.end_lower()
            for flight in self._flights.values():
                if not flight.is_over:
                    flight.end(Refusal.ABORTED)
            self._flights.clear()
            self._needs_cleanup = False

    def offer_below(self, facts: EntryFacts) -> None:
        """Offer an entry of the host tier to the lower tiers, which may refuse it."""
        with self._cleaning_up():
            for tier in self.lower_tiers:
                self._offer_to(tier, facts)

    def _offer_to(self, tier: LowerTier, facts: EntryFacts) -> None:
        if not tier.is_healthy:
            return
        lease = self.host[facts.key.kind].read(facts, for_lower=True)
        if isinstance(lease, Refusal):
            return
        end_row = partial(self.host.end_later, lease)
        if not tier.put(facts, lease.rows.buffer(lease), end_row):
            lease.rows.release(lease)

    def offer_used(self, active: ActiveRequest, blocks: int) -> None:
        """Offer the entries that a request resumes from to lower tiers, if on the host tier."""
        tiers = [tier for tier in self.lower_tiers if blocks and tier.is_healthy]
        if not tiers:
            return
        used, entries = self._needed(0, blocks), self._entries(active)
        keys = [entries.key(*each) for each in used]
        for tier in tiers:
            for each, key, is_stored in zip(used, keys, tier.has_many(keys), strict=True):
                if not is_stored and key.digest in self.host[key.kind]:
                    self._offer_to(tier, entries.facts(*each))

    def prefetch(
        self,
        request_id: Hashable,
        match: PrefixMatch,
        entries: PromptEntries,
        timeout_seconds: float | None,
    ) -> Prefetch:
        """Begin to load entries for a request to host memory, if that is faster than computing."""
        if not self.lower_tiers:
            return Prefetch(request_id, match.skip_tokens, timeout_seconds)
        prefetch = Prefetch(
            request_id,
            match.skip_tokens,
            timeout_seconds,
            needs_agreement=self._agreement is not None,
        )
        if self._is_waited_for:  # wait no longer than computing takes
            num_tokens = self._usable_blocks(match) * self._block_size - match.skip_tokens
            prefetch.end_within(self.planners.compute_seconds(num_tokens))
        self._num_prefetches += 1
        is_trial = self._is_waited_for and self._num_prefetches % _TRIAL_EVERY == 0
        asked = Asked(match, entries, prefetch, is_trial)
        if self._agreement is not None and match.state_matched_blocks >= self._usable_blocks(match):
            prefetch.agree(PrefetchState.NOTHING)  # all ranks return here
            return prefetch
        with self._cleaning_up():
            if self._ask(asked):
                prefetch.is_asking = True
            elif self._agreement is None:
                self._begin_prefetch(asked)
            else:
                prefetch.is_asking = True
                prefetch.answer()
        self._asked.append(asked)
        self.agree()
        return prefetch

    def agree(self) -> None:
        """Begin and end the prefetches that are ready on all ranks; each rank must call this.

        A prefetch begins when the stores of all ranks have answered, so that all ranks load up to
        the same boundary. A prefetch is done when it is done on all ranks.
        """
        waiting = [asked for asked in self._asked if not asked.is_agreed]
        if not waiting:
            return
        pending = STATES.index(PrefetchState.PENDING)
        own = [
            (0 if each.is_answered else pending) if each.is_asking else STATES.index(each.own_state)
            for each in (asked.prefetch for asked in waiting)
        ]
        for asked, state in zip(waiting, largest(own, self._agreement), strict=True):
            if state == pending:
                continue
            outcome = STATES[int(state)]
            if asked.prefetch.is_asking:
                with self._cleaning_up():
                    if self._begin_prefetch(asked):
                        continue
                outcome = PrefetchState.NOTHING
            asked.is_agreed = True
            asked.prefetch.agree(outcome)

    def _remove_below(self, key: EntryKey) -> None:
        for tier in self.lower_tiers:
            tier.remove(key)

    def _arriving_tokens(self, hashes: BlockHashes) -> int:
        """Return how many tokens of a prompt can be skipped once running prefetches are done."""
        reached = 0
        for asked in self._asked:
            prefetch = asked.prefetch
            # With several ranks, a failed prefetch is done only when all ranks know.
            is_alone = self._agreement is None
            if prefetch.has_failed if is_alone else prefetch.is_done:
                continue
            blocks = prefetch.skip_tokens // self._block_size
            if 0 < blocks <= len(hashes) and hashes.digests[blocks - 1] == asked.boundary:
                reached = max(reached, prefetch.skip_tokens)
        return reached

    def _poll_prefetches(self) -> None:
        """Forget finished prefetches, record their times, and begin those with an answer."""
        if self._agreement is None:
            self.agree()
        for asked in [each for each in self._asked if each.is_agreed and each.prefetch.is_over]:
            self._asked.remove(asked)
            prefetch = asked.prefetch
            if not prefetch.refusals and asked.planner is not None:
                asked.planner.record_load(prefetch.num_bytes, prefetch.seconds)
        for key in [key for key, flight in self._flights.items() if flight.is_over]:
            del self._flights[key]

    def _cancel_prefetches(self) -> None:
        if self._needs_cleanup:
            self._end_lower_work()
        for asked in self._asked:
            asked.prefetch.cancel()
            if not asked.is_agreed:
                asked.prefetch.agree(PrefetchState.CANCELLED)
        self._asked.clear()
        self._flights.clear()

    def _ask(self, asked: Asked) -> bool:
        """Ask the store for entries of a prefix; return False if no answer can help."""
        store, match = self.store, asked.match
        if store is None or not store.is_healthy:
            return False
        entries = self._entries_of(match)
        keys = [asked.entries.key(*each) for each in entries]
        places = zip(keys, self._places_of(keys), strict=True)
        unknown = [key for key, place in places if place is None]
        # At best the store has all unknown blocks, and one state is loaded.
        num_bytes = self._row_bytes[EntryKind.STATE] if unknown else 0
        num_bytes += sum(self._row_bytes[k.kind] for k in unknown if k.kind is EntryKind.KV)
        tokens = self._usable_blocks(match) * self._block_size
        loading = self.planners.compute_seconds(match.prompt_tokens - tokens)
        loading += self.planners.store.load_seconds(num_bytes)
        if not unknown or loading >= self._seconds_without(asked):
            return False
        return store.ask(unknown, lambda _: asked.prefetch.answer())

    def _begin_prefetch(self, asked: Asked) -> bool:
        """Begin the loads that serve a request best; return False if there are none."""
        prefetch, skip_tokens = asked.prefetch, asked.match.skip_tokens
        blocks, needed = self._plan(asked)
        if not blocks:
            prefetch.begin(skip_tokens, 0, 0)
            return False
        if self._is_waited_for:  # wait no longer than computing takes
            num_tokens = blocks * self._block_size - skip_tokens
            prefetch.end_within(self.planners.compute_seconds(num_tokens))
        reads = [
            self.host[facts.key.kind].read(facts) for facts, place in needed if place is self.host
        ]
        held = [lease for lease in reads if not isinstance(lease, Refusal)]
        loads = [
            (facts, place) for facts, place in needed if place and not isinstance(place, HostTier)
        ]
        places = {place for _, place in loads}
        # A load that was under way already says nothing about the tier's speed.
        is_alone = not any(facts.key in self._flights for facts, _ in loads)
        num_bytes = sum(facts.payload_bytes for facts, _ in loads)
        prefetch.begin(blocks * self._block_size, len(loads), num_bytes)
        for facts, tier in loads:
            self._begin_load(facts, prefetch, tier)
        self.host.use(held)
        for lease in held:
            lease.rows.release(lease)
        if is_alone and len(places) == 1:
            asked.planner = self.planners.store if self.store in places else self.planners.disk
        asked.boundary = asked.entries.hashes.digests[blocks - 1]
        return True

    def _plan(self, asked: Asked) -> tuple[int, list[tuple[EntryFacts, _Place]]]:
        """Choose the boundary to load up to, in blocks; 0 if loading nothing is best.

        Return the boundary, and the entries that it needs with their places, in loading order.
        """
        match = asked.match
        entries = [] if asked.prefetch.is_given_up else self._entries_of(match)
        if not entries and self._agreement is None:
            return 0, []
        keys = [asked.entries.key(*each) for each in entries]
        where = dict(zip(entries, self._places_of(keys), strict=True))
        planners: dict[_Place, LoadPlanner]
        planners = {self.disk: self.planners.disk, self.store: self.planners.store}
        blocks = self._best_boundary(
            match, lambda *each: where.get(each), planners, self._seconds_without(asked)
        )
        if blocks == match.state_matched_blocks:
            return 0, []
        *kv, state = self._needed(match.kv_matched_blocks, blocks)
        needed = [state, *kv]  # the state first: reading and verifying it takes longest
        return blocks, [(asked.entries.facts(*each), where[each]) for each in needed]

    def _usable_blocks(self, match: PrefixMatch) -> int:
        """Return the maximum number of blocks of a prompt that can be skipped."""
        return max(0, match.prompt_tokens - self._min_computed) // self._block_size

    def _entries_of(self, match: PrefixMatch) -> list[tuple[EntryKind, int]]:
        """Return the entries that let a request skip more: blocks not on the GPU, and states."""
        usable = self._usable_blocks(match)
        first = match.state_matched_blocks
        # A rank without healthy lower tiers still reports its host memory to the other ranks.
        is_of_use = self._agreement is not None or any(tier.is_healthy for tier in self.lower_tiers)
        if not is_of_use:
            return []
        on_gpu = min(match.kv_matched_blocks, usable) if self._has_kv else usable
        blocks = [(EntryKind.KV, index) for index in range(on_gpu, usable)]
        return blocks + [(EntryKind.STATE, index) for index in range(first, usable)]

    def _places_of(self, keys: Sequence[EntryKey]) -> list[_Place]:
        """Return the highest tier that has each entry; None if no tier has it."""
        places: list[_Place]
        places = [self.host if key.digest in self.host[key.kind] else None for key in keys]
        for tier in self.lower_tiers:
            for index, is_there in enumerate(tier.has_many(keys)):
                if is_there and places[index] is None:
                    places[index] = tier
        return places

    def _seconds_without(self, asked: Asked) -> float:
        """Return the time of a request that loads nothing; in a trial, almost infinite."""
        if asked.is_trial:
            return sys.float_info.max
        return self.planners.compute_seconds(asked.match.prompt_tokens - asked.match.skip_tokens)

    def _begin_load(self, facts: EntryFacts, prefetch: Prefetch, tier: LowerTier) -> None:
        """Begin to load one entry to host memory, or join its load that is under way."""
        flight = self._flights.get(facts.key)
        if flight is not None and flight.join(prefetch):
            return
        lease = self.host[facts.key.kind].reserve(facts, for_lower=True)
        if lease is None:
            prefetch.end_one(Refusal.ABORTED)  # no row is free, or a spill writes the entry now
            return
        flight = Flight(prefetch, partial(self.host.end_later, lease))
        self._flights[facts.key] = flight
        if not tier.load(facts, lease.rows.buffer(lease), flight.end):
            del self._flights[facts.key]
            lease.rows.release(lease, "queue_full")
            prefetch.end_one(Refusal.ABORTED)


class NoTiers:
    """Null object for a context without tiers: finds nothing and does nothing."""

    host = disk = store = None
    pins: Sequence[SlotLease] = ()

    def find(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Return the match unchanged."""
        return match

    def resume(self, sequence: CachedSequence, match: PrefixMatch) -> tuple[PrefixMatch, None]:
        """Return the match unchanged, and no load."""
        return match, None

    def prefetch(
        self,
        request_id: Hashable,
        match: PrefixMatch,
        entries: object,
        timeout_seconds: float | None,
    ) -> Prefetch:
        """Return a handle that is done."""
        return Prefetch(request_id, match.skip_tokens, timeout_seconds)

    def _no_items(self, *given: object) -> list[Any]:
        return []

    begin = verify = wants = _no_items

    def _no_op(self, *given: object) -> Any:
        pass

    abandon = agree = begin_forward = begin_request = cancel = check_invariants = _no_op
    close = end_step = entries = flush = offer_blocks = offer_state = offer_used = poll = _no_op
    pump = remove = reset = wait = _no_op

    def stats(self) -> tuple[TierStats, ...]:
        """Return no stats."""
        return ()


def make_tiering(
    config: CacheConfig,
    *,
    kv_blocks: KVBlockAllocator,
    slots: MambaSlotAllocator,
    kv_cache: torch.Tensor | None,
    planner: LoadPlanner | None,
    identity: CacheIdentity | None,
    agreement: RankAgreement | None = None,
) -> Tiering | NoTiers:
    """Create the tiers of a context that the settings ask for."""
    if planner is not None:
        check_kind("load_planner", planner, LoadPlanner)
    if not config.has_host_tier or not config.enable_prefix_caching:
        return NoTiers()
    if kv_cache is None:
        raise InvalidArgumentError(
            "a host tier needs kv_spec: it cannot spill keys and values that the embedder keeps"
        )
    tensors = {
        EntryKind.KV: [kv_cache.flatten(0, 1)] if kv_cache.numel() else [],
        EntryKind.STATE: list(slots.states.tensors.values()),
    }
    device = kv_cache.device
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"a host tier needs a CPU or a CUDA device, got {device}")
    return Tiering(
        config,
        tensors,
        device,
        kv_blocks,
        slots,
        identity=identity,
        planner=planner,
        agreement=agreement,
    )
