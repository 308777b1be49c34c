"""Slots that are reserved, pinned and consumed: what the package's own context asks for."""

import pytest
from fingerprints import fingerprint
from slot_rig import full, make_allocator, refer

from mamba_cache.errors import (
    DoubleFreeError,
    InvalidArgumentError,
    MambaSlotCapacityError,
    MissingStateError,
)
from mamba_cache.slots import ConsumedSlotPolicy, RefZeroSlotPolicy, ScoreSlotPolicy


def test_reservations_are_invisible_until_committed():
    allocator = make_allocator()
    [slot] = allocator.reserve_slots([5])
    assert not allocator.has_state(5)
    assert (allocator.num_reserved_slots, allocator.num_cached_slots) == (1, 0)
    assert allocator.commit_reserved([slot], [5], [55]) == [slot]
    assert (allocator.get_slot(5), allocator.hash_to_block_id) == (slot, {55: 5})
    assert (allocator.num_reserved_slots, allocator.num_cached_slots) == (0, 1)
    allocator.check_invariants()


def test_no_slot_is_reserved_twice_for_a_block():
    allocator = full(slots=2, policy=None)
    refer(allocator, 0, 1)
    assert allocator.reserve_slots([0, 1]) == [None, None]
    assert allocator.skipped_checkpoints_total == 0
    allocator = make_allocator()
    [first, repeated] = allocator.reserve_slots([5, 5])
    assert (first, repeated) == (3, None)
    assert allocator.reserve_slots([5, 6]) == [None, 2]
    assert allocator.skipped_checkpoints_total == 0


def test_reserving_evicts_but_fills_up_without_an_error():
    allocator = full()
    allocator.invalidate_block(3)
    refer(allocator, 0, 1)
    got = allocator.reserve_slots([6, 7, 8, 9])
    assert [slot is None for slot in got] == [False, False, True, True]
    assert allocator.skipped_checkpoints_total == 2
    assert [allocator.has_state(block) for block in range(3)] == [True, True, False]
    allocator.check_invariants()


def test_reserving_evicts_no_block_that_it_names():
    allocator = full(slots=2)
    assert allocator.reserve_slots([0, 1, 5]) == [None, None, None]
    assert allocator.skipped_checkpoints_total == 1
    assert allocator.has_state(0)


def test_reserved_slots_are_not_evicted():
    allocator = make_allocator(2)
    slots = allocator.reserve_slots([1, 2])
    with pytest.raises(MambaSlotCapacityError):
        allocator.allocate_slots_batch([3])
    allocator.cancel_reserved(slots)
    assert len(allocator.allocate_slots_batch([3, 4])) == 2


def test_commit_to_a_block_that_was_stored_meanwhile_keeps_the_older_state():
    allocator = make_allocator(3, policy=ConsumedSlotPolicy())
    [reserved] = allocator.reserve_slots([5])
    [older] = allocator.allocate_slots_batch([4])
    assert allocator.commit_reserved([reserved], [4], [44]) == [older]
    assert allocator.num_reserved_slots == 0
    assert allocator.allocate_slots_batch([6]) == [reserved]


def test_only_reservations_can_be_committed_or_cancelled():
    allocator = full()
    with pytest.raises(InvalidArgumentError, match="must be different and reserved"):
        allocator.commit_reserved([0], [9], [99])
    with pytest.raises(DoubleFreeError, match="must be different and reserved"):
        allocator.cancel_reserved([0])
    assert allocator.hash_to_block_id == {100: 0, 101: 1, 102: 2, 103: 3}


def test_what_was_reserved_before_a_reset_is_neither_committed_nor_cancelled_after_it():
    allocator = make_allocator(2)
    epoch = allocator.epoch
    old = allocator.reserve_slots([5, 6])
    allocator.reset()
    allocator.cancel_reserved(old, epoch=epoch)
    assert allocator.commit_reserved(old, [5, 6], [55, 66], epoch=epoch) == [-1, -1]
    assert (allocator.num_cached_slots, allocator.hash_to_block_id) == (0, {})
    # Another has the same slots now: they stay its own.
    new = allocator.reserve_slots([7, 8])
    assert sorted(new) == sorted(old)
    allocator.cancel_reserved(old, epoch=epoch)
    allocator.commit_reserved(old, [5, 6], [55, 66], epoch=epoch)
    assert allocator.num_reserved_slots == 2
    assert allocator.commit_reserved(new, [7, 8], [77, 88], epoch=allocator.epoch) == new
    allocator.check_invariants()


def test_only_a_reset_begins_a_new_epoch():
    allocator = make_allocator(2)
    epoch = allocator.epoch
    [slot] = allocator.reserve_slots([5])
    allocator.cancel_reserved([slot], epoch=epoch)
    with pytest.raises(DoubleFreeError):
        allocator.cancel_reserved([slot], epoch=epoch)
    assert allocator.epoch == epoch
    allocator.reset()
    assert allocator.epoch == epoch + 1


def test_pinned_slots_are_not_evicted_until_unpinned():
    allocator = full(slots=2)
    leases = allocator.pin_slots([allocator.get_slot(0)])
    assert allocator.is_pinned(allocator.get_slot(0))
    allocator.allocate_slots_batch([8])
    assert allocator.has_state(0)
    with pytest.raises(MambaSlotCapacityError):
        allocator.allocate_slots_batch([8, 9])
    allocator.unpin_slots(leases)
    allocator.allocate_slots_batch([8, 9])
    assert not allocator.has_state(0)


def test_an_invalidated_pin_is_found_out_by_its_holder():
    allocator = full()
    [lease] = allocator.pin_slots([allocator.get_slot(0)])
    assert allocator.is_current(lease)
    allocator.invalidate_block(0)
    assert not allocator.is_current(lease)
    allocator.unpin_slots([lease])
    with pytest.raises(MissingStateError, match="hold no state"):
        allocator.pin_slots([lease.slot])


def test_a_consumed_state_outlives_those_stored_after_it():
    allocator = full(slots=3, policy=ConsumedSlotPolicy())
    allocator.note_consumed([allocator.get_slot(0)])
    allocator.allocate_slots_batch([8])
    assert [allocator.has_state(block) for block in range(3)] == [True, False, True]
    with pytest.raises(InvalidArgumentError, match=r"\[0, 3\), got \[3\]"):
        allocator.note_consumed([3])


def test_the_policy_hears_of_the_states_that_were_stored_and_of_no_others():
    heard = []

    class Listener(RefZeroSlotPolicy):
        def on_stored(self, slots, saved_tokens):
            heard.extend(zip(slots, saved_tokens, strict=True))

    allocator = make_allocator(4, policy=Listener())
    [housed] = allocator.allocate_slots_batch([0])
    allocator.allocate_slots_batch([0])
    assert heard == [(housed, 1)]
    first, second, third = allocator.reserve_slots([1, 2, 3])
    assert heard == [(housed, 1)]
    allocator.commit_reserved([second, first], [0, 1], [10, 11], saved_tokens=[256, 512])
    assert heard == [(housed, 1), (first, 512)]
    allocator.commit_reserved([third], [3], [13])
    assert heard[2:] == [(third, 1)]


@pytest.mark.parametrize(
    ("saved_tokens", "complaint"),
    [([1, 2], "equally long"), ([-1], r"got \[-1\]"), ([2**31], "got"), ([1.5], "got 1.5")],
)
def test_saved_tokens_are_checked_before_anything_is_committed(saved_tokens, complaint):
    allocator = make_allocator(2, policy=ScoreSlotPolicy())
    slots = allocator.reserve_slots([1])
    before = fingerprint(allocator)
    with pytest.raises(InvalidArgumentError, match=complaint):
        allocator.commit_reserved(slots, [1], [11], saved_tokens=saved_tokens)
    assert fingerprint(allocator) == before
    assert allocator.commit_reserved(slots, [1], [11], saved_tokens=[2**31 - 1]) == slots
