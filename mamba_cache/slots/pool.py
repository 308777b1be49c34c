"""Which slot belongs to which block: bookkeeping without tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import INT32_MAX, as_items, check_int
from mamba_cache._guard import CallGuard, guarded, query
from mamba_cache.errors import DoubleFreeError, InvalidArgumentError, MissingStateError
from mamba_cache.slots._hashes import StateHashes
from mamba_cache.slots._ids import as_block_ids, as_hash_ids, as_slots, check_same_length
from mamba_cache.slots._invariants import check_slot_pool
from mamba_cache.slots.lease import SlotLease, check_lease

__all__ = ["SlotPool"]


class SlotPool:
    """Books of ``max_slots`` slots over ``num_blocks`` KV blocks.

    A slot is free, reserved (taken for a block, but not yet written, so nobody can find it) or
    cached (the state of the block that ``slot_to_block`` names). A block has at most one slot, and
    a slot at most one block. A cached slot that is pinned is being read and is never evicted.

    Every method checks its arguments before it changes anything. The arrays may also be written
    by index from outside: no copy of what they say is kept. Single entries are read and written
    one by one, because for the few slots of a call that costs less than indexing with a list.

    Args:
        max_slots: Slots in the pool, 0 or more.
        num_blocks: KV blocks that can have a slot.
        block_hashes: Returns the hash ids of all blocks as the KV blocks' owner has them,
            [num_blocks] int64, -1 for none. When a block loses its slot, the hash found there is
            dropped as well as the one registered here.
        guard: That of the object which this is a part of; default: one of its own. When a call
            breaks off in the middle of a change, every later one raises ``PoisonedError`` until
            ``reset``.

    Attributes:
        free_slots: [max_slots] int32. A stack: the entries below ``free_count`` are free.
        free_count: Free slots.
        block_to_slot: [num_blocks] int32. The slot that caches each block, -1 for none.
        slot_to_block: [max_slots] int32. The block that each slot caches; -1 if it is free or
            reserved.
        pin_counts: [max_slots] int32. Readers of each cached slot.
        generations: [max_slots] int64. How often each slot was taken from a block.
        epoch: How often everything was reset: what was reserved in an earlier epoch is gone.
        reserved: Block for which each reserved slot was taken.
        hashes: Which hash finds which block's state, once the block has a slot.
        evicted_slots_total: Slots taken from cached blocks because others needed them.

    Raises:
        InvalidArgumentError: A count is not an int, or is out of range.
    """

    def __init__(
        self,
        max_slots: int,
        num_blocks: int,
        *,
        block_hashes: Callable[[], npt.NDArray[Any]] | None = None,
        guard: CallGuard | None = None,
    ) -> None:
        self.max_slots = check_int("max_slots", max_slots, minimum=0, maximum=INT32_MAX)
        self.num_blocks = check_int("num_blocks", num_blocks, minimum=0, maximum=INT32_MAX)
        self._block_hashes = block_hashes
        self._guard = guard or CallGuard(self.check_invariants, proves_changes=False)
        self.free_slots = np.empty(self.max_slots, np.int32)
        self.block_to_slot = np.empty(self.num_blocks, np.int32)
        self.slot_to_block = np.empty(self.max_slots, np.int32)
        self.pin_counts = np.empty(self.max_slots, np.int32)
        self.generations = np.zeros(self.max_slots, np.int64)
        self.epoch = 0
        self.reserved: dict[int, int] = {}
        self.hashes = StateHashes()
        self._clear()

    def join(self, guard: CallGuard) -> None:
        """Become a part of what ``guard`` guards: its books are proved together with these."""
        self._guard = guard

    @guarded(nests=True, renews=True)
    def reset(self) -> None:
        """Frees every slot and forgets every hash and lease; a new ``epoch`` begins."""
        self.generations += 1
        self.epoch += 1
        self._clear()

    def _clear(self) -> None:
        self.free_slots[:] = np.arange(self.max_slots)
        self.free_count = self.max_slots
        self.block_to_slot.fill(-1)
        self.slot_to_block.fill(-1)
        self.pin_counts.fill(0)
        self.reserved.clear()
        self.hashes.clear()
        self.evicted_slots_total = 0

    @property
    def hash_to_block_id(self) -> dict[int, int]:
        """Block whose state each hash id finds."""
        return self.hashes.block_of

    @property
    def num_reserved_slots(self) -> int:
        """Slots that are reserved."""
        return len(self.reserved)

    @property
    def num_cached_slots(self) -> int:
        """Slots that hold a findable state."""
        return int(np.count_nonzero(self.slot_to_block >= 0))

    @query
    def slots_of(self, block_ids: Iterable[int]) -> list[int]:
        """Returns the slot that caches each block, -1 where there is none.

        Raises:
            UnknownBlockError: An id is outside the pool.
        """
        return [self.block_to_slot.item(b) for b in as_block_ids(block_ids, self.num_blocks)]

    def evictable_slots(
        self, ref_counts: npt.NDArray[Any], protected_blocks: Sequence[int] = ()
    ) -> npt.NDArray[np.int64]:
        """Finds the cached slots that may be evicted now.

        Args:
            ref_counts: [num_blocks] int. Only blocks with the count 0 can lose their slot.
            protected_blocks: Blocks that keep their slots in any case.

        Returns:
            [evictable] int64, ascending: slots that are cached, not pinned and not protected.
        """
        blocks = self.slot_to_block
        evictable = blocks >= 0
        evictable &= self.pin_counts == 0
        # A slot without a block has -1 there and reads some block's count: it is out already.
        evictable &= ref_counts.take(blocks) == 0
        for slot in self.slots_of(protected_blocks):
            if slot >= 0:
                evictable[slot] = False
        return evictable.nonzero()[0]

    @guarded(nests=True)
    def store(self, block_ids: Sequence[int], victims: Sequence[int] = ()) -> list[int]:
        """Gives each block a cached slot.

        Args:
            block_ids: Different blocks without a slot.
            victims: Cached slots to evict for them, as many as the free slots fall short by.

        Returns:
            The slot of each block: free slots first, then the victims.

        Raises:
            UnknownBlockError: An id is outside the pool.
            InvalidArgumentError: A block has a slot or comes twice, or the victims are not as
                described, or one of them is pinned.
        """
        ids = self._new_tenants(block_ids)
        slots = self._take(len(ids), victims)
        for slot, block_id in zip(slots, ids, strict=True):
            self._house(slot, block_id)
        return slots

    @guarded(nests=True)
    def reserve(self, block_ids: Sequence[int], victims: Sequence[int] = ()) -> list[int]:
        """Reserves a slot for each block, which nobody can find until it is committed.

        Args:
            block_ids: Different blocks without a slot or a reservation.
            victims: As in ``store``.

        Returns:
            The reserved slot of each block.

        Raises:
            UnknownBlockError: An id is outside the pool.
            InvalidArgumentError: As in ``store``, or a block has a reservation.
        """
        ids = self._new_tenants(block_ids)
        twice = set(ids).intersection(self.reserved.values())
        if twice:
            raise InvalidArgumentError(f"blocks {sorted(twice)} have a reserved slot already")
        slots = self._take(len(ids), victims)
        self.reserved.update(zip(slots, ids, strict=True))
        return slots

    @guarded(nests=True)
    def commit(
        self, slots: Sequence[int], block_ids: Iterable[int], hashes: Iterable[int]
    ) -> list[int]:
        """Turns reserved slots into cached ones and makes them findable.

        A block that has a slot by now keeps it, and the reserved slot becomes free.

        Args:
            slots: Different reserved slots.
            block_ids: The block of each; it need not be the one that the slot was reserved for.
            hashes: The hash id of each block; one that is not positive is not registered.

        Returns:
            The slot that caches each block now.

        Raises:
            UnknownBlockError: A block id is outside the pool.
            InvalidArgumentError: The lists differ in length, a hash id is too large, or a slot is
                not reserved or comes twice.
        """
        ids = as_block_ids(block_ids, self.num_blocks)
        hash_ids = as_hash_ids(hashes)
        taken = self._check_reserved(slots, InvalidArgumentError)
        check_same_length(slots=taken, block_ids=ids, hashes=hash_ids)
        self._guard.is_changing = True
        for slot, block_id in zip(taken, ids, strict=True):
            del self.reserved[slot]
            if self.block_to_slot[block_id] >= 0:
                self._push([slot])
            else:
                self._house(slot, block_id)
        self.register_hashes(ids, hash_ids)
        return self.slots_of(ids)

    @guarded(nests=True)
    def cancel(self, slots: Sequence[int]) -> None:
        """Gives reserved slots back.

        Raises:
            InvalidArgumentError: A slot is outside the pool.
            DoubleFreeError: A slot is not reserved, or comes twice.
        """
        taken = self._check_reserved(slots, DoubleFreeError)
        self._guard.is_changing = True
        for slot in taken:
            del self.reserved[slot]
        self._push(taken)

    @guarded(nests=True)
    def evict(self, slots: Sequence[int]) -> None:
        """Takes cached slots from their blocks, and gives them to the caller.

        They are in none of the three states until the caller pushes them onto ``free_slots`` or
        enters them in ``block_to_slot`` and ``slot_to_block``.

        Raises:
            InvalidArgumentError: A slot is not cached, is pinned, or comes twice.
        """
        victims = as_slots(slots, self.max_slots)
        kept = [slot for slot in victims if self.slot_to_block[slot] < 0 or self.pin_counts[slot]]
        if kept or len(set(victims)) < len(victims):
            raise InvalidArgumentError(
                f"slots to evict must be different, cached and not pinned, got {victims}"
            )
        self._guard.is_changing = True
        self._vacate(victims)
        self.evicted_slots_total += len(victims)

    @guarded(nests=True)
    def free_blocks(self, block_ids: Iterable[int]) -> list[int]:
        """Frees the slots of blocks, pinned or not, and forgets the blocks' hashes.

        Blocks without a slot are passed over.

        Returns:
            The slots that became free.

        Raises:
            UnknownBlockError: An id is outside the pool; nothing was freed.
        """
        slots = [slot for slot in dict.fromkeys(self.slots_of(block_ids)) if slot >= 0]
        self._guard.is_changing = True
        self._vacate(slots)
        self._push(slots)
        return slots

    @guarded(nests=True)
    def register_hashes(self, block_ids: Iterable[int], hashes: Iterable[int]) -> None:
        """Makes the blocks' states findable by hash; one that is not positive is passed over.

        A block has one hash: an earlier one is forgotten. A hash finds one block: the last. A block
        may be registered before it has a slot: its hash finds nothing until then.

        Raises:
            UnknownBlockError: A block id is outside the pool.
            InvalidArgumentError: The lists differ in length, or a hash id is too large.
        """
        ids = as_block_ids(block_ids, self.num_blocks)
        hash_ids = as_hash_ids(hashes)
        check_same_length(block_ids=ids, hashes=hash_ids)
        self._guard.is_changing = True
        for block_id, hash_id in zip(ids, hash_ids, strict=True):
            if hash_id > 0:
                self.hashes.register(block_id, hash_id)

    @guarded(nests=True)
    def pin(self, slots: Sequence[int]) -> list[SlotLease]:
        """Keeps cached slots from being evicted until the leases are given to ``unpin``.

        The owner of a block can still free it. Then the lease is no longer current.

        Raises:
            InvalidArgumentError: A slot is outside the pool.
            MissingStateError: A slot is free or reserved, so it holds no state to read.
        """
        read = as_slots(slots, self.max_slots)
        empty = [slot for slot in read if self.slot_to_block[slot] < 0]
        if empty:
            raise MissingStateError(f"only cached slots can be pinned; {empty} hold no state")
        self._guard.is_changing = True
        for slot in read:
            self.pin_counts[slot] += 1
        return [
            SlotLease(slot, int(self.slot_to_block[slot]), int(self.generations[slot]))
            for slot in read
        ]

    @guarded(nests=True)
    def unpin(self, leases: Sequence[SlotLease]) -> None:
        """Ends leases. One whose slot was freed or reused meanwhile is passed over.

        Raises:
            DoubleFreeError: A lease was given back more often than it was taken.
            InvalidArgumentError: One is no lease, or its slot is outside the pool.
        """
        current = [x.slot for x in as_items("leases", leases, "leases") if self.is_current(x)]
        for slot in set(current):
            if current.count(slot) > self.pin_counts[slot]:
                raise DoubleFreeError(
                    f"slot {slot} has {self.pin_counts[slot]} pins, "
                    f"but {current.count(slot)} were given back"
                )
        self._guard.is_changing = True
        for slot in current:
            self.pin_counts[slot] -= 1

    @query
    def is_current(self, lease: SlotLease) -> bool:
        """Says whether the lease's slot still holds what it held when it was pinned.

        Raises:
            InvalidArgumentError: It is no lease, or its slot is outside the pool.
        """
        check_lease(lease)
        [slot] = as_slots([lease.slot], self.max_slots)
        return bool(
            self.slot_to_block[slot] == lease.block_id
            and self.generations[slot] == lease.generation
        )

    @query
    def is_pinned(self, slot: int) -> bool:
        """Says whether a cached slot has a reader.

        Raises:
            InvalidArgumentError: The slot is outside the pool.
        """
        [slot] = as_slots([slot], self.max_slots)
        return bool(self.slot_to_block[slot] >= 0 and self.pin_counts[slot])

    def check_invariants(self) -> None:
        """Checks the books against themselves.

        Raises:
            InvariantError: They contradict each other; the message says where.
        """
        check_slot_pool(self)

    def _new_tenants(self, block_ids: Sequence[int]) -> list[int]:
        ids = as_block_ids(block_ids, self.num_blocks)
        if len(set(ids)) < len(ids):
            raise InvalidArgumentError(f"blocks must be different, got {ids}")
        housed = [
            block_id for block_id, slot in zip(ids, self.slots_of(ids), strict=True) if slot >= 0
        ]
        if housed:
            raise InvalidArgumentError(f"blocks {housed} have a slot already")
        return ids

    def _take(self, num_slots: int, victims: Sequence[int]) -> list[int]:
        """Takes slots off the free stack and, if it is empty then, from the victims' blocks."""
        short = max(num_slots - self.free_count, 0)
        victims = as_slots(victims, self.max_slots)
        if len(victims) != short:
            raise InvalidArgumentError(
                f"{num_slots} slots are needed and {self.free_count} are free, so there must be "
                f"{short} victims, got {len(victims)}"
            )
        if victims:
            self.evict(victims)
        self._guard.is_changing = True
        start = self.free_count - (num_slots - short)
        slots: list[int] = self.free_slots[start : self.free_count].tolist()
        slots.extend(victims)
        self.free_count = start
        return slots

    def _house(self, slot: int, block_id: int) -> None:
        self.block_to_slot[block_id] = slot
        self.slot_to_block[slot] = block_id

    def _push(self, slots: Sequence[int]) -> None:
        end = self.free_count + len(slots)
        self.free_slots[self.free_count : end] = slots
        self.free_count = end

    def _vacate(self, slots: list[int]) -> None:
        """Ends the cached slots' tie to their blocks, and the blocks' hashes with it.

        All traces of the tenancy go now, since an embedder may give the slots away by index.
        """
        known = self._block_hashes() if self._block_hashes else None
        for slot in slots:
            block_id = self.slot_to_block.item(slot)
            self.slot_to_block[slot] = -1
            self.block_to_slot[block_id] = -1
            self.pin_counts[slot] = 0
            self.generations[slot] += 1
            self.hashes.forget_block(block_id)
            if known is not None:
                self.hashes.unlink(block_id, known.item(block_id))

    def _check_reserved(self, slots: Sequence[int], error: type[InvalidArgumentError]) -> list[int]:
        taken = as_slots(slots, self.max_slots)
        if not self.reserved.keys() >= set(taken) or len(set(taken)) < len(taken):
            raise error(f"slots must be different and reserved, got {taken}")
        return taken
