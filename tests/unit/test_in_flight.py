"""Blocks and slots that are leaving or arriving: held by a copy, and neither free nor findable."""

import numpy as np
import pytest
from context_rig import make_config, make_context
from kv_rig import cache, prefix, snapshot
from slot_rig import books, full, make_allocator

from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import (
    BlockCapacityError,
    DoubleFreeError,
    InvalidArgumentError,
    InvariantError,
    MambaSlotCapacityError,
    UnknownBlockError,
)


@pytest.fixture
def pool():
    pool = KVBlockAllocator(9)
    yield pool
    pool.check_invariants()


# Blocks.


def test_a_block_that_leaves_is_neither_findable_nor_free_until_it_has_left(pool):
    cached = cache(pool, 1, 2)
    copy = pool.begin_leaving([cached[1]])
    assert (copy.way, copy.ids) == ("leaving", (cached[1],))
    assert pool.match_prefix(prefix(1, 2)) == cached[:1]
    counts = (pool.num_free_blocks, pool.num_cached_blocks, pool.num_used_blocks)
    assert (counts, pool.num_leaving_blocks) == ((6, 1, 0), 1)
    with pytest.raises(BlockCapacityError, match="only 7 are available"):
        pool.allocate_memory_blocks(8)
    pool.check_invariants()
    pool.end_leaving(copy)
    assert (pool.num_leaving_blocks, len(pool.allocate_memory_blocks(8))) == (0, 8)


def test_a_used_block_leaves_with_its_last_reference(pool):
    mine, shared = pool.allocate_memory_blocks(2)
    pool.register_kv_block_hashes([mine], prefix(1))
    pool.retain_memory_blocks([shared])
    before = snapshot(pool)
    with pytest.raises(InvalidArgumentError, match=f"block {shared} has 2 references"):
        pool.begin_leaving([mine, shared])
    assert snapshot(pool) == before
    pool.begin_leaving([mine])
    assert (pool.num_used_blocks, pool.num_leaving_blocks) == (1, 1)
    assert pool.match_prefix(prefix(1)) == []
    with pytest.raises(DoubleFreeError, match="has 0 references"):
        pool.release_memory_blocks([mine])


@pytest.mark.parametrize("call", ["retain_memory_blocks", "begin_leaving"])
def test_a_block_in_flight_is_nobodys(pool, call):
    [block] = cache(pool, 1)
    leaving, arriving = pool.begin_leaving([block]), pool.begin_arriving(1)
    for copy in (leaving, arriving):
        with pytest.raises((UnknownBlockError, InvalidArgumentError), match=r"in flight|0 referen"):
            getattr(pool, call)(copy.ids)
    with pytest.raises(UnknownBlockError, match=f"block {block} is held by a copy in flight"):
        pool.register_kv_block_hashes([block], prefix(1))
    pool.deregister_blocks([block])
    assert (pool.num_leaving_blocks, pool.num_arriving_blocks) == (1, 1)


@pytest.mark.parametrize("given", [[7, 7], [3], [-1], [8]])
def test_only_blocks_that_hold_something_leave_and_once(pool, given):
    pool.allocate_memory_blocks(1)
    [cached] = cache(pool, 1)
    before = snapshot(pool)
    with pytest.raises(InvalidArgumentError):
        pool.begin_leaving([cached, *given] if given != [7, 7] else [cached, cached])
    assert snapshot(pool) == before


def test_a_parent_may_leave_before_its_children_and_they_match_again_with_another(pool):
    parent, child = cache(pool, 1, 2)
    pool.end_leaving(pool.begin_leaving([parent]))
    copy = pool.begin_arriving(1)
    assert pool.complete_arriving(copy, prefix(1)) == list(copy.ids)
    assert pool.match_prefix(prefix(1, 2)) == [*copy.ids, child]


def test_what_arrives_is_findable_by_one_call_and_evicted_leaf_first(pool):
    copy = pool.begin_arriving(3)
    assert (pool.num_arriving_blocks, pool.num_free_blocks) == (3, 5)
    assert pool.match_prefix(prefix(1, 2, 3)) == []
    assert pool.complete_arriving(copy, prefix(1, 2, 3)) == list(copy.ids)
    assert pool.match_prefix(prefix(1, 2, 3)) == list(copy.ids)
    assert (pool.num_arriving_blocks, pool.num_cached_blocks) == (0, 3)
    pool.check_invariants()
    pool.allocate_memory_blocks(5)
    assert pool.allocate_memory_blocks(3) == list(copy.ids)[::-1]


def test_what_arrives_is_newer_than_what_was_there(pool):
    copy = pool.begin_arriving(1)
    old = cache(pool, 7)
    pool.complete_arriving(copy, prefix(1))
    pool.allocate_memory_blocks(6)
    assert pool.allocate_memory_blocks(1) == old


def test_arriving_evicts_what_is_cached_and_takes_nothing_if_that_does_not_do(pool):
    cached = cache(pool, 1, 2)
    pool.allocate_memory_blocks(5)
    before = snapshot(pool)
    with pytest.raises(BlockCapacityError, match="4 KV blocks are required, but only 3"):
        pool.begin_arriving(4)
    assert snapshot(pool) == before
    assert pool.begin_arriving(3).ids[1:] == tuple(cached[::-1])
    assert pool.evicted_blocks_total == 2
    with pytest.raises(InvalidArgumentError, match="num_blocks must be an int >= 0"):
        pool.begin_arriving(-1)


def test_what_was_computed_meanwhile_is_kept_and_the_copy_of_it_is_free(pool):
    copy = pool.begin_arriving(2)
    own = cache(pool, 1)
    assert pool.complete_arriving(copy, prefix(1, 2)) == [*own, copy.ids[1]]
    assert pool.match_prefix(prefix(1, 2)) == [*own, copy.ids[1]]
    assert copy.ids[0] in pool.free_block_ids


def test_an_arrival_that_is_refused_is_still_arriving(pool):
    copy = pool.begin_arriving(2)
    for hashes, options in ((prefix(1), {}), ([0, 1], {}), (prefix(1, 2), {"tokens": [1]})):
        with pytest.raises(InvalidArgumentError):
            pool.complete_arriving(copy, hashes, **options)
    assert pool.num_arriving_blocks == 2
    pool.cancel_arriving(copy)
    assert (pool.num_arriving_blocks, pool.num_free_blocks) == (0, 8)


def test_nothing_arrives_for_good_without_prefix_caching():
    pool = KVBlockAllocator(4, enable_prefix_caching=False)
    copy = pool.begin_arriving(2)
    assert pool.complete_arriving(copy, prefix(1, 2)) == [None, None]
    assert pool.num_free_blocks == 3
    pool.check_invariants()


def test_what_arrives_under_ref_zero_waits_for_its_first_reference():
    pool = KVBlockAllocator(4, eviction_policy=EvictionPolicy.REF_ZERO)
    copy = pool.begin_arriving(1)
    pool.complete_arriving(copy, prefix(1))
    assert pool.match_prefix(prefix(1)) == list(copy.ids)
    pool.retain_memory_blocks(copy.ids)
    pool.release_memory_blocks(copy.ids)
    assert pool.match_prefix(prefix(1)) == []
    pool.check_invariants()


def test_a_copy_that_ends_after_a_reset_takes_nothing_from_others(pool):
    leaving, arriving = pool.begin_leaving(cache(pool, 1)), pool.begin_arriving(2)
    pool.reset()
    taken = pool.allocate_memory_blocks(8)
    pool.end_leaving(leaving)
    pool.cancel_arriving(arriving)
    assert pool.complete_arriving(arriving, prefix(1, 2)) == [None, None]
    assert (pool.num_free_blocks, pool.num_used_blocks) == (0, len(taken))


def test_a_copy_ends_once_one_way_and_in_its_own_pool(pool):
    copy = pool.begin_arriving(1)
    pool.cancel_arriving(copy)
    again = pool.begin_arriving(1)
    with pytest.raises(DoubleFreeError, match="was ended already, or is another pool's"):
        pool.complete_arriving(copy, prefix(1))
    with pytest.raises(DoubleFreeError, match="another pool's"):
        KVBlockAllocator(9).cancel_arriving(again)
    for given in (again, again.ids, None):
        with pytest.raises(InvalidArgumentError, match="what begin_leaving returned"):
            pool.end_leaving(given)
    assert pool.num_arriving_blocks == 1


def test_the_proof_finds_a_block_that_is_in_flight_and_free():
    pool = KVBlockAllocator(4)
    copy = pool.begin_arriving(1)
    pool._free.extend(copy.ids)
    with pytest.raises(InvariantError, match="leaving \\+ arriving is every block"):
        pool.check_invariants()


# Slots.


def test_a_slot_that_leaves_is_neither_findable_nor_free_until_it_has_left():
    allocator = full()
    copy = allocator.begin_leaving([allocator.get_slot(2)])
    assert not allocator.has_state(2)
    assert 102 not in allocator.hash_to_block_id
    assert (allocator.free_count, allocator.num_cached_slots) == (0, 3)
    assert (allocator.num_leaving_slots, allocator.evicted_slots_total) == (1, 0)
    with pytest.raises(MambaSlotCapacityError):
        allocator.allocate_slots_batch([5, 6, 7, 8])
    allocator.check_invariants()
    allocator.end_leaving(copy)
    assert allocator.allocate_slots_batch([5]) == list(copy.ids)


def test_a_slot_that_is_read_does_not_leave_and_its_old_lease_ends_when_it_has():
    allocator = full()
    [lease] = allocator.pin_slots([1])
    before = books(allocator)
    for slots in ([1], [0, 0], [9], [-1]):
        with pytest.raises(InvalidArgumentError):
            allocator.begin_leaving(slots)
    assert books(allocator) == before
    allocator.unpin_slots([lease])
    allocator.begin_leaving([1])
    assert not allocator.is_current(lease)
    with pytest.raises(InvalidArgumentError, match="cached and not pinned"):
        allocator.begin_leaving([1])


def test_a_slot_that_arrives_is_findable_by_one_call():
    allocator = make_allocator()
    copy = allocator.begin_arriving([5, 6])
    assert (allocator.num_arriving_slots, allocator.num_reserved_slots) == (2, 0)
    assert allocator.slots_of([5, 6]) == [-1, -1]
    assert allocator.reserve_slots([5]) == [None]
    assert allocator.skipped_checkpoints_total == 0
    allocator.check_invariants()
    got = allocator.complete_arriving(copy, [5, 7], [50, 70], saved_tokens=[4, 8])
    assert got == list(copy.ids)
    assert allocator.hash_to_block_id == {50: 5, 70: 7}
    assert allocator.num_arriving_slots == 0
    assert allocator.reserve_slots([6]) != [None]


def test_a_state_that_was_saved_meanwhile_is_kept():
    allocator = make_allocator(2)
    copy = allocator.begin_arriving([5])
    [own] = allocator.allocate_slots_batch([5])
    assert allocator.complete_arriving(copy, [5], [50]) == [own]
    assert allocator.free_count == 1


def test_arriving_refuses_what_has_a_slot_or_is_about_to():
    allocator = full(slots=3)
    allocator.invalidate_block(0)
    allocator.reserve_slots([7])
    before = books(allocator)
    for blocks in ([1], [7], [5, 5]):
        with pytest.raises(InvalidArgumentError, match="different and without a slot"):
            allocator.begin_arriving(blocks)
    with pytest.raises(UnknownBlockError):
        allocator.begin_arriving([12])
    with pytest.raises(MambaSlotCapacityError, match=r"^3 .* only 2 free"):
        allocator.begin_arriving([4, 5, 6])
    assert books(allocator) == before
    allocator.begin_arriving([4, 5])
    assert allocator.evicted_slots_total == 2


def test_a_slots_copy_that_is_refused_cancelled_late_or_ended_twice():
    allocator = make_allocator()
    copy = allocator.begin_arriving([5])
    with pytest.raises(InvalidArgumentError, match="equally long"):
        allocator.complete_arriving(copy, [5], [])
    with pytest.raises(InvalidArgumentError, match="what begin_leaving returned"):
        allocator.end_leaving(copy)
    allocator.cancel_arriving(copy)
    with pytest.raises(DoubleFreeError, match="was ended already"):
        allocator.cancel_arriving(copy)
    late, leaving = allocator.begin_arriving([5]), None
    allocator.allocate_slots_batch([6])
    leaving = allocator.begin_leaving([allocator.get_slot(6)])
    allocator.reset()
    taken = allocator.begin_arriving([5, 6, 7, 8])
    allocator.end_leaving(leaving)
    allocator.cancel_arriving(late)
    assert allocator.complete_arriving(late, [5], [50]) == [-1]
    assert (allocator.num_arriving_slots, allocator.free_count) == (len(taken.ids), 0)
    allocator.check_invariants()


def test_what_is_in_flight_shows_in_the_fingerprint():
    def prints(*steps):
        allocator, seen = full(), []
        for step in steps:
            step(allocator)
            seen.append(allocator.fingerprint())
        return seen

    leave = [lambda it, slot=slot: it.begin_leaving([slot]) for slot in (0, 1)]
    arrive = [lambda it, block=block: it.begin_arriving([block]) for block in (6, 7)]
    assert prints(leave[0]) == prints(leave[0]) != prints(leave[1])
    assert prints(arrive[0]) == prints(arrive[0]) != prints(arrive[1])


@pytest.mark.parametrize("spoil", [
    lambda it, copy: it._copies.end(copy),
    lambda it, copy: it._awaited.clear(),
])  # fmt: skip
def test_the_proof_finds_slots_that_arrive_for_nobody(spoil):
    allocator = make_allocator()
    spoil(allocator, allocator.begin_arriving([5]))
    with pytest.raises(InvariantError):
        allocator.check_invariants()


# Both, in a context.


def test_statistics_count_what_is_in_flight():
    context = make_context()
    kv_blocks, slots = context.kv_block_allocator, context.slot_allocator
    kv_blocks.begin_leaving(kv_blocks.allocate_memory_blocks(1))
    kv_blocks.begin_arriving(2)
    slots.begin_leaving(slots.allocate_slots_batch([1, 2, 3]))
    slots.begin_arriving([4, 5, 6, 7])
    stats = context.stats()
    assert (stats.leaving_blocks, stats.arriving_blocks) == (1, 2)
    assert (stats.leaving_slots, stats.arriving_slots) == (3, 4)
    assert stats.used_blocks == stats.cached_slots == 0
    context.check_invariants()


def test_scrubbing_leaves_alone_what_a_copy_reads_or_writes():
    context = make_context(make_config(num_kv_blocks=12, max_slots=4))
    kv_blocks, slots = context.kv_block_allocator, context.slot_allocator
    context.kv_cache[:] = 7
    slots.ssm_states[:] = 7
    leaving = kv_blocks.begin_leaving(kv_blocks.allocate_memory_blocks(1))
    arriving = kv_blocks.begin_arriving(2)
    held = slots.begin_leaving(slots.allocate_slots_batch([1]))
    filled = slots.begin_arriving([4])
    context.scrub()
    kept = np.flatnonzero([bool(context.kv_cache[:, :, b].any()) for b in range(13)]).tolist()
    assert kept == sorted([*leaving.ids, *arriving.ids])
    states = np.flatnonzero([bool(slots.ssm_states[:, s].any()) for s in range(4)]).tolist()
    assert states == sorted([*held.ids, *filled.ids])
