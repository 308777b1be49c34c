"""The pool of slots: the slot of each block, reservations, pins, and eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import INT32_MAX, as_ids, as_ints, check_int, check_room, require_all
from mamba_cache._guard import CallGuard, guarded, outside, query
from mamba_cache.cache.kv_block_allocator import KVBlockAllocator
from mamba_cache.cache.policies import (
    LruSlotPolicy,
    PrefixSlotPolicy,
    SlotEvictionPolicy,
    StateProposal,
    as_host_array,
    check_policy,
)
from mamba_cache.cache.rows import Rows, as_rows
from mamba_cache.errors import (
    DoubleFreeError,
    InvalidArgumentError,
    UnknownBlockError,
)
from mamba_cache.events import Listeners, Removed, Stored
from mamba_cache.protocols import KVBlockView

__all__ = ["SlotLease", "SlotPool", "check_same_length"]

_BYTES_PER_SLOT = 20
"""Size of the tables' items for one slot."""

_NO_SLOTS: npt.NDArray[np.intp] = np.empty(0, np.intp)
_ZERO = np.int32(0)  # comparing the arrays with Python's 0 takes three times as long


class SlotLease(NamedTuple):
    """A reference to the state that a slot held when the lease was made.

    Attributes:
        slot: The slot.
        block_id: The block whose state the slot held.
        generation: The slot's number in ``generations`` at that time.
    """

    slot: int
    block_id: int
    generation: int


class SlotPool:
    """Slots over KV blocks: decisions only, no tensors of states.

    A slot is *free*, *reserved* (for a block, not yet written, not findable) or *cached* (it holds
    the state of its block in ``slot_to_block``). A block has at most one slot, and a slot at most
    one block. A pinned slot has readers and is never evicted.

    Every method checks its arguments before it changes anything. An embedder may also write
    ``free_slots``, ``block_to_slot``, ``slot_to_block`` and ``free_count`` itself: the pool keeps
    no copy of them.

    After an exception of another package during a change, every call raises ``PoisonedError`` until
    ``reset``, which is the context's ``reset`` if the slots belong to a context.

    Args:
        max_slots: Number of slots for saved states, >= 0.
        kv_blocks: The owner of the KV blocks. Its arrays are read anew at each call.
        policy: Decides which slots are evicted. Default: ``LruSlotPolicy``.
        evicts_held: Whether a slot may be evicted while requests hold its block. True is for owners
            that copy a state as soon as it is found.
        as_tensor: Converts the three public tables, such as ``torch.from_numpy``. The result must
            share their memory.

    Attributes:
        max_slots: As given.
        num_blocks: Number of KV blocks that can have a slot.
        kv_blocks: As given.
        policy: As given.
        prompt_policy: The same policy if it uses prompts (``PrefixSlotPolicy``); else None.
        free_slots: [max_slots] int32, CPU. A stack: entries below ``free_count`` are free.
        block_to_slot: [num_blocks] int32, CPU. The slot that caches each block, -1 for none.
        slot_to_block: [max_slots] int32, CPU. The block that each slot caches, -1 for none.
        pin_counts: [max_slots] int32. References to each slot: 1 for a reserved slot, the number of
            readers for a cached slot.
        generations: [max_slots] int64. A number for each slot that changes when the slot loses its
            state.
        reserved: The block that each reserved slot is reserved for.
        evicted_slots_total: Number of states evicted to make room.
        refused_states_total: Number of states not saved because the policy rated others higher.
        skipped_checkpoints_total: Number of states not saved for want of a slot. The context adds
            checkpoints that did not fit into a step.
        pin_references: [num_blocks] number of references to each block that hold its keys and
            values only, and do not keep its slot from eviction; None: there are none.
        before_reset: Called first by ``reset``, which a writer of reserved slots can refuse by
            raising; or None.

    Raises:
        InvalidArgumentError: ``max_slots`` or the number of KV blocks is not an int or out of
            range, or ``policy`` is no policy.
        BudgetError: The machine's memory does not hold the tables.
    """

    def __init__(
        self,
        max_slots: int,
        kv_blocks: KVBlockView,
        *,
        policy: SlotEvictionPolicy | None = None,
        evicts_held: bool = False,
        as_tensor: Callable[[Any], Any] | None = None,
    ) -> None:
        self.max_slots = check_int("max_slots", max_slots, minimum=0, maximum=INT32_MAX)
        check_room(_BYTES_PER_SLOT * self.max_slots, {"max_slots": max_slots})
        # Older versions of Megatron Core call it ``total_count``.
        size = getattr(kv_blocks, "pool_size", getattr(kv_blocks, "total_count", None))
        self.num_blocks = check_int("the number of KV blocks", size, minimum=0, maximum=INT32_MAX)
        self.kv_blocks = kv_blocks
        self.policy = LruSlotPolicy() if policy is None else check_policy(policy)
        self.prompt_policy = self.policy if isinstance(self.policy, PrefixSlotPolicy) else None
        self.before_reset: Callable[[], object] | None = None
        self.pin_references: npt.NDArray[np.int32] | None = None
        self._index = kv_blocks if isinstance(kv_blocks, KVBlockAllocator) else None
        self._no_listeners = Listeners()
        self._evicts_held = evicts_held
        self._guard = CallGuard(self)
        self._block_to_slot = np.empty(self.num_blocks, np.int32)
        self._slot_to_block = np.empty(self.max_slots, np.int32)
        # Single elements are read and written several times faster through memoryviews.
        self._slot_at, self._block_at = self._block_to_slot.data, self._slot_to_block.data
        self._rows = Rows("slot", self.max_slots, self._slot_to_block)
        as_tensor = as_tensor or (lambda array: array)
        self.free_slots = as_tensor(self._rows.free)
        self.block_to_slot = as_tensor(self._block_to_slot)
        self.slot_to_block = as_tensor(self._slot_to_block)
        self.pin_counts = self._rows.refs
        self.generations = np.zeros(self.max_slots, np.int64)
        self.reserved: dict[int, int] = {}
        self._last_generation = 0
        self._clear()
        if self._index is not None:
            self._index.attach_slots(self)

    def join(self, guard: CallGuard) -> None:
        """Use ``guard``, which the slots then share with other objects."""
        self._guard = guard

    def _clear(self) -> None:
        self._rows.clear()
        self._block_to_slot.fill(-1)
        self._slot_to_block.fill(-1)
        self.reserved.clear()
        self.evicted_slots_total = 0
        self.refused_states_total = 0
        self.skipped_checkpoints_total = 0
        self.policy.reset(self.max_slots)

    @property
    def listeners(self) -> Listeners:
        """Listeners of the ``KVBlockAllocator``, which also get events of states.

        Over KV blocks of another class there are no events.
        """
        return self._no_listeners if self._index is None else self._index.listeners

    @property
    def free_count(self) -> int:
        """Number of free slots: the height of the stack ``free_slots``."""
        return self._rows.num_free

    @free_count.setter
    def free_count(self, value: int) -> None:
        self._rows.num_free = value

    @property
    def num_cached_slots(self) -> int:
        """Number of slots that hold a state."""
        return int(np.count_nonzero(self._slot_to_block >= 0))

    @property
    def num_reserved_slots(self) -> int:
        """Number of slots reserved for states that are not written yet."""
        return len(self.reserved)

    @query
    def get_slot(self, block_id: int) -> int:
        """Return the slot that caches a block's state, or -1.

        Raises:
            UnknownBlockError: The id is outside the KV pool.
        """
        [block_id] = self._block_ids([block_id])
        return self._slot_at[block_id]

    def has_state(self, block_id: int) -> bool:
        """Return whether a block's state is cached.

        Raises:
            UnknownBlockError: The id is outside the KV pool.
        """
        return self.get_slot(block_id) >= 0

    @guarded(nests=True)
    def reserve_slots(self, block_ids: Iterable[int]) -> list[int | None]:
        """Reserve a slot for each block, to be written and then committed or cancelled.

        Blocks are served in order while slots are free or evictable. The remaining blocks are
        counted in ``skipped_checkpoints_total``. Slots of the given blocks are not evicted.

        Args:
            block_ids: The blocks.

        Returns:
            For each block its reserved slot; or None, if the block has a slot or a reservation
            already, or no slot was left.

        Raises:
            UnknownBlockError: An id is outside the KV pool; nothing was reserved.
        """
        return self.reserve(self._block_ids(block_ids), None)

    def reserve(
        self, block_ids: Sequence[int], proposals: Sequence[StateProposal] | None
    ) -> list[int | None]:
        """Do what ``reserve_slots`` does, for a context that holds the guard.

        With ``proposals``, one for each block, a policy that uses prompts may refuse states, which
        are counted in ``refused_states_total``.
        """
        slot_at, awaited = self._slot_at, {*self.reserved.values()}
        requested: dict[int, Any] = {
            block_id: proposal
            for block_id, proposal in zip(block_ids, proposals or block_ids, strict=True)
            if slot_at[block_id] < 0 and block_id not in awaited
        }
        if not requested:
            return [None] * len(block_ids)
        policy = self.prompt_policy if proposals is not None else None
        if policy is not None:
            new, victims = self._admit(policy, requested, block_ids)
        else:
            new, num_short = [*requested], len(requested) - self._rows.num_free
            victims = self._choose_victims(num_short, protected=block_ids)
        kept = new[: self._rows.num_free + len(victims)]
        try:
            taken = self._take(len(kept), victims)
        except BaseException:
            if policy is not None:
                policy.withdraw()
            raise
        without_room = len(new) - len(kept)
        self.skipped_checkpoints_total += without_room
        self.reserved.update(zip(taken, kept, strict=True))
        if policy is not None:
            policy.on_reserved([*taken, *[None] * without_room])
        slots = dict(zip(kept, taken, strict=True))
        return [slots.pop(block_id, None) for block_id in block_ids]

    def _admit(
        self,
        policy: PrefixSlotPolicy,
        proposals: Mapping[int, StateProposal],
        protected: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Return the blocks that the policy admits, and the slots to evict for them."""
        self._guard.is_changing = True
        num_free = self._rows.num_free
        is_short = len(proposals) > num_free
        evictable = self._evictable(protected) if is_short else _NO_SLOTS
        accepted, victims = policy.admit([*proposals.values()], num_free, evictable)
        admitted = [block for block, is_in in zip(proposals, accepted, strict=True) if is_in]
        num_refused = len(proposals) - len(admitted)
        if is_short and not len(evictable):
            self.skipped_checkpoints_total += num_refused
        else:
            self.refused_states_total += num_refused
        return admitted, self._as_victims(victims)

    @guarded(nests=True)
    def commit_reserved(self, slots: Sequence[int], block_ids: Iterable[int]) -> list[int]:
        """Make reserved slots findable, after the work that writes them has been enqueued.

        Args:
            slots: Reserved slots.
            block_ids: The block of each slot; may differ from the block that the slot was reserved
                for. If a block has a slot by now, the reserved slot becomes free.

        Returns:
            The slot that caches each block now: the reserved slot, or the slot that it had before.

        Raises:
            UnknownBlockError: A block id is outside the KV pool.
            InvalidArgumentError: The lists differ in length, or a slot is not reserved or comes
                twice. Nothing was committed.
        """
        ids = self._block_ids(block_ids)
        taken = self._check_reserved(slots, InvalidArgumentError)
        check_same_length(slots=taken, block_ids=ids)
        self._guard.is_changing = True
        kept = self.commit(taken, ids, [1] * len(taken))
        self.listeners.tell()
        return kept

    def commit(
        self, slots: Sequence[int], block_ids: Sequence[int], prefix_tokens: Sequence[int]
    ) -> list[int]:
        """Do what ``commit_reserved`` does, but only queue the events.

        For a context that holds the guard. ``prefix_tokens`` is the number of tokens of each
        state's prefix.
        """
        stored: list[int] = []
        lengths: list[int] = []
        kept: list[int] = []
        for slot, block_id, tokens in zip(slots, block_ids, prefix_tokens, strict=True):
            del self.reserved[slot]
            self._rows.ref_at[slot] = 0
            if self._slot_at[block_id] >= 0:
                self._rows.push([slot])
                self._release([slot])
            else:
                self._slot_at[block_id], self._block_at[slot] = slot, block_id
                stored.append(slot)
                lengths.append(tokens)
            kept.append(self._slot_at[block_id])
        if not stored:
            return kept
        if self.prompt_policy is not None:
            index = self._index
            hashes = index.hash_at if index else as_host_array(self.kv_blocks.block_hashes).data
            hash_ids = [hashes[self._block_at[slot]] for slot in stored]
            self.prompt_policy.on_published(stored, hash_ids, lengths)
        else:
            self.policy.on_stored(stored)
        self._put(Stored, stored)
        return kept

    @guarded(nests=True)
    def cancel_reserved(self, slots: Sequence[int]) -> None:
        """Free reserved slots, as when a step is aborted.

        Args:
            slots: Reserved slots.

        Raises:
            InvalidArgumentError: A slot is outside the pool.
            DoubleFreeError: A slot is not reserved, or comes twice. Nothing was freed.
        """
        taken = self._check_reserved(slots, DoubleFreeError)
        self._guard.is_changing = True
        self.cancel(taken)

    def cancel(self, slots: Sequence[int]) -> None:
        """Do what ``cancel_reserved`` does, for a context that holds the guard."""
        for slot in slots:
            del self.reserved[slot]
            self._rows.ref_at[slot] = 0
        self._rows.push(slots)
        self._release(slots)

    def _release(self, slots: Sequence[int]) -> None:
        """Notify a policy that uses prompts of slots that are free now."""
        if self.prompt_policy is not None:
            self.prompt_policy.on_removed(slots)

    @guarded(nests=True)
    def invalidate_block(self, block_id: int) -> None:
        """Free a block's slot and forget its registered hash id; do nothing without a slot.

        Raises:
            UnknownBlockError: The id is outside the KV pool.
        """
        self._invalidate_blocks_batch([block_id])

    @guarded(nests=True)
    def _invalidate_blocks_batch(self, block_ids: Iterable[int]) -> None:
        ids = self._block_ids(block_ids)
        self._guard.is_changing = True
        self.free_states(ids)
        self.listeners.tell()

    def free_states(self, block_ids: Iterable[int]) -> None:
        """Free the slots of blocks, pinned or not; ignore blocks without a slot.

        ``KVBlockAllocator`` calls this when it deregisters blocks, and notifies the listeners.
        """
        slots = [slot for slot in dict.fromkeys(self._slots_of(block_ids)) if slot >= 0]
        if slots:
            self._unassign(slots)
            self._rows.push(slots)

    @guarded(nests=True, renews=True)
    def reset(self) -> None:
        """Free every slot, reserved and pinned ones too; reset policy, counters, registered hashes.

        In a context the call raises ``StepOrderError`` while a step is in flight or a request has
        reserved slots: a forward would write into slots that are reserved again.
        """
        if self.before_reset is not None:
            self.before_reset()
        with self._guard.ending(self.listeners, renews=True):
            self._reset()

    def _reset(self) -> None:
        self._last_generation += 1
        self.generations.fill(self._last_generation)
        gone = np.flatnonzero(self._slot_to_block >= 0)
        blocks: list[int] = self._slot_to_block[gone].tolist()
        self._put(Removed, gone.tolist(), is_reset=True)
        self._clear()
        if self._index is not None:
            self._index.offer_for_eviction(blocks)

    def check_uses(self, reserved: Collection[int], leases: Iterable[SlotLease]) -> None:
        """Check that exactly the given slots are reserved and leased, and that no state is stale.

        A state is stale if its block has no hash: other tokens may be written to that block next.
        For callers that register the hashes of ``kv_blocks``; linear in slots.

        Raises:
            InvariantError: The check failed; the message names the slots or blocks.
        """
        hashes = as_host_array(self.kv_blocks.block_hashes)
        stale = [block for block in self._slot_to_block.tolist() if block >= 0 > hashes[block]]
        read = Counter(lease.slot for lease in leases if self.is_current(lease))
        held = self.pin_counts.nonzero()[0].tolist()
        pinned = {s: self.pin_counts.item(s) for s in held if s not in self.reserved}
        statements = {
            f"blocks {stale[:8]} hold what they held when their states were saved": not stale,
            f"slots {sorted(self.reserved)} are reserved, and planned for {sorted(reserved)}": (
                sorted(reserved) == sorted(self.reserved)
            ),
            f"slots {[*pinned]} are pinned, and read {sorted(read)}": read == pinned,
        }
        require_all(statements)

    def check_invariants(self) -> None:
        """Check that all bookkeeping agrees.

        Raises:
            InvariantError: Two records contradict each other; the message names them.
        """
        cached = np.flatnonzero(self._slot_to_block >= 0)
        num_blocks = int(np.count_nonzero(self._block_to_slot >= 0))
        held = np.flatnonzero((self._slot_to_block < 0) & (self.pin_counts != 0)).tolist()
        statements = {
            "slot_to_block and block_to_slot agree": np.array_equal(
                self._block_to_slot[self._slot_to_block[cached]], cached
            ),
            f"{num_blocks} blocks have {len(cached)} cached slots": num_blocks == len(cached),
            "no block awaits the states of two slots": (
                len(set(self.reserved.values())) == len(self.reserved)
            ),
            "slots without a state have one reference for each that is reserved": (
                held == sorted(self.reserved) and bool((self.pin_counts[held] == 1).all())
            ),
        }
        require_all(statements | self._rows.statements())
        if self.prompt_policy is not None:
            self.prompt_policy.check_invariants([*cached.tolist(), *self.reserved])

    # The methods below check nothing: callers have checked arguments and set is_changing.

    def slot_of(self, block_id: int) -> int:
        """Return the slot that caches a block's state, or -1."""
        return self._slot_at[block_id]

    def pin(self, slot: int) -> SlotLease:
        """Keep a cached slot from eviction, as between matching a state and restoring it.

        ``invalidate_block`` frees pinned slots too: check ``is_current`` before reading.
        """
        self._rows.ref_at[slot] += 1
        return self.lease_of(slot)

    def unpin(self, lease: SlotLease) -> None:
        """End a lease; ignore a lease whose state is gone.

        Raises:
            DoubleFreeError: The slot is not pinned: the lease was ended before.
        """
        if self.is_current(lease):
            if not self._rows.ref_at[lease.slot]:
                raise DoubleFreeError(f"slot {lease.slot} is not pinned")
            self._rows.ref_at[lease.slot] -= 1

    def lease_of(self, slot: int) -> SlotLease:
        """Return a lease of a slot's present state, without pinning the slot."""
        return SlotLease(slot, self._block_at[slot], self.generations.item(slot))

    def is_current(self, lease: SlotLease) -> bool:
        """Return whether a lease's slot still holds the same state."""
        slot, block_id, generation = lease
        is_same = self._block_at[slot] == block_id and self.generations.item(slot) == generation
        return block_id >= 0 and is_same

    def free_unread(self, leases: Iterable[SlotLease]) -> None:
        """Free the states of leases, except states that are gone or pinned."""
        refs = self._rows.ref_at
        slots = [x.slot for x in leases if self.is_current(x) and not refs[x.slot]]
        if slots:
            self._unassign(slots)
            self._rows.push(slots)

    def free_cheapest(self, leaves_of: Callable[[npt.NDArray[Any]], list[int]]) -> int | None:
        """Free the evictable state of least worth per KV block that its loss frees.

        ``leaves_of`` returns the evictable blocks of [n] blocks. Return the block of the freed
        state; None if no evictable block has a state.
        """
        assert self.prompt_policy is not None
        blocks = leaves_of(self._slot_to_block[self._slot_to_block >= _ZERO])
        if not blocks:
            return None
        slots = self._block_to_slot[as_rows(blocks)].astype(np.int64)
        block_id = blocks[self.prompt_policy.least_loss(slots)]
        self.free_states([block_id])
        return block_id

    def num_blocks_to_state(self, block_ids: Sequence[int]) -> int:
        """Return the number of consecutive blocks up to the last one with a state, included."""
        slot_at, count = self._slot_at, len(block_ids)
        while count and slot_at[block_ids[count - 1]] < 0:
            count -= 1
        return count

    def can_reserve(self, block_id: int | None, kept: Sequence[int]) -> bool:
        """Return whether ``reserve_slots`` would give a block a slot, without asking the policy.

        ``block_id`` None is a block still to be allocated. ``kept`` are blocks that will be held by
        then: their states are not evictable.
        """
        is_awaited = block_id in self.reserved.values()
        if is_awaited or (block_id is not None and self.slot_of(block_id) >= 0):
            return False
        return self.free_count > 0 or len(self._evictable(kept)) > 0

    def _block_ids(self, block_ids: Iterable[Any]) -> list[int]:
        return as_ids("block ids", block_ids, self.num_blocks, error=UnknownBlockError)

    def _slots_of(self, block_ids: Iterable[int]) -> list[int]:
        slot_at = self._slot_at
        return [slot_at[block_id] for block_id in block_ids]

    def _check_reserved(self, slots: Sequence[int], error: type[InvalidArgumentError]) -> list[int]:
        taken = as_ids("slots", slots, self.max_slots)
        if not self.reserved.keys() >= set(taken) or len(set(taken)) < len(taken):
            raise error(f"slots must be different and reserved, got {taken}")
        return taken

    def _choose_victims(
        self, num_slots: int, *, protected: Sequence[int] = (), candidates: Any = None
    ) -> list[int]:
        """Return up to ``num_slots`` evictable slots that the policy chooses."""
        if num_slots <= 0:
            return []
        blocks = self._slot_to_block
        slots = self._evictable(protected)
        if candidates is not None:
            slots = slots[np.isin(blocks[slots], as_ints("candidates", candidates))]
        with outside:
            chosen = self.policy.choose(num_slots, slots, blocks[slots], self.kv_blocks)
        return self._as_victims(chosen)

    def _as_victims(self, chosen: Iterable[Any]) -> list[int]:
        """Return the slots that a policy chose as ints; a caller's policy may return an array."""
        return as_ints(f"the slots that {type(self.policy).__name__} chose", chosen)

    def _evictable(self, protected: Sequence[int]) -> npt.NDArray[np.intp]:
        """Return the slots that are cached, not in use, and of no protected block, ascending."""
        blocks: npt.NDArray[np.int32] = self._slot_to_block
        readers: npt.NDArray[Any] = self.pin_counts
        if not self._evicts_held:
            # A slot without a block reads the last block's count here, but is excluded below.
            references = as_host_array(self.kv_blocks.block_ref_counts).take(blocks)
            if self.pin_references is not None:
                references -= self.pin_references.take(blocks)
            readers = references + readers
        evictable: npt.NDArray[np.bool_] = (readers == _ZERO) & (blocks >= _ZERO)
        for slot in self._slots_of(protected):
            if slot >= 0:
                evictable[slot] = False
        return evictable.nonzero()[0]

    def _take(self, num_slots: int, victims: Sequence[int], num_references: int = 1) -> list[int]:
        """Take slots from the free stack, after evicting the victims if it has too few."""
        short = max(num_slots - self._rows.num_free, 0)
        if victims or short:
            # No slot leaks if a listener raises: the victims are free, and none was taken.
            self._rows.push(self._evict(victims, short))
            self.listeners.tell()
        self._guard.is_changing = True
        taken: list[int] = self._rows.take(num_slots, num_references).tolist()
        return taken

    def _evict(self, victims: Sequence[int], num_needed: int) -> list[int]:
        """Check the slots that a policy chose, and take them from their blocks."""
        slots = as_ids("slots", victims, self.max_slots)
        kept = [slot for slot in slots if self._block_at[slot] < 0 or self.pin_counts.item(slot)]
        if kept or len(set(slots)) < len(slots) or len(slots) != num_needed:
            raise InvalidArgumentError(
                "slots to evict must be different, cached and not pinned, "
                f"{num_needed} of them, got {slots}"
            )
        self._guard.is_changing = True
        self._unassign(slots)
        self.evicted_slots_total += len(slots)
        return slots

    def _unassign(self, slots: Sequence[int]) -> None:
        """Separate cached slots from their blocks, in all tables.

        No table may lag behind: an embedder may reuse the slots by index.
        """
        self._put(Removed, slots)
        blocks = [self._block_at[slot] for slot in slots]
        for slot, block_id in zip(slots, blocks, strict=True):
            self._slot_at[block_id] = self._block_at[slot] = -1
            self._rows.ref_at[slot] = 0
            self._last_generation += 1
            self.generations[slot] = self._last_generation
        self._release(slots)
        if self._index is not None:
            self._index.offer_for_eviction(blocks)

    def _put(self, kind: type[Stored | Removed], slots: Sequence[int], **options: Any) -> None:
        """Queue an event for the states of registered blocks."""
        if self._index is None or not self._index.listeners.wants(kind):
            return
        blocks = [self._block_at[slot] for slot in slots]
        found = zip(blocks, self._index._digests[blocks].tolist(), slots, strict=True)
        kept = [each for each in found if each[1] is not None]
        if kept or options:
            block_ids, digests, cached = zip(*kept, strict=True) if kept else ((), (), ())
            self.listeners.put(kind("state", block_ids, digests, cached, **options))


def check_same_length(**lists: list[int]) -> None:
    """Check that lists are equally long."""
    if len({*map(len, lists.values())}) > 1:
        lengths = {name: len(values) for name, values in lists.items()}
        raise InvalidArgumentError(f"these must be equally long: {lengths}")
