"""KVBlockAllocator: each rule by itself, and faults of other systems that must not return."""

import numpy as np
import pytest
import torch
from kv_rig import cache, prefix, snapshot
from work import lines_executed

from mamba_cache.cache import KVBlockAllocator
from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import (
    BlockCapacityError,
    DoubleFreeError,
    InvalidArgumentError,
    InvariantError,
    UnknownBlockError,
)
from mamba_cache.events import Removed


@pytest.fixture
def pool():
    pool = KVBlockAllocator(9)
    yield pool
    pool.check_invariants()


def test_the_dummy_block_is_the_last_and_never_handed_out(pool):
    assert (pool.pool_size, pool.dummy_block_id, pool.num_free_blocks) == (9, 8, 8)
    assert sorted(pool.allocate_memory_blocks(8)) == list(range(8))
    for call in (pool.retain_memory_blocks, pool.release_memory_blocks, pool.deregister_blocks):
        with pytest.raises(UnknownBlockError, match=r"must be in \[0, 8\), got \["):
            call([8])


def test_arrays_are_exposed_as_tensors_of_the_same_memory():
    pool = KVBlockAllocator(5, as_tensor=torch.from_numpy)
    one, two = pool.allocate_memory_blocks(2)
    hashes = prefix(1)
    pool.register_kv_block_hashes([one], hashes)
    pool.retain_memory_blocks([two])
    pool.release_memory_blocks([one])
    assert pool.block_ref_counts.tolist() == [0, 2, 0, 0, 0]
    assert pool.block_timestamps.tolist() == [3, 2, 0, 0, 0]
    assert pool.block_hashes.tolist() == [hashes[0], -1, -1, -1, -1]
    dtypes = (torch.int32, torch.int64, torch.int64)
    arrays = (pool.block_ref_counts, pool.block_timestamps, pool.block_hashes)
    assert tuple(array.dtype for array in arrays) == dtypes
    pool.reset()
    assert pool.block_hashes.tolist() == [-1] * 5


def test_a_parent_is_never_evicted_before_its_child(pool):
    """Megatron's LRU did, before it became leaf-first: the child could never match again."""
    root, leaf = cache(pool, 1, 2)
    pool.retain_memory_blocks([leaf])  # The child is now the more recent of the two.
    pool.release_memory_blocks([leaf])
    pool.allocate_memory_blocks(6)
    assert pool.allocate_memory_blocks(1) == [leaf]
    assert pool.match_prefix(prefix(1, 2)) == [root]
    assert pool.allocate_memory_blocks(1) == [root]


def test_a_cached_parent_of_a_used_child_goes_last_but_goes(pool):
    """Found by search: nobody could have it, and a request that fitted was told that it did not.

    The child's request holds a private duplicate of the parent, so the parent is cached.
    """
    parent = cache(pool, 1)
    duplicate, child = pool.allocate_memory_blocks(2)
    assert pool.register_kv_block_hashes([duplicate, child], prefix(1, 2)) == [*parent, child]
    newer = cache(pool, 3)
    pool.allocate_memory_blocks(4)
    before = snapshot(pool)
    with pytest.raises(BlockCapacityError) as caught:
        pool.allocate_memory_blocks(3)
    assert (caught.value.required, caught.value.available) == (3, 2)
    assert snapshot(pool) == before
    assert pool.allocate_memory_blocks(2) == [*newer, *parent]
    pool.register_kv_block_hashes(parent, prefix(1))
    assert pool.match_prefix(prefix(1, 2)) == [*parent, child]


def test_double_free_is_refused(pool):
    """SGLang's slot allocator accepted it silently."""
    block_ids = pool.allocate_memory_blocks(2)
    pool.retain_memory_blocks([block_ids[1]])
    before = snapshot(pool)
    for given in ([block_ids[1], block_ids[0], block_ids[0]], [7], [block_ids[0], 5]):
        with pytest.raises(DoubleFreeError, match="references"):
            pool.release_memory_blocks(given)
        assert snapshot(pool) == before
    pool.release_memory_blocks([block_ids[1], *block_ids])
    assert pool.num_free_blocks == 8
    cached = cache(pool, 1)
    with pytest.raises(DoubleFreeError, match="has 0 references"):
        pool.release_memory_blocks(cached)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([-1], UnknownBlockError),
        ([9], UnknownBlockError),
        ([0.0], InvalidArgumentError),
        ([True], InvalidArgumentError),
        (0, InvalidArgumentError),
        ("0", InvalidArgumentError),
        (np.array(0), InvalidArgumentError),
        (np.array([[0]]), InvalidArgumentError),
    ],
    ids=repr,
)
def test_bad_ids_are_refused_and_nothing_changes(pool, bad, error):
    first = pool.allocate_memory_blocks(1)
    before = snapshot(pool)
    given = first + bad if isinstance(bad, list) else bad
    with pytest.raises(error):
        pool.retain_memory_blocks(given)
    with pytest.raises(error):
        pool.register_kv_block_hashes(given, prefix(1, 2))
    with pytest.raises(error):
        pool.release_memory_blocks(given)
    with pytest.raises(error):
        pool.deregister_blocks(given)
    assert snapshot(pool) == before


def test_a_free_block_cannot_be_retained_or_registered(pool):
    given = [*pool.allocate_memory_blocks(1), 5]
    before = snapshot(pool)
    with pytest.raises(UnknownBlockError, match="block 5 is free"):
        pool.retain_memory_blocks(given)
    with pytest.raises(UnknownBlockError, match="block 5 is free"):
        pool.register_kv_block_hashes(given, prefix(1, 2))
    assert snapshot(pool) == before


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "1", None, 2**20 + 1])
def test_bad_numbers_of_references_are_refused(pool, bad):
    given = pool.allocate_memory_blocks(1)
    before = snapshot(pool)
    with pytest.raises(
        InvalidArgumentError, match=r"num_references must be an int in \[1, 1048576"
    ):
        pool.retain_memory_blocks(given, bad)
    assert snapshot(pool) == before


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1", None])
def test_bad_counts_are_refused(pool, bad):
    with pytest.raises(InvalidArgumentError, match="num_blocks must be an int >= 0"):
        pool.allocate_memory_blocks(bad)
    with pytest.raises(InvalidArgumentError, match=r"pool_size must be an int in \[2, "):
        KVBlockAllocator(bad)


def test_an_unknown_policy_is_refused_and_a_foreign_one_understood():
    with pytest.raises(InvalidArgumentError, match="'fifo'"):
        KVBlockAllocator(5, eviction_policy="fifo")
    assert KVBlockAllocator(5, eviction_policy="lru").eviction_policy is EvictionPolicy.LRU


def test_listeners_see_finished_bookkeeping(pool):
    seen = []

    def look(event):
        pool.check_invariants()
        seen.append([pool.find_block(hash_id) for hash_id in event.hash_ids])
        seen.append([int(pool.block_hashes[block_id]) for block_id in event.block_ids])

    pool.listeners.add(look, Removed)
    pool.listeners.add(look, Removed)
    cache(pool, 1, 2)
    pool.allocate_memory_blocks(8)
    assert seen == [[None, None], [-1, -1]] * 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_listener_that_raises_loses_no_block_and_stops_no_other(pool, error):
    told = []

    def fail(event):
        told.append("failed")
        raise error("listener's own fault")

    pool.listeners.add(fail, Removed)
    pool.listeners.add(fail, Removed)
    pool.listeners.add(lambda event: told.append(event.block_ids), Removed)
    (block_id,) = cache(pool, 1)
    with pytest.raises(error, match="listener's own fault"):
        pool.allocate_memory_blocks(8)
    assert told == ["failed", "failed", (block_id,)]
    assert pool.num_free_blocks == 8
    pool.check_invariants()


def test_many_blocks_cost_few_lines_each():
    """A prompt of 32,768 tokens has 2,048 blocks of 16: what is done for each is done in C."""

    def life(pool, num_blocks, hashes):
        block_ids = pool.allocate_memory_blocks(num_blocks)
        pool.register_kv_block_hashes(block_ids, hashes)
        pool.release_memory_blocks(block_ids)
        pool.retain_memory_blocks(block_ids)
        pool.release_memory_blocks(block_ids)

    def lines(num_blocks):
        pool, hashes = KVBlockAllocator(num_blocks + 1), prefix(*range(num_blocks))
        return lines_executed(lambda: life(pool, num_blocks, hashes))

    assert lines(900) - lines(100) <= 6 * 800


@pytest.mark.parametrize(
    ("breach", "statement"),
    [
        (lambda pool: pool.block_ref_counts.__setitem__(4, -1), "negative"),
        (lambda pool: pool.block_ref_counts.__setitem__(8, 1), "is every block"),
        (lambda pool: pool.block_hashes.__setitem__(5, 7), "block_hashes and the registered"),
        (
            lambda pool: (
                pool.deregister_blocks([0]),
                pool.block_hashes.__setitem__(0, pool.block_hashes[1]),
            ),
            "block_hashes and the registered",
        ),
        (lambda pool: pool._rows.push([int(pool._rows.free[0])]), "free twice"),
        (lambda pool: setattr(pool._rows, "num_free", 0), "is every block"),
        (lambda pool: pool.block_ref_counts.__setitem__(pool._rows.free[0], 1), "is every block"),
        (lambda pool: pool._num_children.fill(0), "children are counted"),
        (lambda pool: pool._num_cached_children.fill(0), "children are counted"),
        (lambda pool: pool._orphans.update({7: [1, 0]}), "children are counted"),
        (lambda pool: pool._leaves.clear(), "the queue"),
        (lambda pool: (pool._leaves.pop(), pool._leaves.push(7, 0)), "the queue"),
        (lambda pool: setattr(pool, "_num_cached", 0), "counted right"),
    ],
)
def test_check_invariants_finds(breach, statement):
    pool = KVBlockAllocator(9)
    cache(pool, 1, 2)
    pool.check_invariants()
    breach(pool)
    with pytest.raises(InvariantError, match=statement):
        pool.check_invariants()
