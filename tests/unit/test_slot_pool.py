"""The books of slots."""

import numpy as np
import pytest
from slot_rig import books

from mamba_cache.errors import (
    DoubleFreeError,
    InvalidArgumentError,
    InvariantError,
    MissingStateError,
    UnknownBlockError,
)
from mamba_cache.slots import SlotLease, SlotPool

NO_REFS = np.zeros(10, np.int32)


@pytest.fixture
def pool():
    """Of 5 slots: 4 and 3 hold blocks 7 and 8 (hashes 70 and 80), 2 is reserved for block 9."""
    pool = SlotPool(5, 10)
    assert pool.store([8, 7]) == [3, 4]
    pool.register_hashes([7, 8], [70, 80])
    assert pool.reserve([9]) == [2]
    return pool


@pytest.fixture(autouse=True)
def sound_books(pool):
    yield
    pool.check_invariants()


@pytest.mark.parametrize("sizes", [(-1, 1), (1, -1), (True, 1), (1, 2.0), (2**31, 1), (1, 10**30)])
def test_sizes_must_be_counts(sizes):
    with pytest.raises(InvalidArgumentError, match=r"must be an int in \[0, 2147483647\]"):
        SlotPool(*sizes)


def test_a_pool_may_be_empty():
    pool = SlotPool(0, 3)
    assert pool.store([]) == []
    assert pool.evictable_slots(NO_REFS[:3]).tolist() == []
    pool.check_invariants()


def test_counts_add_up(pool):
    assert (pool.free_count, pool.num_reserved_slots, pool.num_cached_slots) == (2, 1, 2)


def test_a_freed_slot_is_the_next_one_taken(pool):
    assert pool.free_blocks([7]) == [4]
    assert pool.store([1]) == [4]


def test_slots_are_taken_from_the_top_of_the_stack_in_stack_order():
    pool = SlotPool(5, 10)
    assert pool.store([0, 1, 2]) == [2, 3, 4]


def test_slots_of_blocks(pool):
    assert pool.slots_of([7, 1, 8, 9, 7]) == [4, -1, 3, -1, 4]
    assert pool.slots_of([]) == []
    with pytest.raises(UnknownBlockError, match=r"\[0, 10\), got \[-1, 10\]"):
        pool.slots_of([1, -1, 10])


def test_free_slots_go_before_victims(pool):
    assert pool.store([0, 1, 2], victims=[4]) == [0, 1, 4]
    assert pool.slots_of([0, 1, 2, 7]) == [0, 1, 4, -1]
    assert pool.evicted_slots_total == 1
    assert pool.hash_to_block_id == {80: 8}


@pytest.mark.parametrize("method", ["store", "reserve"])
@pytest.mark.parametrize(
    ("blocks", "victims", "message"),
    [
        ([7], [], r"\[7\] have a slot already"),
        ([1, 1], [], "must be different"),
        ([1, 2, 3], [], "there must be 1 victims, got 0"),
        ([1], [4], "there must be 0 victims, got 1"),
        ([1, 2, 3], [2], "cached and not pinned"),
        ([1, 2, 3], [0], "cached and not pinned"),
        ([1, 2, 3, 4], [3, 3], "must be different"),
        ([1, 2, 3], [5], r"\[0, 5\), got \[5\]"),
        ([1, 2, 3], [-1], r"\[0, 5\), got \[-1\]"),
        ([1, 2, 3], [None], "must be ints"),
        ([10], [], r"\[0, 10\), got \[10\]"),
        ([1.0], [], "must be ints"),
    ],
)
def test_bad_moves_are_refused_before_anything_changes(pool, method, blocks, victims, message):
    before = books(pool)
    with pytest.raises(InvalidArgumentError, match=message):
        getattr(pool, method)(blocks, victims)
    assert books(pool) == before


def test_a_block_is_reserved_for_once(pool):
    with pytest.raises(InvalidArgumentError, match=r"\[9\] have a reserved slot"):
        pool.reserve([1, 9])
    assert pool.reserved == {2: 9}


def test_a_reserved_slot_is_not_found_and_not_evicted(pool):
    assert pool.slots_of([9]) == [-1]
    assert pool.evictable_slots(NO_REFS).tolist() == [3, 4]


def test_commit_makes_the_slot_findable(pool):
    assert pool.commit([2], [9], [90]) == [2]
    assert pool.hash_to_block_id == {70: 7, 80: 8, 90: 9}
    assert (pool.slots_of([9]), pool.num_reserved_slots) == ([2], 0)


def test_commit_may_name_another_block_than_the_reservation(pool):
    assert pool.commit([2], [5], [50]) == [2]
    assert pool.slots_of([9, 5]) == [-1, 2]


def test_commit_to_a_housed_block_frees_the_reserved_slot(pool):
    assert pool.commit([2], [7], [71]) == [4]
    assert pool.free_slots[pool.free_count - 1] == 2
    assert pool.hash_to_block_id == {71: 7, 80: 8}


def test_commit_of_two_slots_to_one_block_keeps_the_first(pool):
    assert pool.reserve([5]) == [1]
    assert pool.commit([1, 2], [6, 6], [60, 60]) == [1, 1]
    assert pool.free_count == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], [9], [90]), "must be different and reserved"),
        (([2, 2], [9, 9], [90, 90]), "must be different and reserved"),
        (([5], [9], [90]), r"\[0, 5\), got \[5\]"),
        (([2], [10], [90]), r"\[0, 10\), got \[10\]"),
        (([2], [9], []), "equally long"),
        (([2], [9, 1], [90]), "equally long"),
        (([2], [9], [0.5]), "hashes must be ints"),
    ],
)
def test_bad_commits_are_refused_before_anything_changes(pool, arguments, message):
    before = books(pool)
    with pytest.raises(InvalidArgumentError, match=message):
        pool.commit(*arguments)
    assert books(pool) == before


def test_cancel_frees_and_twice_is_an_error(pool):
    pool.cancel([2])
    assert (pool.free_count, pool.num_reserved_slots) == (3, 0)
    with pytest.raises(DoubleFreeError, match="reserved, got \\[2\\]"):
        pool.cancel([2])
    with pytest.raises(InvalidArgumentError, match=r"\[0, 5\), got \[-1\]"):
        pool.cancel([-1])


def test_cancel_of_one_slot_named_twice_frees_none(pool):
    with pytest.raises(DoubleFreeError):
        pool.cancel([2, 2])
    assert pool.reserved == {2: 9}


def test_evictable_slots_are_unreferenced_unpinned_and_unprotected(pool):
    pool.store([0, 1])
    refs = NO_REFS.copy()
    refs[8] = 1
    pool.pin([4])
    assert pool.evictable_slots(refs).tolist() == [0, 1]
    assert pool.evictable_slots(refs, [1, 5]).tolist() == [0]


def test_the_last_blocks_count_does_not_matter_to_slots_without_a_block(pool):
    refs = NO_REFS.copy()
    refs[9] = 1  # what the index -1 of an empty slot reads
    assert pool.evictable_slots(refs).tolist() == [3, 4]


def test_an_evicted_slot_is_the_callers(pool):
    pool.evict([4])
    assert (pool.slots_of([7]), pool.free_count) == ([-1], 2)
    with pytest.raises(InvariantError, match="are not each of 5 slots once"):
        pool.check_invariants()
    pool.free_slots[pool.free_count] = 4
    pool.free_count += 1


def test_a_pinned_slot_is_not_evicted(pool):
    pool.pin([4])
    with pytest.raises(InvalidArgumentError, match="not pinned"):
        pool.evict([4])


def test_free_blocks_passes_over_blocks_without_a_slot_and_repeats(pool):
    assert pool.free_blocks([7, 0, 7, 9]) == [4]
    assert pool.hash_to_block_id == {80: 8}
    with pytest.raises(UnknownBlockError):
        pool.free_blocks([8, 10])
    assert pool.slots_of([8]) == [3]


def test_hashes_that_are_not_positive_are_not_registered(pool):
    pool.register_hashes([7, 8], [0, -1])
    assert pool.hash_to_block_id == {70: 7, 80: 8}


def test_a_blocks_new_hash_replaces_its_old_one(pool):
    pool.register_hashes([7], [71])
    pool.register_hashes([7], [71])
    assert pool.hash_to_block_id == {71: 7, 80: 8}


def test_a_hash_finds_the_block_registered_last_and_outlives_the_first(pool):
    pool.register_hashes([8], [70])
    assert pool.hash_to_block_id == {70: 8}
    pool.free_blocks([7])
    assert pool.hash_to_block_id == {70: 8}
    pool.free_blocks([8])
    assert pool.hash_to_block_id == {}


def test_hashes_that_only_the_owner_knows_are_dropped_too():
    theirs = np.full(10, -1, np.int64)
    pool = SlotPool(2, 10, block_hashes=lambda: theirs)
    pool.store([4, 5])
    theirs[4] = 40
    pool.hash_to_block_id.update({40: 4, 50: 5})  # as an embedder writes it
    pool.free_blocks([4])
    assert pool.hash_to_block_id == {50: 5}


def test_a_hash_that_went_to_another_block_leaves_no_trace_at_the_first(pool):
    pool.register_hashes([8], [70])
    assert pool.hashes.hash_of == {8: 70}


def test_a_block_may_have_a_hash_before_it_has_a_slot(pool):
    pool.register_hashes([1], [10])
    pool.check_invariants()
    assert pool.hash_to_block_id == {70: 7, 80: 8, 10: 1}
    pool.store([1])
    pool.free_blocks([1])
    assert (pool.hash_to_block_id, pool.hashes.hash_of) == ({70: 7, 80: 8}, {7: 70, 8: 80})


def test_registering_is_all_or_nothing(pool):
    for too_large in (2**63, 2**70):
        with pytest.raises(InvalidArgumentError, match=f"{2**63 - 1}, got {too_large}"):
            pool.register_hashes([7, 8], [1, too_large])
        with pytest.raises(InvalidArgumentError, match=f"{2**63 - 1}, got {too_large}"):
            pool.commit([2], [9], [too_large])
    with pytest.raises(UnknownBlockError):
        pool.register_hashes([7, 10], [1, 2])
    with pytest.raises(InvalidArgumentError, match="equally long"):
        pool.register_hashes([7], [1, 2])
    assert pool.hash_to_block_id == {70: 7, 80: 8}


def test_pins_count_readers(pool):
    [first] = pool.pin([4])
    [second] = pool.pin(np.array([4]))
    pool.unpin([first])
    assert pool.is_pinned(4)
    pool.unpin([second])
    assert not pool.is_pinned(4)
    with pytest.raises(DoubleFreeError, match="slot 4 has 0 pins, but 1 were given back"):
        pool.unpin([second])


def test_unpinning_more_often_than_pinned_ends_no_pin(pool):
    [lease] = pool.pin([4])
    with pytest.raises(DoubleFreeError):
        pool.unpin([lease, lease])
    assert pool.is_pinned(4)


@pytest.mark.parametrize(("slot", "error"), [(0, MissingStateError), (2, MissingStateError)])
def test_only_cached_slots_can_be_pinned(pool, slot, error):
    with pytest.raises(error, match=f"\\[{slot}\\] hold no state"):
        pool.pin([4, slot])
    assert not pool.is_pinned(4)


def test_unknown_slots_cannot_be_pinned(pool):
    for ask in (pool.pin, lambda slots: pool.is_pinned(slots[0])):
        with pytest.raises(InvalidArgumentError, match=r"\[0, 5\), got \[5\]"):
            ask([5])


def test_a_lease_ends_when_its_block_is_freed(pool):
    [lease] = pool.pin([4])
    assert pool.is_current(lease)
    pool.free_blocks([7])
    assert not pool.is_current(lease)
    assert not pool.is_pinned(4)
    pool.unpin([lease])


def test_a_lease_is_not_revived_by_the_same_block_in_the_same_slot(pool):
    [lease] = pool.pin([4])
    pool.free_blocks([7])
    assert pool.store([7]) == [4]
    assert not pool.is_current(lease)
    [newer] = pool.pin([4])
    pool.unpin([lease])
    assert pool.is_pinned(4)
    pool.unpin([newer])
    assert not pool.is_pinned(4)


def test_a_new_tenant_starts_without_readers(pool):
    pool.pin([4])
    pool.free_blocks([7])
    pool.store([1])
    assert not pool.is_pinned(4)


@pytest.mark.parametrize("slot", [-1, 5, 99, "4", None])
def test_a_lease_of_no_slot_is_refused(pool, slot):
    lease = SlotLease(slot, 7, 0)
    with pytest.raises(InvalidArgumentError, match=r"slots must be (in \[0, 5\)|ints), got"):
        pool.is_current(lease)
    with pytest.raises(InvalidArgumentError, match=r"slots must be (in \[0, 5\)|ints), got"):
        pool.unpin([lease])


@pytest.mark.parametrize("block", [7, 1])
def test_a_slot_taken_by_index_has_no_readers_and_no_old_leases(pool, block):
    """Embedders pop ``free_slots`` and write both tables themselves."""
    [lease] = pool.pin([4])
    pool.free_blocks([7])
    assert not pool.pin_counts.any()
    pool.free_count -= 1
    slot = pool.free_slots[pool.free_count]
    pool.block_to_slot[block], pool.slot_to_block[slot] = slot, block
    assert slot == lease.slot
    assert not pool.is_pinned(slot)
    assert not pool.is_current(lease)
    pool.unpin([lease])
    assert slot in pool.evictable_slots(NO_REFS)


def test_reset_forgets_everything_but_old_leases_stay_old(pool):
    [lease] = pool.pin([4])
    pool.evicted_slots_total = 3
    pool.reset()
    assert books(pool) == books(SlotPool(5, 10))
    assert pool.store([8, 7]) == [3, 4]
    assert not pool.is_current(lease)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: setattr(p, "free_count", 6), "free_count is 6"),
        (lambda p: setattr(p, "free_count", 1), "are not each of 5 slots once"),
        (lambda p: p.free_slots.__setitem__(0, 1), "are not each of 5 slots once"),
        (lambda p: p.block_to_slot.__setitem__(7, 3), "disagree"),
        (lambda p: p.block_to_slot.__setitem__(1, 3), "3 blocks share 2 cached slots"),
        (lambda p: p.pin_counts.__setitem__(4, -1), "less than no readers"),
        (lambda p: p.pin_counts.__setitem__(0, 1), "holds no state has readers"),
        (lambda p: p.hash_to_block_id.__setitem__(5, 1), "hash 5 finds block 1, which lost its"),
        (
            lambda p: p.hashes.hash_of.update({7: 80, 8: 80}),
            "block 7 .* hash 80, which finds another",
        ),
    ],
)
def test_check_invariants_finds_contradictions(spoil, message):
    pool = SlotPool(5, 10)
    pool.store([8, 7])
    pool.reserve([9])
    pool.register_hashes([8], [80])
    pool.check_invariants()
    spoil(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check_invariants()


def test_check_invariants_finds_a_block_reserved_for_twice(pool):
    spoiled = SlotPool(2, 3)
    spoiled.reserve([0, 1])
    spoiled.reserved[1] = 0
    with pytest.raises(InvariantError, match="two slots are reserved for one block"):
        spoiled.check_invariants()
