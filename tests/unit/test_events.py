"""Events for listeners: blocks and states stored and removed, requests admitted."""

import numpy as np
import pytest
from kv_rig import cache, prefix
from slot_rig import make_allocator, make_context, save

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
    """Add a listener that is called before all others."""
    for listeners in pool.listeners._listeners.values():
        listeners.insert(0, listener)


def new_events(pool):
    """Return the events since the last call."""
    heard, pool.heard[:] = list(pool.heard), []
    return heard


# Blocks.


def test_tokens_are_those_of_the_moment_and_of_each_block(pool):
    blocks, tokens = pool.allocate_memory_blocks(2), np.arange(6, dtype=np.int32)
    pool.register_kv_block_hashes(blocks, prefix(1, 2), tokens=tokens)
    tokens[:] = 0
    [event] = new_events(pool)
    assert (event.tokens.tolist(), event.block_size_tokens) == ([0, 1, 2, 3, 4, 5], 3)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [], [0.5, 1], [-1, 2], "ab"])
def test_tokens_that_do_not_fit_are_refused_with_and_without_listeners(pool, tokens):
    for it in (pool, KVBlockAllocator(9)):
        blocks = it.allocate_memory_blocks(2)
        with pytest.raises(InvalidArgumentError, match="token"):
            it.register_kv_block_hashes(blocks, prefix(1, 2), tokens=tokens)
        assert it.match_prefix(prefix(1, 2)) == []
        assert it.register_kv_block_hashes([], prefix(), tokens=[]) == []


def test_a_reset_reports_a_removal_of_all_even_if_empty(pool):
    cached = cache(pool, 1)
    new_events(pool)
    pool.reset()
    pool.reset()
    assert new_events(pool) == [
        Removed("block", (*cached,), prefix(1).digests, is_reset=True),
        Removed("block", (), (), is_reset=True),
    ]


def fails(event):
    raise OSError("listener's own fault")


def test_a_listener_that_raises_stops_no_other_and_costs_no_block(pool):
    cached = cache(pool, 1, 2)
    first_listener(pool, fails)
    new_events(pool)
    with pytest.raises(OSError, match="own fault"):
        pool.deregister_blocks(cached)
    assert pool.num_free_blocks == 8
    [block] = pool.allocate_memory_blocks(1)
    with pytest.raises(OSError, match="own fault"):
        pool.register_kv_block_hashes([block], prefix(5))
    assert pool.match_prefix(prefix(5)) == [block]
    assert [type(event).__name__ for event in new_events(pool)] == [
        "Removed", "Stored"
    ]  # fmt: skip


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "make", [lambda: KVBlockAllocator(9), lambda: SlotPool(2, KVBlockAllocator(9))]
)
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


def test_a_listener_gets_the_kinds_that_it_was_added_for():
    listeners, heard, all_heard = Listeners(), [], []
    listeners.add(heard.append, Removed)
    listeners.add(all_heard.append)
    events = [Stored("block", (1,), (b"2",)), Removed("block", (1,), (b"2",))]
    for event in events:
        listeners.put(event)
    listeners.tell()
    assert heard == events[1:]
    assert all_heard == events
    listeners.remove(all_heard.append)
    assert [listeners.wants(kind) for kind in (Admitted, Stored, Removed)] == [False, False, True]
    for listener in (None, 5, "print"):
        with pytest.raises(InvalidArgumentError, match="must be callable"):
            listeners.add(listener)
    for kind in (int, "Stored", None):
        with pytest.raises(InvalidArgumentError, match=r"kinds of events are .*'Stored'"):
            listeners.add(print, Removed, kind)


def test_slots_and_blocks_have_one_list_and_states_go_before_their_blocks():
    blocks = KVBlockAllocator(9)
    slots, heard = SlotPool(2, blocks), []
    assert slots.listeners is blocks.listeners
    blocks.listeners.add(heard.append, Stored, Removed)
    [block] = cache(blocks, 1)
    [slot] = slots.reserve_slots([block])
    slots.commit_reserved([slot], [block])
    blocks.deregister_blocks([block])
    assert [(type(event), event.kind) for event in heard] == [
        (Stored, "block"), (Stored, "state"), (Removed, "state"), (Removed, "block")
    ]  # fmt: skip
    assert (slots.free_count, slots.get_slot(block)) == (2, -1)


# States.


@pytest.fixture
def slots():
    """Return slots: blocks of the prefixes 1 to 4 have slots 3 to 0; four blocks are free."""
    blocks = KVBlockAllocator(9)
    slots = SlotPool(4, blocks)
    slots.cached = [cache(blocks, token)[0] for token in range(1, 5)]
    save(slots, *slots.cached)
    slots.heard = []
    slots.listeners.add(slots.heard.append, Stored, Removed)
    yield slots
    slots.check_invariants()


def test_a_listener_that_raises_costs_no_slot(slots):
    first_listener(slots, fails)
    with pytest.raises(OSError, match="own fault"):
        slots.reserve_slots([7])
    slots.check_invariants()
    assert (slots.free_count, slots.num_cached_slots, slots.num_reserved_slots) == (1, 3, 0)
    [slot] = slots.reserve_slots([slots.cached[0]])
    with pytest.raises(OSError, match="own fault"):
        slots.commit_reserved([slot], [slots.cached[0]])
    assert slots.get_slot(slots.cached[0]) == slot
    slots.kv_blocks.deregister_blocks([])
    assert [type(event) for event in new_events(slots)] == [Removed, Stored]


def test_states_of_one_call_are_one_event(slots):
    given = [slots.get_slot(block) for block in slots.cached]
    digests = tuple(prefix(token).digests[0] for token in range(1, 5))
    slots._invalidate_blocks_batch(slots.cached)
    assert new_events(slots) == [Removed("state", (*slots.cached,), digests, slots=(*given,))]
    save(slots, 6)  # not registered
    slots.invalidate_block(6)
    [slot] = save(slots, slots.cached[0])
    new_events(slots)
    slots.reset()
    first = (slots.cached[0],), digests[:1]
    assert new_events(slots) == [Removed("state", *first, slots=(slot,), is_reset=True)]


def test_states_of_blocks_that_are_not_registered_are_not_announced(pool):
    slots = SlotPool(4, pool)
    [cached], [held] = cache(pool, 1), pool.allocate_memory_blocks(1)
    new_events(pool)
    slots.commit_reserved(slots.reserve_slots([held, cached]), [held, cached])
    slots.invalidate_block(held)
    slots.invalidate_block(cached)
    assert [(type(event), event.block_ids) for event in new_events(pool)] == [
        (Stored, (cached,)),
        (Removed, (cached,)),
    ]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_slots_that_never_reach_the_caller_are_taken_back(error):
    blocks = KVBlockAllocator(9)
    allocator = make_allocator(context=make_context(kv_block_allocator=blocks))
    [cached] = cache(blocks, 1)

    def broken(event):
        raise error("listener's own fault")

    allocator.listeners.add(broken)
    with pytest.raises(error, match="own fault"):
        allocator.allocate_slots_batch([cached])
    assert not allocator.has_state(cached)
    allocator.listeners.remove(broken)
    save(allocator, cached)
    allocator.listeners.add(broken)
    with pytest.raises(error, match="own fault"):
        allocator._evict_lru_slots_batch(1)
    assert allocator.free_count == allocator.max_slots
    allocator.check_invariants()


def test_slots_notify_the_current_listeners_of_their_blocks(pool):
    """A prefix cache replaces the listeners of its blocks after the slots are made."""
    slots = SlotPool(2, pool)
    pool.listeners = Listeners()
    heard = []
    pool.listeners.add(heard.append)
    [block] = cache(pool, 1)
    save(slots, block)
    assert [event.kind for event in heard] == ["block", "state"]
    assert new_events(pool) == []
