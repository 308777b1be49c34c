"""Tiers below the GPU: what is spilled to host memory, and what requests resume from there."""

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
"""Entries whose copies to the host tier may be under way at once."""

_PATIENCE_SECONDS: Final = 5.0
"""How long a call that breaks off waits for what lower tiers were handed."""

_TRY_EVERY: Final = 16
"""One of so many prefetches that a caller waits for loads even if that is slower than computing:
otherwise a tier that was slow once is never measured again."""

_ASSUMED: Final = Rates(), Rates(2e9, 1e-3), Rates(1e9, 2e-3)
"""Of host memory, a disk and a store, until they are measured."""

_UNMEASURED: Final = Rates(bytes_per_second=1e18, latency_seconds=0.0, tokens_per_second=1e-6)
"""With these, each load is tried until it is measured."""


@dataclass(slots=True, eq=False)
class _Offer:
    """An entry on the GPU that is to be spilled."""

    place: int  # its slot, or its KV block
    facts: EntryFacts
    generation: int  # which of the entries of its place it is
    proposal: StateProposal | None = None
    pin: SlotLease | None = None  # keeps its slot from eviction while it is copied
    lease: RowLease | None = None  # the row that it is copied to, once it has one


_Spill: TypeAlias = "tuple[Ticket, list[_Offer]]"


_Place: TypeAlias = "HostTier | LowerTier | None"
"""Where an entry lies."""


class Tiering:
    """Spills what becomes findable on the GPU, and loads what requests can resume from.

    A spill needs no lease on the GPU: when its copy is over, it counts only if neither the slot nor
    the block was given up in the meantime. So no allocation ever waits for a copy, nor fails
    because of one.

    Where the host tier's policy knows prompts, it takes part in what is saved: a state that is
    worth a row but no slot gets a slot all the same (``wants``), and is the first to leave it. Its
    slot is pinned until the copy is over, as long as half of all slots are not.

    A load goes into blocks and a slot that the request holds anyway, as if it were to compute them.
    They become findable when its step is committed, like what it has computed, and only if every
    byte was verified by then.

    Over several ranks each has tiers of its own, and what lies in them differs. So where a request
    resumes and what became of its load is decided by all ranks together, and nothing else here
    changes what is on the GPU: the host tier's policy takes no part in what is saved, and pins
    nothing, because what is worth a row and when a copy ends differs too.
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
        # One that is told of requests; a caller that waits for its copies tells of none.
        knows_prompts = isinstance(slots.policy, AdaptiveSlotPolicy) and not is_waited_for
        policy = AdaptiveSlotPolicy() if knows_prompts else None
        self.host, self.transfers = make_host_tier(config, tensors, device, policy)
        assumed = (_UNMEASURED,) * 3 if is_waited_for else _ASSUMED
        of_host, of_disk, of_store = (LoadPlanner(rates) for rates in assumed)
        self.planners = Planners(planner or of_host, of_disk, of_store)
        self.disk, self.store = open_lower_tiers(config, identity, self.host)
        # A caller that waits for its copies has no others under way.
        self._max_copies = sys.maxsize if is_waited_for else _MAX_COPIES
        self._row_bytes = {kind: self.host[kind].memory.row_bytes for kind in EntryKind}
        self._keeps_kv = self._has_kv and bool(self.host[EntryKind.KV].memory.num_rows)
        self._most_pins = slots.max_slots // 2
        self._is_waited_for, self._num_prefetches = is_waited_for, 0
        self._asked: list[Asked] = []  # in the order in which all ranks have begun them
        self._flights: dict[EntryKey, Flight] = {}
        self._has_broken_off = False
        # What a disk takes at once passes the host tier's rows, worth one or not, as it does slots.
        self._passes_all = bool(self.lower_tiers) and config.write_on_use == 1
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
        """Take what entries are of from now on; None: of this object alone."""
        self._identity = os.urandom(32) if identity is None else identity.digest
        self._rank = 0 if identity is None else identity.rank

    @property
    def lower_tiers(self) -> list[LowerTier]:
        """Those below host memory, from the top down."""
        return [tier for tier in (self.disk, self.store) if tier is not None]

    @property
    def num_offers(self) -> int:
        """Entries that were offered and are not copied yet."""
        return len(self._offers)

    def find(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Return a match with what tiers have by now, and with what is on the way."""
        self.poll()  # what has arrived from below counts
        match = self.extend(match, hashes)
        return replace(match, arriving_tokens=self._arriving_tokens(hashes))

    def extend(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Return a match with what the host tier has, if it is quicker to resume from there.

        Ranks agree on it, unless the GPU has as much of the prompt as can be skipped.
        """
        first, digest = match.state_matched_blocks, hashes.digest

        def place_of(kind: EntryKind, index: int) -> _Place:
            return self.host if digest(index) in self.host[kind] else None

        seconds = self.planners.compute_seconds(match.prompt_tokens - match.skip_tokens)
        blocks = self._soonest(match, place_of, {self.host: self.planners.host}, seconds)
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

    def _soonest(
        self,
        match: PrefixMatch,
        place_of: Callable[[EntryKind, int], _Place],
        planners: Mapping[_Place, LoadPlanner],
        seconds: float,
    ) -> int:
        """Return the boundary, in blocks, from which a request goes on soonest.

        Where it is already it takes ``seconds``. Beyond, it needs the state and all blocks before
        it, from where ``place_of`` says that each lies; loads from ``planners``' places count.
        """
        first, usable = match.state_matched_blocks, self._usable_blocks(match)
        if first >= usable:
            return first
        on_gpu = min(match.kv_matched_blocks, usable) if self._has_kv else usable
        most_blocks = self.host[EntryKind.KV].memory.num_rows  # that are there at once
        # Ranks compare boundary by boundary, so each says something of all that there could be.
        takes = [seconds] + [math.inf] * (usable - first)
        of_blocks: Counter[_Place] = Counter()  # bytes of the blocks before a boundary
        for index in range(min(first, on_gpu), usable):
            if index >= on_gpu:
                place = place_of(EntryKind.KV, index)
                if place is None or index - on_gpu >= most_blocks:
                    break
                of_blocks[place] += self._row_bytes[EntryKind.KV]
            place = None if index < first else place_of(EntryKind.STATE, index)
            if place is None:
                continue
            num_bytes = of_blocks + Counter({place: self._row_bytes[EntryKind.STATE]})
            loads = [planners[each].load_seconds(num_bytes[each]) for each in planners]
            # Of several ranks, others may have to bring what this one has.
            if any(loads) or self._agreement is not None:
                num_tokens = match.prompt_tokens - (index + 1) * self._block_size
                takes[index - first + 1] = self.planners.compute_seconds(num_tokens) + sum(loads)
        return first + quickest(takes, self._agreement)

    def resume(
        self, sequence: CachedSequence, match: PrefixMatch
    ) -> tuple[PrefixMatch, PlannedLoad | None]:
        """Find where a sequence resumes, and keep the rows if it is by loading."""
        self.poll()
        refused: PrefixMatch | None = None
        while (extended := self.extend(match, sequence.hashes)).loads_state:
            assert extended != refused, "what was refused is not found again"
            # Before anything is evicted for it: what raises later must have changed nothing.
            index, blocks = extended.state_matched_blocks - 1, match.block_ids
            block = blocks[index] if index < len(blocks) else None
            if not self._slots.can_reserve(block, blocks):
                break
            load = self._read(sequence, extended)
            if load is not None:
                return extended, load
            refused = extended  # an entry was damaged, and is not found again
        return match, None

    def _read(self, sequence: CachedSequence, match: PrefixMatch) -> PlannedLoad | None:
        """Keep the rows that a match resumes from; None if one of them is not there."""
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
        """Return what a request resumes from that has the blocks before ``first``, state last."""
        kv = range(first, blocks) if self._has_kv else ()
        return [*((EntryKind.KV, index) for index in kv), (EntryKind.STATE, blocks - 1)]

    def _on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Say of each of some facts whether it holds on this rank or another one."""
        return [value > 0 for value in largest([float(flag) for flag in flags], self._agreement)]

    def begin_request(self, facts: PromptFacts) -> object:
        """Tell the host tier's policy of a prompt, if it knows prompts."""
        return self.host[EntryKind.STATE].begin_request(facts)

    def remove(self, kind: EntryKind, cache_salt: ExtraKey, digest: bytes) -> None:
        """Have an entry that is known to be wrong not found again, in any tier."""
        tenant = self._tenant(cache_salt)
        self._remove_below(EntryKey(self._identity, tenant, kind, digest, self._rank))
        self.host.poll()  # what lower tiers have brought by now counts
        self.host[kind].remove(digest)

    def cancel(self, load: PlannedLoad) -> None:
        """Give back the rows of a load that will not be used, once nothing reads them."""
        leases, load.leases = load.leases, []
        if load.ticket is None:
            for lease in leases:
                lease.rows.release(lease)
        elif leases:
            self._retiring.append((load.ticket, leases))

    def begin(self, requests: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """Enqueue the loads of a step."""
        loading = [active for active in requests if active.current_chunk.load is not None]
        is_begun = not loading or self.load([active.current_load for active in loading])
        return [] if is_begun else loading

    def load(self, loads: Sequence[PlannedLoad]) -> bool:
        """Enqueue copies of rows to the blocks and the slot of each load; say whether they are.

        If they are not, on this rank or another one, the rows are given back.
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
            # Some may be under way: nothing that they write or read may change hands.
            self.transfers.wait()
            self.host.refused["copy_failed"] += len(jobs)
        for load in loads:
            load.ticket = ticket
        [is_given_up] = self._on_any_rank([ticket is None])
        if is_given_up:
            self.transfers.wait()
            for load in loads:
                self.cancel(load)
        return not is_given_up

    def begin_forward(self, num_tokens: int) -> None:
        """Begin to measure how long prompts take."""
        self._begun = (self.transfers.mark(), num_tokens) if num_tokens else None

    def end_forward(self) -> None:
        """End it, for everything of the forward is enqueued."""
        if self._begun is not None:
            begun, num_tokens = self._begun
            self._timed.append((begun, self.transfers.mark(), num_tokens))
            self._begun = None

    def end_step(self) -> None:
        """Begin to spill what became findable."""
        self.end_forward()
        self.pump()

    def verify(self, requests: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """Find the requests of a step whose loads brought other bytes than were written.

        A step's tokens are known to the host only when its loads are long over; so nothing is
        waited for here but where ``commit_step`` is given tokens that the device alone knows.
        """
        loading = [active for active in requests if active.current_chunk.load is not None]
        self.end_loads([active.current_load for active in loading])
        return [active for active in loading if active.current_load.is_damaged]

    def end_loads(self, loads: Sequence[PlannedLoad]) -> None:
        """Wait for loads, find out on all ranks whether they are damaged, and end them."""
        # Else a call that broke off has found out, and on all ranks.
        unknown = [load for load in loads if load.is_damaged is None]
        if unknown:
            bad = [self._damaged_rows(load) for load in unknown]
            verdicts = self._on_any_rank([bool(rows) for rows in bad])
            for load, rows, is_damaged in zip(unknown, bad, verdicts, strict=True):
                self._end_load(load, rows, is_damaged=is_damaged)

    def _damaged_rows(self, load: PlannedLoad) -> set[int]:
        """Wait for a load, and return which of its rows brought other bytes than were written."""
        assert load.ticket is not None, "it was enqueued when the step began"
        load.ticket.wait()
        first, last = load.first_job, load.first_job + len(load.leases)
        return {index - first for index in load.ticket.damaged() if first <= index < last}

    def _end_load(self, load: PlannedLoad, bad: set[int], *, is_damaged: bool) -> None:
        """Give the rows of a load back that is over."""
        assert load.ticket is not None, "it was enqueued when the step began"
        load.is_damaged = is_damaged
        if not is_damaged:
            self.host.use(load.leases)
            self.host.restored_total += len(load.leases)
        self.planners.host.record_load(load.ticket.num_bytes, load.ticket.seconds())
        leases, load.leases = load.leases, []
        for index, lease in enumerate(leases):
            if index in bad:
                lease.rows.refuse(lease, Refusal.PAYLOAD_DIGEST)
                self._remove_below(lease.facts.key)  # it may have been stored like this
            else:
                lease.rows.release(lease)

    @property
    def _takes_offers(self) -> bool:
        """Whether what is published now can be found by others."""
        return True

    def offer_blocks(
        self,
        sequence: CachedSequence,
        first: int,
        blocks: Sequence[int],
        holders: Sequence[int | None],
    ) -> None:
        """Offer blocks of a sequence that became findable."""
        if not (self._keeps_kv and self._takes_offers):
            return
        hashes, known = sequence.hashes, self.host[EntryKind.KV]
        entries = self._entries(sequence)
        for index, (block, holder) in enumerate(zip(blocks, holders, strict=True), first):
            if block == holder and hashes.digest(index) not in known:
                self.offer_entry(block, entries.facts(EntryKind.KV, index))

    def wants(self, sequence: CachedSequence, proposals: Sequence[StateProposal]) -> list[bool]:
        """Say which states of a request are worth a row of a tier, and have none in host memory.

        Over several ranks none is: they would not say the same.
        """
        if self._agreement is not None:
            return [False] * len(proposals)
        if self._passes_all:
            worth = [True] * len(proposals)
        else:
            own = [each._replace(prompt=sequence.prompt_seen_below) for each in proposals]
            worth = self.host[EntryKind.STATE].would_admit(own)
        hashes = sequence.hashes
        return [
            is_worth
            and not (
                each.hash_ids is None
                and hashes.digest(each.num_blocks - 1) in self.host[EntryKind.STATE]
            )
            for is_worth, each in zip(worth, proposals, strict=True)
        ]

    def offer_state(
        self, sequence: CachedSequence, position: int, slot: int, proposal: StateProposal | None
    ) -> None:
        """Offer a state of a sequence that became findable."""
        index = position // self._block_size - 1
        digest = sequence.hashes.digest(index)
        if self._takes_offers and digest not in self.host[EntryKind.STATE]:
            if proposal is not None:
                proposal = proposal._replace(
                    prompt=sequence.prompt_seen_below,
                    is_asked=proposal.is_asked or self._passes_all,
                )
            facts = self._entries(sequence).facts(EntryKind.STATE, index)
            self.offer_entry(slot, facts, proposal)

    def offer_entry(
        self, place: int, facts: EntryFacts, proposal: StateProposal | None = None
    ) -> None:
        """Offer what a slot or a KV block holds, which is findable."""
        generation = self._generations[facts.key.kind].item(place)
        self._offers.append(_Offer(place, facts, generation, proposal))

    def pump(self) -> None:
        """End the copies that are over, and begin those of what was offered. It does not wait."""
        self.poll()
        if not self._offers:
            return
        room = self._max_copies - sum(len(offers) for _, offers in self._spills)
        jobs: list[CopyJob] = []
        taken: list[_Offer] = []
        for offer in self._offers:
            if not self._is_there(offer):
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
            may_pin = self._agreement is None and len(self.pins) < self._most_pins
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
        """End the copies that are over, and what lower tiers have ended. It does not wait."""
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
        """Learn from the forwards that have ended."""
        while self._timed:
            begun, ended, num_tokens = self._timed[0]
            seconds = self.transfers.seconds_between(begun, ended)
            if seconds is None:
                return
            self.planners.host.record_prefill(num_tokens, seconds)
            del self._timed[0]

    def wait(self) -> None:
        """Wait until all copies are over and all memory is there, and take both over."""
        self.transfers.wait()
        self.host.wait_for_memory()
        self.poll()

    def reset(self) -> None:
        """Forget all entries, offers and copies; waits until these are over."""
        self._end_all()
        self.host.reset()

    def let_go(self) -> None:
        """Take back all that a call held which broke off, and entries if it was changing them."""
        self._end_all()
        try:
            self.host.poll()
            is_idle = not any(self.host.leases.values())
        except MambaCacheError:  # a change of its bookkeeping broke off
            is_idle = False
        if not is_idle:
            self.host.reset()

    def _end_all(self) -> None:
        """Forget all offers and copies, once these are over."""
        self.transfers.wait()
        self._offers, self._spills, self._retiring = [], [], []
        self._begun, self._timed = None, []
        self._cancel_prefetches()

    def stats(self) -> tuple[TierStats, ...]:
        """Return what each tier holds and did, from the top down."""
        return (self.host.stats(), *(tier.stats() for tier in self.lower_tiers))

    def flush(self) -> None:
        """Wait until lower tiers have ended what they were given, and end it here too."""
        for tier in self.lower_tiers:
            tier.flush()
        self.poll()

    def close(self) -> None:
        """End the lower tiers, once they have done what they were given."""
        self.flush()
        for tier in self.lower_tiers:
            tier.close()

    def abandon(self) -> None:
        """End the lower tiers of a context that is gone, and what somebody may still wait for."""
        for tier in self.lower_tiers:
            tier.close()
        self._cancel_prefetches()

    def check_invariants(self, loads: Iterable[PlannedLoad] = ()) -> None:
        """Prove that rows are held for what is planned and under way alone, and tiers agree."""
        self.host.check_invariants()
        for tier in self.lower_tiers:
            tier.check_invariants()
        held = [lease for load in loads for lease in load.leases]
        held += [lease for _, leases in self._retiring for lease in leases]
        held += [o.lease for _, offers in self._spills for o in offers if o.lease is not None]
        for kind, leases in self.host.leases.items():
            if {each for each in held if each.facts.key.kind is kind} != set(leases):
                raise InvariantError(f"rows of {kind} are held for nobody")

    def _entries(self, sequence: CachedSequence) -> PromptEntries:
        return self.entries(sequence.hashes, sequence.request.cache_salt)

    def entries(self, hashes: BlockHashes, cache_salt: ExtraKey) -> PromptEntries:
        """Return what derives the entries of a prompt."""
        tenant = self._tenant(cache_salt)
        return PromptEntries(
            hashes, self._identity, tenant, self._rank, self._block_size, self._row_bytes
        )

    def _tenant(self, cache_salt: ExtraKey) -> bytes:
        return tenant_digest(self._secret, cache_salt)

    def _is_there(self, offer: _Offer) -> bool:
        """Say whether an entry is still where it was when it was offered."""
        return self._generations[offer.facts.key.kind].item(offer.place) == offer.generation

    def _end_spill(self, offer: _Offer, failure: str | None = None) -> None:
        """End a copy that is over; it counts only if what it read was there all the time."""
        assert offer.lease is not None, "it has a row since it was begun"
        pin, offer.pin = offer.pin, None
        if pin is not None:
            self._slots.unpin(pin)
        if failure is None and not self._is_there(offer):
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
        """What keeps slots from eviction that copies read."""
        return [o.pin for _, offers in self._spills for o in offers if o.pin is not None]

    def _on_removed(self, event: Removed) -> None:
        """Have spills of removed blocks not count."""
        if (self._offers or self._spills) and event.kind == "block":
            self._generations[EntryKind.KV][[*event.block_ids]] += 1

    # What lies on disk and in a store.

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
        if all(tier.flush(_PATIENCE_SECONDS) for tier in self.lower_tiers):
            try:
                self.host.end_lower()
            except MambaCacheError:  # a change of its bookkeeping broke off
                self.transfers.wait()
                self.host.reset()
                self.host.end_lower()
            for flight in self._flights.values():
                if not flight.is_over:
                    flight.end(Refusal.ABORTED)
            self._flights.clear()
            self._has_broken_off = False

    def offer_below(self, facts: EntryFacts) -> None:
        """Offer an entry of the host tier to be stored; whether it is, a lower tier decides."""
        with self._taking_back():
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
        """Offer to lower tiers what a request resumes from, if the host tier has it."""
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
        """Begin to bring what lets a request skip the most, if that is quicker than computing."""
        if not self.lower_tiers:
            return Prefetch(request_id, match.skip_tokens, timeout_seconds)
        prefetch = Prefetch(
            request_id,
            match.skip_tokens,
            timeout_seconds,
            needs_agreement=self._agreement is not None,
        )
        if self._is_waited_for:  # no longer than computing what could be skipped takes
            num_tokens = self._usable_blocks(match) * self._block_size - match.skip_tokens
            prefetch.end_within(self.planners.compute_seconds(num_tokens))
        self._num_prefetches += 1
        is_trial = self._is_waited_for and self._num_prefetches % _TRY_EVERY == 0
        asked = Asked(match, entries, prefetch, is_trial)
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
        self._asked.append(asked)
        self.agree()
        return prefetch

    def agree(self) -> None:
        """Begin and end what all ranks can: all of them call it alike.

        A prefetch begins when the stores of all ranks have answered, so that all bring the same
        boundary, and is done when it is on all.
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
                with self._taking_back():
                    if self._begin(asked):
                        continue
                outcome = PrefetchState.NOTHING
            asked.is_agreed = True
            asked.prefetch.agree(outcome)

    def _remove_below(self, key: EntryKey) -> None:
        for tier in self.lower_tiers:
            tier.remove(key)

    def _arriving_tokens(self, hashes: BlockHashes) -> int:
        """Say how many tokens of a prompt can be skipped once what is under way has arrived."""
        reached = 0
        for asked in self._asked:
            prefetch = asked.prefetch
            # What has failed on one of several ranks is over when all of them know.
            is_alone = self._agreement is None
            if prefetch.has_failed if is_alone else prefetch.is_done:
                continue
            blocks = prefetch.skip_tokens // self._block_size
            if 0 < blocks <= len(hashes) and hashes.digest(blocks - 1) == asked.boundary:
                reached = max(reached, prefetch.skip_tokens)
        return reached

    def _poll_prefetches(self) -> None:
        """Forget what is over, learn from it, and go on where a store has answered."""
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
        if self._has_broken_off:
            self._take_back()
        for asked in self._asked:
            asked.prefetch.cancel()
            if not asked.is_agreed:
                asked.prefetch.agree(PrefetchState.CANCELLED)
        self._asked.clear()
        self._flights.clear()

    def _ask(self, asked: Asked) -> bool:
        """Ask the store what it has of a prefix; False if there is nothing to ask or to gain."""
        store, match = self.store, asked.match
        if store is None or not store.is_healthy:
            return False
        entries = self._entries_of(match)
        keys = [asked.entries.key(*each) for each in entries]
        places = zip(keys, self._places_of(keys), strict=True)
        unknown = [key for key, place in places if place is None]
        # At best all blocks come from there, and one state.
        num_bytes = self._row_bytes[EntryKind.STATE] if unknown else 0
        num_bytes += sum(self._row_bytes[k.kind] for k in unknown if k.kind is EntryKind.KV)
        tokens = self._usable_blocks(match) * self._block_size
        loading = self.planners.compute_seconds(match.prompt_tokens - tokens)
        loading += self.planners.store.load_seconds(num_bytes)
        if not unknown or loading >= self._seconds_without(asked):
            return False
        return store.ask(unknown, lambda _: asked.prefetch.answer())

    def _begin(self, asked: Asked) -> bool:
        """Begin to bring what is best for a request; False if nothing is."""
        prefetch, skip_tokens = asked.prefetch, asked.match.skip_tokens
        blocks, needed = self._plan(asked)
        if not blocks:
            prefetch.begin(skip_tokens, 0, 0)
            return False
        if self._is_waited_for:  # no longer than computing it takes
            num_tokens = blocks * self._block_size - skip_tokens
            prefetch.end_within(self.planners.compute_seconds(num_tokens))
        read = [
            self.host[facts.key.kind].read(facts) for facts, place in needed if place is self.host
        ]
        held = [lease for lease in read if not isinstance(lease, Refusal)]
        wanted = [
            (facts, place) for facts, place in needed if place and not isinstance(place, HostTier)
        ]
        places = {place for _, place in wanted}
        # What is under way already is there sooner, and teaches nobody what it takes.
        is_alone = not any(facts.key in self._flights for facts, _ in wanted)
        num_bytes = sum(facts.payload_bytes for facts, _ in wanted)
        prefetch.begin(blocks * self._block_size, len(wanted), num_bytes)
        for facts, tier in wanted:
            self._bring(facts, prefetch, tier)
        self.host.use(held)
        for lease in held:
            lease.rows.release(lease)
        if is_alone and len(places) == 1:
            asked.planner = self.planners.store if self.store in places else self.planners.disk
        asked.boundary = asked.entries.hashes.digest(blocks - 1)
        return True

    def _plan(self, asked: Asked) -> tuple[int, list[tuple[EntryFacts, _Place]]]:
        """Choose how many blocks to bring; 0 if it is best to bring nothing.

        With them come the entries that are needed for it, in the order of the prefix, and where
        they lie.
        """
        match = asked.match
        entries = [] if asked.prefetch.is_given_up else self._entries_of(match)
        if not entries and self._agreement is None:
            return 0, []
        keys = [asked.entries.key(*each) for each in entries]
        where = dict(zip(entries, self._places_of(keys), strict=True))
        planners: dict[_Place, LoadPlanner]
        planners = {self.disk: self.planners.disk, self.store: self.planners.store}
        blocks = self._soonest(
            match, lambda *each: where.get(each), planners, self._seconds_without(asked)
        )
        if blocks == match.state_matched_blocks:
            return 0, []
        *kv, state = self._needed(match.kv_matched_blocks, blocks)
        needed = [state, *kv]  # the state first: it takes longest to read and verify
        return blocks, [(asked.entries.facts(*each), where[each]) for each in needed]

    def _usable_blocks(self, match: PrefixMatch) -> int:
        """Return how many blocks of a prompt can be skipped at most."""
        return max(0, match.prompt_tokens - self._min_computed) // self._block_size

    def _entries_of(self, match: PrefixMatch) -> list[tuple[EntryKind, int]]:
        """Return what could let a request skip more: blocks that are not there, and states."""
        usable = self._usable_blocks(match)
        first = match.state_matched_blocks
        # Of several ranks one that can bring nothing still says what it has in host memory.
        is_of_use = self._agreement is not None or any(tier.is_healthy for tier in self.lower_tiers)
        if not is_of_use:
            return []
        on_gpu = min(match.kv_matched_blocks, usable) if self._has_kv else usable
        blocks = [(EntryKind.KV, index) for index in range(on_gpu, usable)]
        return blocks + [(EntryKind.STATE, index) for index in range(first, usable)]

    def _places_of(self, keys: Sequence[EntryKey]) -> list[_Place]:
        """Say of each entry where it lies, the highest place first; None: nowhere."""
        places: list[_Place]
        places = [self.host if key.digest in self.host[key.kind] else None for key in keys]
        for tier in self.lower_tiers:
            for index, is_there in enumerate(tier.has_many(keys)):
                if is_there and places[index] is None:
                    places[index] = tier
        return places

    def _seconds_without(self, asked: Asked) -> float:
        """Return how long a request takes if nothing is brought; almost forever in a trial."""
        if asked.is_trial:
            return sys.float_info.max
        return self.planners.compute_seconds(asked.match.prompt_tokens - asked.match.skip_tokens)

    def _bring(self, facts: EntryFacts, prefetch: Prefetch, tier: LowerTier) -> None:
        """Begin to bring one entry."""
        flight = self._flights.get(facts.key)
        if flight is not None and flight.join(prefetch):
            return
        lease = self.host[facts.key.kind].reserve(facts, for_lower=True)
        if lease is None:
            prefetch.end_one(Refusal.ABORTED)  # there is no row, or a spill brings it just now
            return
        flight = Flight(prefetch, partial(self.host.end_later, lease))
        self._flights[facts.key] = flight
        if not tier.load(facts, lease.rows.buffer(lease), flight.end):
            del self._flights[facts.key]
            lease.rows.release(lease, "queue_full")
            prefetch.end_one(Refusal.ABORTED)


class NoTiers:
    """What a context without tiers has in their place: it finds nothing, and does nothing."""

    host = disk = store = None
    pins: Sequence[SlotLease] = ()

    def find(self, match: PrefixMatch, hashes: BlockHashes) -> PrefixMatch:
        """Return a match as it is."""
        return match

    def resume(self, sequence: CachedSequence, match: PrefixMatch) -> tuple[PrefixMatch, None]:
        """Resume where the GPU has the state."""
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

    def _nobody(self, *given: object) -> list[Any]:
        return []

    begin = verify = wants = _nobody

    def _nothing(self, *given: object) -> Any:
        pass

    abandon = agree = begin_forward = begin_request = cancel = check_invariants = _nothing
    close = end_step = entries = flush = offer_blocks = offer_state = offer_used = poll = _nothing
    pump = remove = reset = wait = _nothing

    def stats(self) -> tuple[TierStats, ...]:
        """Return none."""
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
    """Make the tiers of a context that the settings ask for."""
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
