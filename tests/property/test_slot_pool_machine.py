"""SlotPool against a model of plain dicts, under any sequence of moves."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slot_rig import books, make_pool

from mamba_cache.errors import (
    DoubleFreeError,
    InvalidArgumentError,
    MambaSlotCapacityError,
    MissingStateError,
)
from mamba_cache.events import Removed, Stored

NUM_BLOCKS = 9
blocks = st.integers(0, NUM_BLOCKS - 1)
hashes = st.integers(-1, 12)


class SlotPoolMachine(RuleBasedStateMachine):
    """The model: which block each slot caches or is reserved for, its readers, and the hashes."""

    @initialize(max_slots=st.integers(0, 5))
    def make(self, max_slots):
        self.pool = make_pool(max_slots, NUM_BLOCKS)
        self.max_slots = max_slots
        self.cached = {}
        self.reserved = {}
        self.leases = []
        self.old_leases = []
        self.found = {}
        self.hash_of = {}
        self.skipped = 0
        self.index = {}  # hash -> (slot, block), as somebody knows it who only hears of events
        self.pool.listeners.add(self.hear, Stored, Removed)

    def hear(self, event):
        entries = zip(event.slots, event.block_ids, event.hash_ids, strict=True)
        for slot, block, hash_id in entries:
            if isinstance(event, Removed):
                assert self.index.pop(hash_id) == (slot, block)
            else:
                assert hash_id not in self.index
                self.index[hash_id] = slot, block
        assert not (getattr(event, "is_reset", False) and self.index)

    @property
    def free(self):
        held = {*self.cached, *self.reserved}
        return [slot for slot in range(self.max_slots) if slot not in held]

    def pinned(self, slot):
        return any(lease.slot == slot for lease in self.leases)

    def vacate(self, slot):
        block = self.cached.pop(slot)
        self.forget(block)
        self.old_leases += [lease for lease in self.leases if lease.slot == slot]
        self.leases = [lease for lease in self.leases if lease.slot != slot]

    def forget(self, block):
        hash_id = self.hash_of.pop(block, None)
        if self.found.get(hash_id) == block:
            del self.found[hash_id]

    def publish(self, block, hash_id):
        if hash_id > 0:
            self.forget(block)
            self.hash_of[block] = hash_id
            self.found[hash_id] = block

    def draw_victims(self, data, new, named):
        """What the policy is to choose where new blocks must get slots of others."""
        evictable = [
            slot
            for slot, block in sorted(self.cached.items())
            if not self.pinned(slot) and block not in named
        ]
        short = min(max(len(new) - len(self.free), 0), len(evictable))
        self.pool.policy.victims = data.draw(st.permutations(evictable))[:short]
        return self.pool.policy.victims

    @rule(data=st.data(), wanted=st.lists(blocks, max_size=4))
    def store(self, data, wanted):
        new = [b for b in dict.fromkeys(wanted) if b not in self.cached.values()]
        free, victims = self.free, self.draw_victims(data, new, wanted)
        if len(new) > len(free) + len(victims):
            before = books(self.pool)
            with pytest.raises(MambaSlotCapacityError) as caught:
                self.pool.allocate_slots_batch(wanted)
            assert (caught.value.required, caught.value.available) == (
                len(new),
                len(free) + len(victims),
            )
            assert books(self.pool) == before
            return
        slots = dict(zip(wanted, self.pool.allocate_slots_batch(wanted), strict=True))
        taken = [slots[block] for block in new]
        assert sorted(taken) == sorted(set(taken))
        assert set(taken) <= {*free, *victims}
        assert taken[len(taken) - len(victims) :] == victims
        for slot in victims:
            self.vacate(slot)
        self.cached.update((slots[block], block) for block in new)
        assert {slot: self.cached[slot] for slot in slots.values()} == {
            slot: block for block, slot in slots.items()
        }

    @rule(data=st.data(), wanted=st.lists(blocks, max_size=3))
    def reserve(self, data, wanted):
        taken = [*self.cached.values(), *self.reserved.values()]
        new = [b for b in dict.fromkeys(wanted) if b not in taken]
        free, victims = self.free, self.draw_victims(data, new, wanted)
        kept = new[: len(free) + len(victims)]
        slots = self.pool.reserve_slots(wanted)
        for slot in victims:
            self.vacate(slot)
        got = {b: s for b, s in zip(wanted, slots, strict=True) if s is not None}
        assert [*got] == kept
        self.reserved.update((slot, block) for block, slot in got.items())
        self.skipped += len(new) - len(kept)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), unique=True))
        named = data.draw(st.lists(blocks, min_size=len(slots), max_size=len(slots)))
        ids = data.draw(st.lists(hashes, min_size=len(slots), max_size=len(slots)))
        got = self.pool.commit_reserved(slots, named, ids)
        for slot, block in zip(slots, named, strict=True):
            del self.reserved[slot]
            if block not in self.cached.values():
                self.cached[slot] = block
        for block, hash_id in zip(named, ids, strict=True):
            self.publish(block, hash_id)
        assert [self.cached[slot] for slot in got] == named

    # Reservations.

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def cancel(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), unique=True))
        self.pool.cancel_reserved(slots)
        for slot in slots:
            del self.reserved[slot]
        if slots:
            before = books(self.pool)
            with pytest.raises(DoubleFreeError):
                self.pool.cancel_reserved(slots)
            assert books(self.pool) == before

    @rule(named=st.lists(blocks, max_size=4))
    def free_blocks(self, named):
        expected = {slot for slot, block in self.cached.items() if block in named}
        free = {*self.free, *expected}
        self.pool._invalidate_blocks_batch(named)
        assert {*self.pool.free_slots[: self.pool.free_count].tolist()} == free
        for slot in expected:
            self.vacate(slot)

    @rule(data=st.data())
    def register(self, data):
        housed = st.sampled_from(sorted(self.cached.values())) if self.cached else st.nothing()
        pairs = data.draw(st.lists(st.tuples(housed, hashes), max_size=3 if self.cached else 0))
        self.pool.register_block_hashes_batch([b for b, _ in pairs], [h for _, h in pairs])
        for block, hash_id in pairs:
            self.publish(block, hash_id)

    @rule(data=st.data())
    def pin(self, data):
        slots = data.draw(
            st.lists(st.sampled_from(range(self.max_slots)), max_size=2 if self.max_slots else 0)
            if self.max_slots
            else st.just([])
        )
        if set(slots) <= set(self.cached):
            leases = self.pool.pin_slots(slots)
            assert [(x.slot, x.block_id) for x in leases] == [(s, self.cached[s]) for s in slots]
            self.leases += leases
        else:
            before = books(self.pool)
            with pytest.raises(MissingStateError):
                self.pool.pin_slots(slots)
            assert books(self.pool) == before

    @precondition(lambda self: self.leases or self.old_leases)
    @rule(data=st.data())
    def unpin(self, data):
        lease = data.draw(st.sampled_from(self.leases + self.old_leases))
        held = self.leases.count(lease)
        if held:
            before = books(self.pool)
            with pytest.raises(DoubleFreeError):
                self.pool.unpin_slots([lease] * (held + 1))
            assert books(self.pool) == before
        self.pool.unpin_slots([lease])
        (self.leases if held else self.old_leases).remove(lease)

    @rule(wanted=st.lists(st.integers(-2, NUM_BLOCKS + 1), min_size=1, max_size=4), data=st.data())
    def misuse(self, wanted, data):
        slots = data.draw(st.lists(st.integers(-2, self.max_slots + 1), min_size=1, max_size=3))
        before = books(self.pool)
        if len(slots) > len(set(slots)) or not set(slots) <= set(self.reserved):
            with pytest.raises(InvalidArgumentError):
                self.pool.commit_reserved(slots, [0] * len(slots), [0] * len(slots))
        if min(wanted) < 0 or max(wanted) >= NUM_BLOCKS:
            for call in (
                self.pool.allocate_slots_batch,
                self.pool.reserve_slots,
                self.pool._invalidate_blocks_batch,
            ):
                with pytest.raises(InvalidArgumentError):
                    call(wanted)
        assert books(self.pool) == before

    @rule()
    def reset(self):
        self.pool.reset()
        self.old_leases += self.leases
        self.cached, self.reserved, self.leases = {}, {}, []
        self.found, self.hash_of, self.skipped = {}, {}, 0

    @invariant()
    def books_agree_with_the_model(self):
        self.pool.check_invariants()
        pool = self.pool
        assert {s: int(b) for s, b in enumerate(pool.slot_to_block) if b >= 0} == self.cached
        assert pool.reserved == self.reserved
        assert sorted(pool.free_slots[: pool.free_count].tolist()) == self.free
        assert pool.hash_to_block_id == self.found
        slot_of = {block: slot for slot, block in self.cached.items()}
        assert self.index == {h: (slot_of[b], b) for h, b in self.found.items() if b in slot_of}
        assert pool.num_cached_slots == len(self.cached)
        assert pool.skipped_checkpoints_total == self.skipped
        assert all(pool.is_current(lease) for lease in self.leases)
        assert not any(pool.is_current(lease) for lease in self.old_leases)
        assert [pool.is_pinned(s) for s in range(self.max_slots)] == [
            self.pinned(s) for s in range(self.max_slots)
        ]

    @invariant()
    def evictable_slots_are_those_the_model_allows(self):
        self.pool.kv_blocks.block_ref_counts[:] = np.arange(NUM_BLOCKS) % 2
        expected = [
            slot
            for slot, block in sorted(self.cached.items())
            if not self.pinned(slot) and block % 2 == 0 and block != 4
        ]
        self.pool._choose_victims(1, protected=[4])
        assert self.pool.policy.offered == expected
        self.pool.kv_blocks.block_ref_counts[:] = 0


TestSlotPool = SlotPoolMachine.TestCase
