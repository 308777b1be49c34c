"""The events that listeners get: blocks and states stored and removed, requests admitted."""

import numpy as np
import pytest
from kv_rig import cache, prefix
from slot_rig import full, make_allocator, make_pool

from mamba_cache.cache import KVBlockAllocator, SlotPool
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.events import Admitted, Listeners, Removed, Stored


@pytest.fixture
def pool():
    pool = KVBlockAllocator(9)
    pool.heard = []
    pool.listeners.add(pool.heard.append, Stored, Removed)
    yield pool
    pool.check_invariants()


def first_listener(pool, listener):
    """Add a listener that is called before those that are there."""
    for listeners in pool.listeners._listeners.values():
        listeners.insert(0, listener)


def told(pool):
    """What was announced since the last look."""
    heard, pool.heard[:] = list(pool.heard), []
    return heard


# Blocks.


def test_tokens_are_those_of_the_moment_and_of_each_block(pool):
    blocks, tokens = pool.allocate_memory_blocks(2), np.arange(6, dtype=np.int32)
    pool.register_kv_block_hashes(blocks, prefix(1, 2), tokens=tokens)
    tokens[:] = 0
    [event] = told(pool)
    assert (event.tokens.tolist(), event.block_size_tokens) == ([0, 1, 2, 3, 4, 5], 3)


def test_what_nobody_told_is_not_made_up(pool):
    hashes = prefix(1, 2)
    [block] = pool.allocate_memory_blocks(1)
    pool.register_kv_block_hashes([block], hashes[1:], parent_hash=hashes[0])
    assert told(pool) == [
        Stored("block", (block,), (hashes[1],), digests=hashes.digests[1:], parent_hash=hashes[0])
    ]


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [], [0.5, 1], [-1, 2], "ab"])
def test_tokens_that_do_not_fit_are_refused_whether_or_not_somebody_listens(pool, tokens):
    for it in (pool, KVBlockAllocator(9)):
        blocks = it.allocate_memory_blocks(2)
        with pytest.raises(InvalidArgumentError, match="token"):
            it.register_kv_block_hashes(blocks, prefix(1, 2), tokens=tokens)
        assert it.match_prefix(prefix(1, 2)) == []
        assert it.register_kv_block_hashes([], prefix(), tokens=[]) == []


def test_tokens_are_worth_gathering_only_if_somebody_listens(pool):
    assert pool.listeners.wants(Stored)
    assert not KVBlockAllocator(9).listeners.wants(Stored)


def test_a_reset_says_that_all_is_gone_even_if_there_was_nothing(pool):
    cached = cache(pool, 1)
    told(pool)
    pool.reset()
    pool.reset()
    hashes = prefix(1)
    assert told(pool) == [
        Removed("block", (*cached,), (*hashes,), digests=hashes.digests, is_reset=True),
        Removed("block", (), (), is_reset=True),
    ]


def fails(event):
    raise OSError("listener's own fault")


def test_a_listener_that_raises_stops_no_other_and_costs_no_block(pool):
    cached = cache(pool, 1, 2)
    first_listener(pool, fails)
    told(pool)
    with pytest.raises(OSError, match="own fault"):
        pool.deregister_blocks(cached)
    assert pool.num_free_blocks == 8
    [block] = pool.allocate_memory_blocks(1)
    with pytest.raises(OSError, match="own fault"):
        pool.register_kv_block_hashes([block], prefix(5))
    assert pool.match_prefix(prefix(5)) == [block]
    assert [type(event).__name__ for event in told(pool)] == [
        "Removed", "Stored"
    ]  # fmt: skip


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("make", [lambda: KVBlockAllocator(9), lambda: make_pool(2, 9)])
def test_a_reset_is_done_whatever_a_listener_raises(make, error):
    pool = make()

    def refuses(event):
        raise error("not now")

    pool.listeners.add(refuses)
    with pytest.raises(error, match="not now"):
        pool.reset()
    pool.check_invariants()
    pool.listeners.remove(refuses)
    pool.reset()


# The list of listeners.


@pytest.mark.parametrize("listener", [None, 5, "print"])
def test_a_listener_must_be_callable(listener):
    with pytest.raises(InvalidArgumentError, match="must be callable"):
        Listeners().add(listener)


@pytest.mark.parametrize("kind", [int, "Stored", None])
def test_a_kind_of_events_must_be_one(kind):
    with pytest.raises(InvalidArgumentError, match=r"kinds of events are .*'Stored'"):
        Listeners().add(print, Removed, kind)


def test_a_listener_gets_the_kinds_that_it_was_added_for():
    listeners, heard, all_heard = Listeners(), [], []
    listeners.add(heard.append, Removed)
    listeners.add(all_heard.append)
    events = [Stored("block", (1,), (2,)), Removed("block", (1,), (2,))]
    for event in events:
        listeners.put(event)
    listeners.tell()
    assert heard == events[1:]
    assert all_heard == events
    listeners.remove(all_heard.append)
    assert [listeners.wants(kind) for kind in (Admitted, Stored, Removed)] == [False, False, True]


def test_slots_and_blocks_have_one_list_and_states_go_before_their_blocks():
    blocks = KVBlockAllocator(9)
    slots, heard = SlotPool(2, blocks), []
    assert slots.listeners is blocks.listeners
    blocks.listeners.add(heard.append, Stored, Removed)
    [block] = cache(blocks, 1)
    [slot] = slots.reserve_slots([block])
    slots.commit_reserved([slot], [block], [prefix(1)[0]])
    blocks.deregister_blocks([block])
    assert [(type(event), event.kind) for event in heard] == [
        (Stored, "block"), (Stored, "state"), (Removed, "state"), (Removed, "block")
    ]  # fmt: skip
    assert (slots.free_count, slots.get_slot(block)) == (2, -1)


# States.


@pytest.fixture
def allocator():
    """Blocks 0 to 3 have slots 3 to 0, and hashes 100 to 103."""
    allocator = full()
    allocator.heard = []
    allocator.listeners.add(allocator.heard.append, Stored, Removed)
    yield allocator
    allocator.check_invariants()


def test_a_listener_that_raises_costs_no_slot(allocator):
    first_listener(allocator, fails)
    for take in (
        lambda: allocator.reserve_slots([7]),
        lambda: allocator._evict_lru_slots_batch(1),
    ):
        with pytest.raises(OSError, match="own fault"):
            take()
        allocator.check_invariants()
    assert (allocator.free_count, allocator.num_cached_slots) == (2, 2)
    assert allocator.num_reserved_slots == 0
    [slot] = allocator.reserve_slots([7])
    with pytest.raises(OSError, match="own fault"):
        allocator.commit_reserved([slot], [7], [70])
    assert allocator.get_slot(7) == slot
    assert len(told(allocator)) == 3


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_slots_whose_caller_never_learns_them_are_taken_back(error):
    allocator, heard = make_allocator(), []

    def fails(event):
        heard.append(event)
        raise error("listener's own fault")

    allocator.listeners.add(fails)
    allocator.register_block_hashes_batch([5], [50])
    with pytest.raises(error, match="own fault"):
        allocator.allocate_slots_batch([5])
    assert not allocator.has_state(5)
    allocator.listeners.remove(fails)
    allocator.listeners.add(heard.append)
    [slot] = allocator.allocate_slots_batch([6])
    assert allocator.get_slot(6) == slot
    assert heard == [
        Stored("state", (5,), (50,), slots=(slot,)),
        Removed("state", (5,), (50,), slots=(slot,)),
    ]
    allocator.check_invariants()


# A context.
