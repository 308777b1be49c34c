"""The books of slots."""

import numpy as np
import pytest
from slot_rig import books, make_pool

from mamba_cache.cache import SlotLease, SlotPool
from mamba_cache.errors import (
    DoubleFreeError,
    InvalidArgumentError,
    InvariantError,
    UnknownBlockError,
)


def evictable(pool, protected=()):
    """What the policy may choose from when a slot is wanted for a block named with others."""
    pool._choose_victims(1, protected=protected)
    return pool.policy.offered


@pytest.fixture
def pool():
    """Of 5 slots: 4 and 3 hold blocks 7 and 8 (hashes 70 and 80), 2 is reserved for block 9."""
    pool = make_pool(5, 10)
    assert pool.allocate_slots_batch([8, 7]) == [3, 4]
    pool.register_block_hashes_batch([7, 8], [70, 80])
    assert pool.reserve_slots([9]) == [2]
    return pool


@pytest.fixture(autouse=True)
def sound_books(pool):
    yield
    pool.check_invariants()


@pytest.mark.parametrize("sizes", [(-1, 1), (1, -1), (True, 1), (1, 2.0), (2**31, 1), (1, 10**30)])
def test_sizes_must_be_counts(sizes):
    with pytest.raises(InvalidArgumentError, match=r"must be an int in \[0, 2147483647\]"):
        make_pool(*sizes)


def test_the_kv_blocks_owner_must_say_how_many_there_are():
    with pytest.raises(InvalidArgumentError, match="number of KV blocks must be an int"):
        SlotPool(3, 10)


def test_slots_of_blocks(pool):
    assert [pool.get_slot(block) for block in (7, 1, 8, 9)] == [4, -1, 3, -1]
    for block in (-1, 10):
        with pytest.raises(UnknownBlockError, match=rf"\[0, 10\), got \[{block}\]"):
            pool.get_slot(block)


@pytest.mark.parametrize("method", ["allocate_slots_batch", "reserve_slots"])
@pytest.mark.parametrize(
    ("blocks", "victims", "message"),
    [
        ([1, 2, 3], [4, 3], "not pinned, 1 of them"),
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
    pool.policy.victims = victims
    before = books(pool)
    with pytest.raises(InvalidArgumentError, match=message):
        getattr(pool, method)(blocks)
    assert books(pool) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], [9], [90]), "must be different and reserved"),
        (([2, 2], [9, 9], [90, 90]), "must be different and reserved"),
        (([5], [9], [90]), r"\[0, 5\), got \[5\]"),
        (([2], [10], [90]), r"\[0, 10\), got \[10\]"),
        (([2], [9], []), "equally long"),
        (([2], [9, 1], [90, 10]), r"equally long: \{'slots': 1"),
        (([2], [9], [0.5]), "hashes must be ints"),
    ],
)
def test_bad_commits_are_refused_before_anything_changes(pool, arguments, message):
    before = books(pool)
    with pytest.raises(InvalidArgumentError, match=message):
        pool.commit_reserved(*arguments)
    assert books(pool) == before


def test_cancel_of_one_slot_named_twice_frees_none(pool):
    with pytest.raises(DoubleFreeError, match=r"reserved, got \[2, 2\]"):
        pool.cancel_reserved([2, 2])
    with pytest.raises(InvalidArgumentError, match=r"\[0, 5\), got \[-1\]"):
        pool.cancel_reserved([-1])
    assert pool.reserved == {2: 9}


def test_slots_of_held_blocks_may_go_where_states_are_read_at_once():
    pool = make_pool(2, 5, evicts_held=True)
    pool.allocate_slots_batch([3, 4])
    pool.kv_blocks.block_ref_counts[:] = 1
    assert evictable(pool) == [0, 1]


def test_the_last_blocks_count_does_not_matter_to_slots_without_a_block(pool):
    pool.kv_blocks.block_ref_counts[9] = 1  # what the index -1 of an empty slot reads
    assert evictable(pool) == [3, 4]


def test_a_pinned_slot_is_not_evicted(pool):
    pool.pin_slots([4])
    pool.policy.victims = [4]
    with pytest.raises(InvalidArgumentError, match="not pinned"):
        pool._evict_lru_slots_batch(1)


def test_hashes_that_only_the_owner_knows_are_dropped_too():
    pool = make_pool(2, 10)
    theirs = pool.kv_blocks.block_hashes
    pool.allocate_slots_batch([4, 5])
    theirs[4] = 40
    pool.hash_to_block_id.update({40: 4, 50: 5})  # as an embedder writes it
    pool._invalidate_blocks_batch([4])
    assert pool.hash_to_block_id == {50: 5}


def test_a_block_may_have_a_hash_before_it_has_a_slot(pool):
    pool.register_block_hashes_batch([1], [10])
    pool.check_invariants()
    assert pool.hash_to_block_id == {70: 7, 80: 8, 10: 1}
    pool.allocate_slots_batch([1])
    pool._invalidate_blocks_batch([1])
    assert (pool.hash_to_block_id, pool._hash_of) == ({70: 7, 80: 8}, {7: 70, 8: 80})


def test_registering_is_all_or_nothing(pool):
    for too_large in (2**63, 2**70):
        with pytest.raises(InvalidArgumentError, match=rf"{2**63}\), got \[{too_large}\]"):
            pool.register_block_hashes_batch([7, 8], [1, too_large])
        with pytest.raises(InvalidArgumentError, match=rf"{2**63}\), got \[{too_large}\]"):
            pool.commit_reserved([2], [9], [too_large])
    with pytest.raises(UnknownBlockError):
        pool.register_block_hashes_batch([7, 10], [1, 2])
    with pytest.raises(InvalidArgumentError, match="equally long"):
        pool.register_block_hashes_batch([7], [1, 2])
    assert pool.hash_to_block_id == {70: 7, 80: 8}


def test_pins_count_readers(pool):
    [first] = pool.pin_slots([4])
    [second] = pool.pin_slots(np.array([4]))
    pool.unpin_slots([first])
    assert pool.is_pinned(4)
    pool.unpin_slots([second])
    assert not pool.is_pinned(4)
    with pytest.raises(DoubleFreeError, match="slot 4 has 0 references, but 1 are given back"):
        pool.unpin_slots([second])


def test_unknown_slots_cannot_be_pinned(pool):
    for ask in (pool.pin_slots, pool.note_consumed, lambda slots: pool.is_pinned(slots[0])):
        with pytest.raises(InvalidArgumentError, match=r"\[0, 5\), got \[5\]"):
            ask([5])


@pytest.mark.parametrize("slot", [-1, 5, 99, "4", None])
def test_a_lease_of_no_slot_is_refused(pool, slot):
    lease = SlotLease(slot, 7, 0)
    with pytest.raises(InvalidArgumentError, match=r"slots must be (in \[0, 5\)|ints), got"):
        pool.is_current(lease)
    with pytest.raises(InvalidArgumentError, match=r"slots must be (in \[0, 5\)|ints), got"):
        pool.unpin_slots([lease])


@pytest.mark.parametrize("block", [7, 1])
def test_a_slot_taken_by_index_has_no_readers_and_no_old_leases(pool, block):
    """Embedders pop ``free_slots`` and write both tables themselves."""
    [lease] = pool.pin_slots([4])
    pool._invalidate_blocks_batch([7])
    assert pool.pin_counts[4] == 0
    pool.free_count -= 1
    slot = pool.free_slots[pool.free_count]
    pool.block_to_slot[block], pool.slot_to_block[slot] = slot, block
    assert slot == lease.slot
    assert not pool.is_pinned(slot)
    assert not pool.is_current(lease)
    pool.unpin_slots([lease])
    assert slot in evictable(pool)


def test_reset_forgets_everything_but_old_leases_stay_old(pool):
    [lease] = pool.pin_slots([4])
    pool.evicted_slots_total = 3
    pool.reset()
    assert books(pool) == books(make_pool(5, 10))
    assert pool.allocate_slots_batch([8, 7]) == [3, 4]
    assert not pool.is_current(lease)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: setattr(p, "free_count", 6), "0 to 5 free slots"),
        (lambda p: setattr(p, "free_count", 1), "is every slot"),
        (lambda p: p.free_slots.__setitem__(0, 1), "is every slot"),
        (lambda p: p.block_to_slot.__setitem__(7, 3), "disagree"),
        (lambda p: p.block_to_slot.__setitem__(1, 3), "3 blocks share 2 cached slots"),
        (lambda p: p.pin_counts.__setitem__(4, -1), "no reference count is negative"),
        (lambda p: p.pin_counts.__setitem__(0, 1), "is every slot"),
        (lambda p: p.pin_counts.__setitem__(2, 2), "other references than one"),
        (lambda p: p.hash_to_block_id.__setitem__(5, 1), "hash 5 finds block 1, which lost its"),
        (
            lambda p: p._hash_of.update({7: 80, 8: 80}),
            "block 7 .* hash 80, which finds another",
        ),
    ],
)
def test_check_invariants_finds_contradictions(spoil, message):
    pool = make_pool(5, 10)
    pool.allocate_slots_batch([8, 7])
    pool.reserve_slots([9])
    pool.register_block_hashes_batch([8], [80])
    pool.check_invariants()
    spoil(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check_invariants()


def test_check_invariants_finds_a_block_reserved_for_twice(pool):
    spoiled = make_pool(2, 3)
    spoiled.reserve_slots([0, 1])
    spoiled.reserved[1] = 0
    with pytest.raises(InvariantError, match="two slots are reserved for one block"):
        spoiled.check_invariants()


def test_a_state_without_a_hash_is_never_stale():
    """An embedder may give slots by block alone; a block may have a hash all the same."""
    pool = make_pool(2, 4)
    pool.allocate_slots_batch([0, 1])
    pool.register_block_hashes_batch([1], [7])
    pool.kv_blocks.block_hashes[:2] = 5, 7
    pool.check_uses([], [])
    pool.kv_blocks.block_hashes[1] = 6
    with pytest.raises(InvariantError, match=r"blocks \[1\] have states of what they held before"):
        pool.check_uses([], [])


def test_a_hash_that_an_embedder_dropped_can_be_registered_again():
    pool = make_pool(2, 4)
    pool.allocate_slots_batch([1])
    pool.register_block_hashes_batch([1], [7])
    del pool.hash_to_block_id[7]
    pool.register_block_hashes_batch([1], [7])
    assert pool.hash_to_block_id == {7: 1}


def test_a_block_that_an_embedder_tied_to_a_hash_keeps_its_own():
    pool = make_pool(3, 4)
    pool.allocate_slots_batch([1, 2])
    pool.register_block_hashes_batch([1], [7])
    pool.hash_to_block_id[8] = 1
    pool.register_block_hashes_batch([2], [8])
    assert pool.hash_to_block_id == {7: 1, 8: 2}


def test_the_least_hash_id_means_none():
    pool = make_pool(2, 4)
    pool.allocate_slots_batch([1])
    pool.register_block_hashes_batch([1], [-(2**63)])
    assert pool.hash_to_block_id == {}
