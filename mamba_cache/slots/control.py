"""Who has which slot: the decisions, without the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import INT32_MAX, as_ints, as_items, check_int
from mamba_cache._guard import CallGuard, guarded, query
from mamba_cache.errors import InvalidArgumentError, MambaCacheError, MambaSlotCapacityError
from mamba_cache.protocols import SlotContext
from mamba_cache.slots._context import as_host_array, num_kv_blocks
from mamba_cache.slots._ids import as_block_ids, as_hash_ids, as_slots, check_same_length
from mamba_cache.slots.fingerprint import slot_fingerprint
from mamba_cache.slots.lease import SlotLease
from mamba_cache.slots.policies import (
    SlotEvictionPolicy,
    check_policy,
    hand_over,
    policy_named,
)
from mamba_cache.slots.pool import SlotPool

__all__ = ["SlotControl", "block_hashes"]


class SlotControl:
    """Gives slots to blocks, evicting by a policy, and takes them back.

    It joins ``pool`` (who has which slot) and ``policy`` (who gives one up) to the KV blocks of the
    context, whose arrays it reads as they are at each call.

    Args:
        context: What embeds this; of it only ``kv_block_allocator`` and the eviction policy's name
            are read here.
        max_slots: Slots for saved states, 0 or more.
        policy: Which slots are evicted; default: what ``prefix_caching_eviction_policy`` names,
            "lru" if the context has none.

    Attributes:
        context: As given.
        max_slots: As given.
        pool: The books.
        policy: Who chooses now; ``change_policy`` puts another in its place.
        skipped_checkpoints_total: States not saved because no slot could be had.
        before_reset: What ``reset`` calls first, so that whoever is writing into reserved slots can
            refuse by raising. None: nobody is asked.

    Raises:
        InvalidArgumentError: ``max_slots`` is out of range, or there is no such policy.
    """

    def __init__(
        self, context: SlotContext, max_slots: int, *, policy: SlotEvictionPolicy | None = None
    ) -> None:
        kv_blocks = context.kv_block_allocator
        self._guard = CallGuard(self.check_invariants, proves_changes=False)
        self.context = context
        self.pool = SlotPool(
            max_slots,
            num_kv_blocks(kv_blocks),
            block_hashes=partial(block_hashes, context)
            if hasattr(kv_blocks, "block_hashes")
            else None,
            guard=self._guard,
        )
        self.max_slots = self.pool.max_slots
        name = getattr(context, "prefix_caching_eviction_policy", "lru")
        self.policy = policy_named(name) if policy is None else check_policy(policy)
        self.policy.reset(self.max_slots)
        self.skipped_checkpoints_total = 0
        self.before_reset: Callable[[], object] | None = None

    def join(self, guard: CallGuard) -> None:
        """Become a part of what ``guard`` guards: its books are proved together with these."""
        self._guard = guard
        self.pool.join(guard)

    @property
    def free_count(self) -> int:
        """Free slots: the height of the stack in ``free_slots``."""
        return self.pool.free_count

    @free_count.setter
    def free_count(self, count: int) -> None:
        self.pool.free_count = int(count)

    @property
    def hash_to_block_id(self) -> dict[int, int]:
        """The block whose state each hash id finds."""
        return self.pool.hash_to_block_id

    @property
    def num_cached_slots(self) -> int:
        """Slots that hold a state which can be restored."""
        return self.pool.num_cached_slots

    @property
    def num_reserved_slots(self) -> int:
        """Slots taken for states that are not written yet."""
        return self.pool.num_reserved_slots

    @property
    def epoch(self) -> int:
        """How often this was reset. Who reserves slots notes it, to be told of a reset."""
        return self.pool.epoch

    @property
    def evicted_slots_total(self) -> int:
        """Slots taken from cached blocks because others needed them."""
        return self.pool.evicted_slots_total

    @query
    def get_slot(self, block_id: int) -> int:
        """Returns the slot that caches a block's state, or -1.

        Raises:
            UnknownBlockError: The id is outside the KV pool.
        """
        return self.pool.slots_of([block_id])[0]

    def has_state(self, block_id: int) -> bool:
        """Says whether a block's state is cached.

        Raises:
            UnknownBlockError: The id is outside the KV pool.
        """
        return self.get_slot(block_id) >= 0

    @guarded(nests=True)
    def allocate_slots_batch(self, block_ids: Iterable[int]) -> list[int]:
        """Gives each block a slot: its own if it has one, else a free one, else an evicted one.

        The blocks count as cached at once, so write their states before anybody reads them.

        Returns:
            The slot of each block, in order; a block that is named twice has one slot.

        Raises:
            UnknownBlockError: An id is outside the KV pool.
            MambaSlotCapacityError: Free and evictable slots do not do; nothing has changed. Slots
                of the blocks named here are not evictable.
        """
        ids = as_block_ids(block_ids, self.pool.num_blocks)
        slots = dict(zip(ids, self.pool.slots_of(ids), strict=True))
        new = [block_id for block_id, slot in slots.items() if slot < 0]
        short = len(new) - self.free_count
        victims = self._choose_victims(short, protected=ids)
        if short > len(victims):
            raise MambaSlotCapacityError(len(new), self.free_count + len(victims))
        slots.update(zip(new, self.pool.store(new, victims), strict=True))
        self.policy.on_stored([slots[block_id] for block_id in new], [1] * len(new))
        return [slots[block_id] for block_id in ids]

    @guarded(nests=True)
    def reserve_slots(self, block_ids: Iterable[int]) -> list[int | None]:
        """Reserves a slot for each block, to be written and then committed or cancelled.

        Blocks are served in order while there are free or evictable slots; those left over are
        counted in ``skipped_checkpoints_total``.

        Returns:
            For each block its reserved slot, or None: it has a slot or a reservation already, or
            there was no room. Slots of the blocks named here are not evicted.

        Raises:
            UnknownBlockError: An id is outside the KV pool; nothing was reserved.
        """
        ids = as_block_ids(block_ids, self.pool.num_blocks)
        pending = set(self.pool.reserved.values())
        housed = dict(zip(ids, self.pool.slots_of(ids), strict=True))
        new = [b for b, slot in housed.items() if slot < 0 and b not in pending]
        victims = self._choose_victims(len(new) - self.free_count, protected=ids)
        kept = new[: self.free_count + len(victims)]
        self.skipped_checkpoints_total += len(new) - len(kept)
        slots = dict(zip(kept, self.pool.reserve(kept, victims), strict=True))
        return [slots.pop(block_id, None) for block_id in ids]

    @guarded(nests=True)
    def commit_reserved(
        self,
        slots: Sequence[int],
        block_ids: Iterable[int],
        hashes: Iterable[int],
        *,
        saved_tokens: Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> list[int]:
        """Makes reserved slots findable, after the work that writes them has been enqueued.

        Args:
            slots: Reserved slots.
            block_ids: The block of each, which need not be the one that it was reserved for. If
                that block has a slot by now, the reserved one becomes free.
            hashes: The hash id of each block; one that is not positive is not registered.
            saved_tokens: For each, the tokens that its state saves beyond the state before it in
                the same prefix, for policies that ask. None: nobody knows, so all are alike.
            epoch: The ``epoch`` in which the slots were reserved. If a reset has ended it, they
                are another's by now, and nothing is committed. None: the current one.

        Returns:
            The slot that caches each block now: the reserved one, or the one that it had; -1 if it
            has none after a reset.

        Raises:
            UnknownBlockError: A block id is outside the KV pool.
            InvalidArgumentError: The lists differ in length, a number of tokens is no int from 0
                to 2**31 - 1, or a slot is not reserved or comes twice. Nothing was committed.
        """
        if self._is_over(epoch):
            return self.pool.slots_of(block_ids)
        slots = as_slots(slots, self.max_slots)
        saved = [1] * len(slots)
        if saved_tokens is not None:
            given = as_items("saved_tokens", saved_tokens, "ints")
            bounds = {"minimum": 0, "maximum": INT32_MAX}
            saved = [check_int("saved_tokens", number, **bounds) for number in given]
            check_same_length(slots=slots, saved_tokens=saved)
        housing = self.pool.commit(slots, block_ids, hashes)
        kept = [i for i, (new, slot) in enumerate(zip(slots, housing, strict=True)) if new == slot]
        self.policy.on_stored([slots[i] for i in kept], [saved[i] for i in kept])
        return housing

    @guarded(nests=True)
    def cancel_reserved(self, slots: Sequence[int], *, epoch: int | None = None) -> None:
        """Gives reserved slots back, as when a step is aborted.

        Args:
            slots: Reserved slots.
            epoch: The ``epoch`` in which they were reserved. If a reset has ended it, nothing is
                left to give back. None: the current one.

        Raises:
            InvalidArgumentError: A slot is outside the pool.
            DoubleFreeError: A slot is not reserved, or comes twice. Nothing was given back.
        """
        if not self._is_over(epoch):
            self.pool.cancel(slots)

    @guarded(nests=True)
    def pin_slots(self, slots: Sequence[int]) -> list[SlotLease]:
        """Keeps cached slots from eviction, as between matching a state and restoring it.

        Returns:
            A lease for each, to be given to ``unpin_slots``. ``is_current`` tells whether the
            state is still there: ``invalidate_block`` frees pinned slots too.

        Raises:
            InvalidArgumentError: A slot is outside the pool.
            MissingStateError: A slot is not cached. Nothing was pinned.
        """
        return self.pool.pin(slots)

    @guarded(nests=True)
    def unpin_slots(self, leases: Sequence[SlotLease]) -> None:
        """Ends leases; one whose state is gone is passed over.

        Raises:
            DoubleFreeError: A lease was given back more often than it was taken.
            InvalidArgumentError: A lease's slot is outside the pool.
        """
        self.pool.unpin(leases)

    @query
    def is_current(self, lease: SlotLease) -> bool:
        """Says whether a lease's slot still holds the state that was pinned.

        Raises:
            InvalidArgumentError: The slot is outside the pool.
        """
        return self.pool.is_current(lease)

    @query
    def is_pinned(self, slot: int) -> bool:
        """Says whether a cached slot is being read.

        Raises:
            InvalidArgumentError: The slot is outside the pool.
        """
        return self.pool.is_pinned(slot)

    @guarded(nests=True)
    def note_consumed(self, slots: Sequence[int]) -> None:
        """Tells the policy that the states in these slots were used by a hit.

        Raises:
            InvalidArgumentError: A slot is outside the pool.
        """
        self.policy.on_consumed(as_slots(slots, self.max_slots))

    @guarded(nests=True)
    def change_policy(self, policy: SlotEvictionPolicy) -> None:
        """Has another policy choose which slots are evicted from now on; no slot changes hands.

        It forgets what it knew and hears of the cached slots as of just stored ones, in the order
        in which the policy before it would have evicted them.

        Args:
            policy: One that no other allocator uses.

        Raises:
            InvalidArgumentError: It is no policy, or the one that chooses now. Nothing has changed.
        """
        if check_policy(policy) is self.policy:
            raise InvalidArgumentError("the new slot policy must be another than the present one")
        hand_over(self.policy, policy, self.pool.slot_to_block, self.context.kv_block_allocator)
        self.policy = policy

    @guarded(nests=True)
    def invalidate_block(self, block_id: int) -> None:
        """Frees a block's slot and forgets its hash; does nothing if it has no slot.

        Raises:
            UnknownBlockError: The id is outside the KV pool.
        """
        self._invalidate_blocks_batch([block_id])

    @guarded(nests=True)
    def _invalidate_blocks_batch(self, block_ids: Iterable[int]) -> None:
        self.pool.free_blocks(block_ids)

    @guarded(nests=True)
    def on_kv_blocks_deregistered(
        self, block_ids: Iterable[int], hashes_to_delete: Iterable[int]
    ) -> None:
        """Frees the slots of KV blocks that lost their content: the KV blocks' owner calls it.

        Args:
            block_ids: The blocks; a list, set, array or tensor.
            hashes_to_delete: Their hash ids. The blocks that these find here are freed as well.

        Raises:
            UnknownBlockError: An id is outside the KV pool; nothing was freed.
            InvalidArgumentError: A hash id is no int, or too large; nothing was freed.
        """
        # The blocks have lost their content already, so from here on this must end well.
        self._guard.is_changing = True
        try:
            ids = as_block_ids(block_ids, self.pool.num_blocks)
            hashes = as_hash_ids(hashes_to_delete)
        except MambaCacheError:
            self._guard.is_changing = False
            raise
        found = [self.hash_to_block_id[h] for h in hashes if h in self.hash_to_block_id]
        self.pool.free_blocks(ids + found)
        for block_id in ids:
            self.pool.hashes.forget_block(block_id)  # it may have had a hash, but no slot
        for hash_id in hashes:
            self.pool.hashes.forget_hash(hash_id)

    @guarded(nests=True)
    def register_block_hashes_batch(self, block_ids: Iterable[int], hashes: Iterable[int]) -> None:
        """Makes the blocks' states findable by hash id; one that is not positive is passed over.

        A block may be registered before it has a slot; ``has_state`` tells.

        Raises:
            UnknownBlockError: A block id is outside the KV pool.
            InvalidArgumentError: The lists differ in length, or a hash id is too large. Nothing was
                registered.
        """
        self.pool.register_hashes(block_ids, hashes)

    @guarded(nests=True, renews=True)
    def reset(self) -> None:
        """Frees every slot, reserved and pinned ones too, and forgets every hash and count.

        In a context it is refused with ``StepOrderError`` while a step is in flight, whose forward
        writes into slots that somebody else might reserve meanwhile.
        """
        if self.before_reset is not None:
            self.before_reset()
        self._guard.is_changing = True
        self.pool.reset()
        self.policy.reset(self.max_slots)
        self.skipped_checkpoints_total = 0

    def fingerprint(self) -> int:
        """Digests the books and the policy's memory: who has which slot, and who gives one up next.

        Ranks that hold shards of the same states must have equal ones at equal moments. It depends
        on no address, time or order of a dict, and is linear in the slots.

        Returns:
            From 0 to 2**63 - 1.
        """
        return slot_fingerprint(self.pool, self.policy)

    def check_invariants(self) -> None:
        """Checks the books against themselves.

        Raises:
            InvariantError: They contradict each other; the message says where.
        """
        self.pool.check_invariants()

    @guarded(nests=True)
    def _evict_lru_slots_batch(self, num_needed: int, candidate_ids: Any = None) -> list[int]:
        """Takes slots from unreferenced blocks and hands them to the caller, not to the pool.

        Until the caller pushes them onto ``free_slots``, ``check_invariants`` misses them.

        Args:
            num_needed: How many.
            candidate_ids: Blocks that may lose theirs; default: any.
        """
        victims = self._choose_victims(num_needed, candidates=candidate_ids)
        if len(victims) < num_needed:
            raise MambaSlotCapacityError(num_needed, len(victims))
        self.pool.evict(victims)
        return victims

    def _choose_victims(
        self, num_slots: int, *, protected: Sequence[int] = (), candidates: Any = None
    ) -> list[int]:
        """Chooses up to ``num_slots`` slots to evict."""
        if num_slots <= 0:
            return []
        kv_blocks = self.context.kv_block_allocator
        slots = self.pool.evictable_slots(as_host_array(kv_blocks.block_ref_counts), protected)
        blocks = self.pool.slot_to_block[slots]
        if candidates is not None:
            allowed = np.isin(blocks, as_ints("candidates", candidates))
            slots, blocks = slots[allowed], blocks[allowed]
        return self.policy.choose(num_slots, slots, blocks, kv_blocks)

    def _is_over(self, epoch: int | None) -> bool:
        return epoch is not None and check_int("epoch", epoch, minimum=0) != self.epoch


def block_hashes(context: SlotContext) -> npt.NDArray[Any]:
    """Returns the hash ids that the KV blocks' owner has now, -1 for none: [pool_size] int64."""
    # Not a method: the pool would refer back to its owner, whose tensors a cycle would keep.
    return as_host_array(context.kv_block_allocator.block_hashes)
