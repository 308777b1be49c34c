"""The bookkeeping of slots: reservations, pins and refusals. The state machine tests the rest."""

import pytest
from slot_rig import bookkeeping, make_pool, save

from mamba_cache.cache import RefZeroSlotPolicy, SlotPool
from mamba_cache.errors import (
    DoubleFreeError,
    InvalidArgumentError,
    InvariantError,
)


def evictable(pool, protected=()):
    """Return the candidates offered to the policy for one slot, with ``protected`` blocks."""
    pool._choose_victims(1, protected=protected)
    return pool.policy.offered


@pytest.fixture
def pool():
    """Return a pool of 5 slots: 4 and 3 hold blocks 7 and 8, 2 is reserved for block 9."""
    pool = make_pool(5, 10)
    assert save(pool, 8, 7) == [3, 4]
    assert pool.reserve_slots([9]) == [2]
    return pool


@pytest.fixture(autouse=True)
def check_invariants_at_the_end(pool):
    yield
    pool.check_invariants()


@pytest.mark.parametrize("sizes", [(-1, 1), (1, -1), (2**31, 1), (1, 2**31)])
def test_sizes_must_be_counts(sizes):
    assert make_pool(0, 0).free_count == 0
    with pytest.raises(InvalidArgumentError, match=r"must be an int in \[0, 2147483647\]"):
        make_pool(*sizes)
    with pytest.raises(InvalidArgumentError, match="number of KV blocks must be an int"):
        SlotPool(3, 10)


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
def test_bad_moves_are_refused_before_anything_changes(pool, blocks, victims, message):
    pool.policy.victims = victims
    before = bookkeeping(pool)
    with pytest.raises(InvalidArgumentError, match=message):
        pool.reserve_slots(blocks)
    assert bookkeeping(pool) == before


@pytest.mark.parametrize(
    ("slots", "blocks", "message"),
    [
        ([3], [9], "must be different and reserved"),
        ([2, 2], [9, 9], "must be different and reserved"),
        ([5], [9], r"\[0, 5\), got \[5\]"),
        ([2], [10], r"\[0, 10\), got \[10\]"),
        ([2], [9, 1], r"equally long: \{'slots': 1"),
    ],
)
def test_bad_commits_are_refused_before_anything_changes(pool, slots, blocks, message):
    before = bookkeeping(pool)
    with pytest.raises(InvalidArgumentError, match=message):
        pool.commit_reserved(slots, blocks)
    assert bookkeeping(pool) == before
    assert pool.commit_reserved([2], [9]) == [2]


def test_the_policy_is_notified_of_stored_states_only():
    heard = []

    class Listener(RefZeroSlotPolicy):
        def on_stored(self, slots):
            heard.extend(slots)

    pool = SlotPool(4, make_pool(0, 9).kv_blocks, policy=Listener())
    [housed] = save(pool, 0)
    first, second, third = pool.reserve_slots([1, 2, 3])
    assert heard == [housed]
    pool.commit_reserved([second, first], [0, 1])
    pool.commit_reserved([third], [3])
    assert heard[1:] == [first, third]


@pytest.mark.parametrize("block", [7, 1])
def test_a_slot_taken_by_index_has_no_readers_and_no_old_leases(pool, block):
    """Embedders pop ``free_slots`` and write both tables themselves."""
    lease = pool.pin(4)
    pool._invalidate_blocks_batch([7])
    assert pool.pin_counts[4] == 0
    pool.free_count -= 1
    slot = pool.free_slots[pool.free_count]
    pool.block_to_slot[block], pool.slot_to_block[slot] = slot, block
    assert slot == lease.slot
    assert not pool.pin_counts[slot]
    assert not pool.is_current(lease)
    pool.unpin(lease)
    assert slot in evictable(pool)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: setattr(p, "free_count", 6), "0 to 5 free slots"),
        (lambda p: setattr(p, "free_count", 1), "is every slot"),
        (lambda p: p.free_slots.__setitem__(0, 1), "is every slot"),
        (lambda p: p.block_to_slot.__setitem__(7, 3), "and block_to_slot agree"),
        (lambda p: p.block_to_slot.__setitem__(1, 3), "3 blocks have 2 cached slots"),
        (lambda p: p.pin_counts.__setitem__(4, -1), "no reference count is negative"),
        (lambda p: p.pin_counts.__setitem__(0, 1), "is every slot"),
        (lambda p: p.pin_counts.__setitem__(2, 2), "have one reference for each"),
        (lambda p: p.reserved.update({1: 9}), "no block awaits the states of two slots"),
    ],
)
def test_check_invariants_finds_contradictions(spoil, message):
    pool = make_pool(5, 10)
    save(pool, 8, 7)
    pool.reserve_slots([9])
    pool.check_invariants()
    spoil(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check_invariants()


def test_every_slot_can_be_reserved_once():
    pool = make_pool(1, 4)
    assert pool.can_reserve(None, ())
    assert save(pool, 3) == [0]
    assert pool.can_reserve(None, ())
    assert not pool.can_reserve(None, (3,))
    assert pool.reserve_slots([3]) == [None]
    assert pool.skipped_checkpoints_total == 0


def test_states_of_blocks_that_are_not_registered_are_stale():
    pool = make_pool(2, 4)
    save(pool, 0, 1)
    pool.kv_blocks.block_hashes[:2] = 5, 7
    pool.check_uses([], [])
    pool.kv_blocks.block_hashes[0] = -1
    with pytest.raises(InvariantError, match=r"blocks \[0\] hold what they held when"):
        pool.check_uses([], [])


def test_a_lease_is_released_once(pool):
    lease = pool.pin(3)
    pool.unpin(lease)
    with pytest.raises(DoubleFreeError, match="slot 3 is not pinned"):
        pool.unpin(lease)
