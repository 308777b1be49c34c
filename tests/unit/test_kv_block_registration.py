"""KVBlockAllocator: how blocks become findable, and cease to be."""

import numpy as np
import pytest
from kv_rig import by_id, cache, prefix, snapshot

from mamba_cache.cache import BlockHashes, KVBlockAllocator
from mamba_cache.errors import (
    HashConflictError,
    InvalidArgumentError,
)


@pytest.fixture
def pool():
    pool = KVBlockAllocator(9)
    yield pool
    pool.check_invariants()


def test_another_hash_for_a_registered_block_is_refused(pool):
    block_ids = pool.allocate_memory_blocks(2)
    pool.register_kv_block_hashes(block_ids[:1], prefix(1))
    before = snapshot(pool)
    with pytest.raises(HashConflictError, match="carries hash"):
        pool.register_kv_block_hashes(block_ids[::-1], prefix(2, 3))
    with pytest.raises(HashConflictError, match="carries hash"):
        pool.register_kv_block_hashes([block_ids[1], block_ids[1]], prefix(2, 3))
    assert snapshot(pool) == before


@pytest.mark.parametrize(
    ("hashes", "options", "message"),
    [
        (by_id(1), {}, "one length, got 2 and 1"),
        ([1, 2], {}, "must be a BlockHashes, got list"),
        (by_id(1, 2), {"parent_hash": 0}, "got 0"),
        (by_id(1, 2), {"parent_hash": "1"}, "got '1'"),
        (by_id(1, 2), {"parent_hash": 2**63}, "got 9223372036854775808"),
    ],
)
def test_bad_hashes_are_refused_and_nothing_changes(pool, hashes, options, message):
    block_ids = pool.allocate_memory_blocks(2)
    before = snapshot(pool)
    with pytest.raises(InvalidArgumentError, match=message):
        pool.register_kv_block_hashes(block_ids, hashes, **options)
    assert snapshot(pool) == before


def test_a_hash_named_twice_in_a_call_is_no_ring(pool):
    first, second = pool.allocate_memory_blocks(2)
    held = pool.register_kv_block_hashes([first, second, first], by_id(11, 22, 11))
    assert held == [first, second, first]
    pool.release_memory_blocks([first, second])
    assert len(pool.allocate_memory_blocks(8)) == 8


def test_registering_does_not_walk_the_prefix(pool):
    cached = cache(pool, 1, 2, 3, 4, 5)
    hashes = prefix(1, 2, 3, 4, 5, 6)
    found = []

    class Watched(dict):
        def get(self, key):
            found.append(key)
            return super().get(key)

    pool._block_of = Watched(pool._block_of)
    [block_id] = pool.allocate_memory_blocks(1)
    pool.register_kv_block_hashes([block_id], hashes[5:], parent_hash=hashes[4])
    assert len(found) < len(cached)


def test_an_id_collision_never_serves_the_other_prefix(pool):
    mine, foreign = (BlockHashes([b"same id " + tail]) for tail in (b"of mine.", b"foreign."))
    block_ids = pool.allocate_memory_blocks(2)
    assert pool.register_kv_block_hashes(block_ids[:1], mine) == block_ids[:1]
    assert pool.register_kv_block_hashes(block_ids[1:], foreign) == [None]
    assert pool.register_kv_block_hashes(block_ids[1:], foreign) == [None]
    assert pool.hash_collisions_total == 2
    assert pool.match_prefix(foreign) == []
    assert pool.match_prefix(mine) == block_ids[:1]
    with pytest.raises(InvalidArgumentError, match="got list"):
        pool.match_prefix(list(mine))
    assert pool.find_block(mine[0], foreign.digests[0]) is None
    assert pool.find_block(mine[0], mine.digests[0]) == pool.find_block(mine[0]) == block_ids[0]


@pytest.mark.parametrize("num_children", [2, 12])
def test_many_children_leave_the_block_that_their_parent_moved_to(num_children):
    pool = KVBlockAllocator(num_children + 4)
    [parent] = cache(pool, 1)
    children = pool.allocate_memory_blocks(num_children)
    for block_id in children:
        branch = prefix(1, 100 + block_id)
        pool.register_kv_block_hashes([block_id], branch[1:], parent_hash=branch[0])
    pool.release_memory_blocks(children)
    pool.deregister_blocks([parent])
    [other, anew] = pool.allocate_memory_blocks(2)
    pool.register_kv_block_hashes([anew], prefix(1))
    pool.release_memory_blocks([other, anew])
    pool.deregister_blocks(children)
    pool.check_invariants()
    assert pool.match_prefix(prefix(1)) == [anew]
    assert len(pool.allocate_memory_blocks(num_children + 3)) == num_children + 3


def test_children_of_a_parent_that_is_not_registered_are_counted(pool):
    root = prefix(1)[0]
    children = pool.allocate_memory_blocks(2)
    for block_id, token in zip(children, (2, 3), strict=True):
        pool.register_kv_block_hashes([block_id], prefix(1, token)[1:], parent_hash=root)
        pool.check_invariants()
    pool.release_memory_blocks(children)
    parent = pool.allocate_memory_blocks(1)
    pool.register_kv_block_hashes(parent, prefix(1))
    pool.check_invariants()
    pool.release_memory_blocks(parent)
    pool.allocate_memory_blocks(5)
    assert pool.allocate_memory_blocks(3) == [*children, *parent]


@pytest.mark.parametrize(("parent", "private"), [(22, 1), (33, 2)])
def test_ids_of_digests_that_form_a_ring_leave_one_block_private(pool, parent, private):
    block_ids = pool.allocate_memory_blocks(4)
    hashes = by_id(11, 22, 33, 44)
    expected = [*block_ids[:private], None, *block_ids[private + 1 :]]
    assert pool.register_kv_block_hashes(block_ids, hashes, parent_hash=parent) == expected
    assert pool.hash_collisions_total == 1
    pool.check_invariants()
    pool.release_memory_blocks(block_ids)
    assert len(pool.allocate_memory_blocks(8)) == 8


@pytest.mark.parametrize("root", [None, 99])
def test_a_parent_of_children_that_were_there_before_closes_no_ring_by_itself(pool, root):
    first, second, third, child = pool.allocate_memory_blocks(4)
    pool.register_kv_block_hashes([first, second], by_id(11, 22), parent_hash=root)
    pool.register_kv_block_hashes([child], by_id(44), parent_hash=33)
    assert pool.register_kv_block_hashes([third], by_id(33), parent_hash=22) == [third]
    assert pool.hash_collisions_total == 0


def test_nothing_is_registered_without_prefix_caching():
    pool = KVBlockAllocator(5, enable_prefix_caching=False)
    block_ids = pool.allocate_memory_blocks(2)
    assert pool.register_kv_block_hashes(block_ids, prefix(1, 2)) == [None, None]
    assert pool.match_prefix(prefix(1, 2)) == []
    pool.release_memory_blocks(block_ids)
    assert pool.num_free_blocks == 4


def test_counts_of_a_tree_are_as_small_as_said():
    pool = KVBlockAllocator(3)
    assert pool._hashes.dtype == pool._parents.dtype == np.int64
    assert pool._num_children.dtype == pool._num_cached_children.dtype == np.int32


def test_nothing_is_registered_under_a_parent(pool):
    assert pool.register_kv_block_hashes([], prefix(), parent_hash=7) == []
