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
        self.leaving, self.arriving, self.ended, self.before_reset = [], [], [], []
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
        held.update(slot for copy in self.leaving for slot in copy.ids)
        held.update(slot for copy, _ in self.arriving for slot in copy.ids)
        return [slot for slot in range(self.max_slots) if slot not in held]

    @property
    def awaited(self):
        """Blocks that are about to have a slot."""
        return [*self.reserved.values(), *(b for _, named in self.arriving for b in named)]

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
        taken = [*self.cached.values(), *self.awaited]
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

    # Copies in flight.

    @rule(slots=st.lists(st.integers(0, 4), max_size=2))
    def begin_leaving(self, slots):
        may_go = all(slot in self.cached and not self.pinned(slot) for slot in slots)
        if not may_go or len(set(slots)) < len(slots):
            before = books(self.pool)
            with pytest.raises(InvalidArgumentError):
                self.pool.begin_leaving(slots)
            assert books(self.pool) == before
            return
        copy = self.pool.begin_leaving(slots)
        assert copy.ids == tuple(slots)
        for slot in slots:
            self.vacate(slot)
        self.leaving.append(copy)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def end_leaving(self, data):
        copy = self.leaving.pop(data.draw(st.integers(0, len(self.leaving) - 1)))
        self.pool.end_leaving(copy)
        self.ended.append(copy)

    @rule(data=st.data(), wanted=st.lists(blocks, max_size=2))
    def begin_arriving(self, data, wanted):
        served = {*self.cached.values(), *self.awaited}
        free, victims = self.free, self.draw_victims(data, wanted, wanted)
        before = books(self.pool)
        if served & set(wanted) or len(set(wanted)) < len(wanted):
            with pytest.raises(InvalidArgumentError, match="without a slot"):
                self.pool.begin_arriving(wanted)
            assert books(self.pool) == before
        elif len(wanted) > len(free) + len(victims):
            with pytest.raises(MambaSlotCapacityError) as caught:
                self.pool.begin_arriving(wanted)
            assert caught.value.available == len(free) + len(victims)
            assert books(self.pool) == before
        else:
            copy = self.pool.begin_arriving(wanted)
            assert len(set(copy.ids)) == len(wanted)
            assert set(copy.ids) <= {*free, *victims}
            for slot in victims:
                self.vacate(slot)
            self.arriving.append((copy, wanted))

    def draw_arrival(self, data):
        copy, _ = self.arriving.pop(data.draw(st.integers(0, len(self.arriving) - 1)))
        self.ended.append(copy)
        return copy

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def complete_arriving(self, data):
        copy = self.draw_arrival(data)
        size = {"min_size": len(copy.ids), "max_size": len(copy.ids)}
        named, ids = data.draw(st.lists(blocks, **size)), data.draw(st.lists(hashes, **size))
        before = books(self.pool)
        with pytest.raises(InvalidArgumentError, match="equally long"):
            self.pool.complete_arriving(copy, [*named, 0], ids)
        assert books(self.pool) == before
        got = self.pool.complete_arriving(copy, named, ids)
        for slot, block in zip(copy.ids, named, strict=True):
            if block not in self.cached.values():
                self.cached[slot] = block
        for block, hash_id in zip(named, ids, strict=True):
            self.publish(block, hash_id)
        assert [self.cached[slot] for slot in got] == named

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def cancel_arriving(self, data):
        self.pool.cancel_arriving(self.draw_arrival(data))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_a_copy_again(self, data):
        copy = data.draw(st.sampled_from(self.ended))
        named, before = [0] * len(copy.ids), books(self.pool)
        ends = [self.pool.end_leaving]
        if copy.way == "arriving":
            with pytest.raises(InvalidArgumentError, match="what begin_leaving returned"):
                self.pool.end_leaving(copy)
            ends = [
                self.pool.cancel_arriving,
                lambda ended: self.pool.complete_arriving(ended, named, [1] * len(named)),
            ]
        for end in ends:
            if copy in self.before_reset:
                end(copy)
            else:
                with pytest.raises(DoubleFreeError, match="was ended already"):
                    end(copy)
        assert books(self.pool) == before

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
        self.ended += [*self.leaving, *(copy for copy, _ in self.arriving)]
        self.before_reset = list(self.ended)
        self.leaving, self.arriving = [], []
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
        assert pool.num_leaving_slots == sum(len(copy.ids) for copy in self.leaving)
        assert pool.num_arriving_slots == sum(len(copy.ids) for copy, _ in self.arriving)
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
