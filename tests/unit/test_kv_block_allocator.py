"""KVBlockAllocator: each rule by itself, and faults of other systems that must not return."""

import numpy as np
import pytest
import torch
from kv_rig import by_id, cache, prefix, snapshot
from slot_rig import save
from work import lines_executed

from mamba_cache.cache import AdaptiveSlotPolicy, BlockHashes, KVBlockAllocator, SlotPool
from mamba_cache.errors import (
    HashConflictError,
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


@pytest.mark.parametrize("has_used", [False, True])
def test_a_cached_block_that_is_retained_twice_has_two_references(pool, has_used):
    cached, used = pool.allocate_memory_blocks(2)
    pool.register_kv_block_hashes([cached], prefix(1))
    pool.release_memory_blocks([cached])
    pool.retain_memory_blocks([cached, cached, *[used] * has_used])
    assert pool.block_ref_counts[[cached, used]].tolist() == [2, 1 + has_used]
    assert pool.num_cached_blocks == 0


@pytest.mark.parametrize(
    ("bad", "error"),
    [([-1], UnknownBlockError), ([9], UnknownBlockError), ([0.0], InvalidArgumentError),
     (0, InvalidArgumentError), (np.array([[0]]), InvalidArgumentError)],
    ids=repr,
)  # fmt: skip
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


@pytest.mark.parametrize("bad", [-1, True, 1.0, "1"])
def test_bad_counts_are_refused(pool, bad):
    with pytest.raises(InvalidArgumentError, match="num_blocks must be an int >= 0"):
        pool.allocate_memory_blocks(bad)
    with pytest.raises(InvalidArgumentError, match=r"pool_size must be an int in \[2, "):
        KVBlockAllocator(bad)


def test_listeners_see_finished_bookkeeping(pool):
    seen = []

    def look(event):
        pool.check_invariants()
        seen.append([pool.find_block(digest) for digest in event.digests])
        seen.append([int(pool.block_hashes[block_id]) for block_id in event.block_ids])

    pool.listeners.add(look, Removed)
    pool.listeners.add(look, Removed)
    cache(pool, 1, 2)
    pool.allocate_memory_blocks(8)
    assert seen == [[None, None], [-1, -1]] * 2


@pytest.mark.parametrize("forged", [by_id(1, 5, 6), by_id(1, 1, 6)])
def test_blocks_behind_a_forged_digest_stay_private(pool, forged):
    """Two prefixes share a digest, which clients can find for xxh3_128. No commit is refused."""
    [known] = pool.register_kv_block_hashes(pool.allocate_memory_blocks(1), by_id(5))
    block_ids = pool.allocate_memory_blocks(3)
    found = [block_ids[0], None, None]
    assert pool.register_kv_block_hashes(block_ids, forged) == found
    assert pool.match_prefix(by_id(5)) == [known]
    assert pool.match_prefix(forged)[:1] == block_ids[:1]
    assert pool.match_prefix(by_id(6)) == []


def pool_that_asks_states():
    """Return a pool of 5 blocks that kept the first for its state and evicted the second."""
    pool = KVBlockAllocator(5)
    slots = SlotPool(2, pool, policy=AdaptiveSlotPolicy())
    save(slots, *cache(pool, 1))
    cache(pool, 2)
    cache(pool, 3)
    pool.allocate_memory_blocks(2)
    return pool, slots


def test_states_of_freed_slots_do_not_order_blocks():
    pool, slots = pool_that_asks_states()
    assert [len(pool.match_prefix(prefix(token))) for token in (1, 2, 3)] == [1, 0, 1]
    del slots
    assert len(pool.allocate_memory_blocks(2)) == 2
    assert pool.num_cached_blocks == 0


@pytest.mark.parametrize("policy", [None, AdaptiveSlotPolicy()], ids=["lru", "adaptive"])
def test_blocks_whose_states_lie_in_former_slots_can_be_evicted(policy):
    """Eviction skipped a block with a state, which a later slot pool does not have."""
    pool, former = pool_that_asks_states()
    slots = SlotPool(2, pool, policy=policy)
    assert former.has_state(pool.match_prefix(prefix(1))[0])
    pool.check_invariants()
    assert len(pool.allocate_memory_blocks(2)) == 2
    assert pool.num_cached_blocks == 0
    assert slots.free_count == 2


def test_blocks_whose_states_a_reset_forgets_can_be_evicted():
    """Eviction skipped a block with a state. A reset drops the state and queues the block."""
    pool, slots = pool_that_asks_states()
    slots.reset()
    pool.check_invariants()
    assert len(pool.allocate_memory_blocks(2)) == 2
    assert pool.num_cached_blocks == 0


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
        (by_id(1, 2), {"parent_digest": 0}, "parent_digest must be a bytes, got 0"),
    ],
)
def test_bad_hashes_are_refused_and_nothing_changes(pool, hashes, options, message):
    block_ids = pool.allocate_memory_blocks(2)
    before = snapshot(pool)
    with pytest.raises(InvalidArgumentError, match=message):
        pool.register_kv_block_hashes(block_ids, hashes, **options)
    assert snapshot(pool) == before


def test_prefixes_that_share_an_id_are_distinguished(pool):
    mine, foreign = (BlockHashes([b"same id " + tail]) for tail in (b"of mine.", b"foreign."))
    one, other = pool.allocate_memory_blocks(2)
    assert pool.register_kv_block_hashes([one], mine) == pool.match_prefix(mine) == [one]
    assert pool.match_prefix(foreign) == []
    assert pool.register_kv_block_hashes([other], foreign) == pool.match_prefix(foreign) == [other]
    assert (pool.find_block(mine.digests[0]), pool.find_block(foreign.digests[0])) == (one, other)
    assert pool.find_block(b"unknown") is None
    for call, given in ((pool.match_prefix, list(mine)), (pool.find_block, mine[0])):
        with pytest.raises(InvalidArgumentError, match="got "):
            call(given)


def test_nothing_is_registered_without_prefix_caching():
    pool = KVBlockAllocator(5, enable_prefix_caching=False)
    block_ids = pool.allocate_memory_blocks(2)
    assert pool.register_kv_block_hashes(block_ids, prefix(1, 2)) == [None, None]
    assert pool.match_prefix(prefix(1, 2)) == []


def test_many_blocks_cost_few_lines_each():
    """A prompt of 32,768 tokens has 2,048 blocks of 16: work per block must run in C."""

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
                pool.deregister_blocks([1]),
                pool.block_hashes.__setitem__(1, pool.block_hashes[0]),
            ),
            "block_hashes and the registered",
        ),
        (lambda pool: pool._rows.push([int(pool._rows.free[0])]), "free twice"),
        (lambda pool: setattr(pool._rows, "num_free", 0), "is every block"),
        (lambda pool: pool.block_ref_counts.__setitem__(pool._rows.free[0], 1), "is every block"),
        (lambda pool: pool._num_cached_children.fill(0), "children are those of their parents"),
        (lambda pool: pool._first_children.fill(-1), "children are those of their parents"),
        (lambda pool: pool._previous.fill(3), "children are those of their parents"),
        (lambda pool: pool._next.fill(0), "children are those of their parents"),
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
