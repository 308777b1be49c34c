"""Which cached KV blocks go first where somebody knows of states."""

import numpy as np
import pytest
from kv_rig import by_id

from mamba_cache.cache import KVBlockAllocator
from mamba_cache.cache.kv_block_allocator import LAST_RESORT, LeafQueue
from mamba_cache.events import Removed


class States:
    """Blocks with a state, in the order in which they may go."""

    def __init__(self, *blocks):
        self.blocks = list(blocks)
        self.asked = 0

    def free_states(self, block_ids, hash_ids):
        pass

    def holds_state(self, block_id):
        self.asked += 1
        return block_id in self.blocks

    def have_states(self, blocks):
        return np.isin(blocks, self.blocks)

    def first_to_go(self, blocks):
        return next(b for b in self.blocks if b in blocks.tolist())


def queue_of(states, **priorities):
    queue = LeafQueue()
    queue.find_states = lambda: states
    for name, priority in priorities.items():
        queue.push(int(name[1:]), priority)
    return queue


def drain(queue):
    queue.look()
    order = []
    while len(queue):
        order.append(queue.pop())
    return order


def test_without_states_the_least_recent_goes_first():
    assert drain(queue_of(None, b1=5, b2=3, b3=4)) == [2, 3, 1]
    queue = LeafQueue()
    queue.push(1, 7)
    assert queue.push_pop(2, 6) == 2
    assert queue.push_pop(3, 8) == 1


def test_blocks_without_a_state_go_before_all_others():
    assert drain(queue_of(States(2, 3), b1=5, b2=3, b3=4, b4=9)) == [1, 4, 2, 3]


def test_blocks_with_a_state_go_as_their_owner_says():
    queue = queue_of(States(9, 2, 3), b2=1, b3=2, b9=3)
    assert queue.push_pop(5, 99) == 5
    assert drain(queue) == [9, 2, 3]


def test_a_parent_of_used_blocks_goes_last():
    assert drain(queue_of(States(2), b1=LAST_RESORT + 1, b2=3)) == [2, 1]


def test_a_block_that_has_lost_its_state_goes_first():
    states = States(2, 3)
    queue = queue_of(states, b2=1, b3=2, b4=9)
    assert queue.pop() == 4
    states.blocks.remove(3)
    assert 3 in queue
    assert drain(queue) == [3, 2]


def test_a_block_set_aside_can_be_pushed_anew_or_removed():
    states = States(2, 3, 6)
    queue = queue_of(states, b2=1, b3=2, b4=9, b6=4)
    assert queue.pop() == 4
    queue.push(2, 8)
    queue.discard([3, 77])
    assert (len(queue), 2 in queue, 3 in queue) == (2, True, False)
    queue.clear()
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()


def test_who_is_gone_is_not_asked():
    states = States(2)
    knows = [states]
    queue = LeafQueue()
    queue.find_states = lambda: knows[0]
    for block, priority in ((2, 1), (3, 2)):
        queue.push(block, priority)
    assert queue.pop() == 3
    knows[0] = None
    assert drain(queue) == [2]


def test_the_allocator_evicts_what_no_state_needs_before_what_one_needs():
    pool = KVBlockAllocator(8)
    states = States()
    pool.attach_slots(states)
    pool.ask_states()
    old, new = pool.allocate_memory_blocks(3), pool.allocate_memory_blocks(3)
    for blocks, first in ((old, 1), (new, 11)):
        pool.register_kv_block_hashes(blocks, by_id(first, first + 1, first + 2))
        pool.release_memory_blocks(blocks)
    states.blocks = [old[2], new[1]]
    gone = []
    pool.listeners.add(lambda event: gone.extend(event.block_ids), Removed)
    pool.release_memory_blocks(pool.allocate_memory_blocks(2))
    assert gone == [new[2]]  # the older ones lead up to a state
    pool.check_invariants()
    pool.allocate_memory_blocks(5)
    assert gone == [new[2], old[2], old[1], old[0]]
    pool.check_invariants()
