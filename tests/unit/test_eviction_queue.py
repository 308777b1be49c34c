"""EvictionQueue, one rule at a time."""

import pytest

from mamba_cache.cache.rows import EvictionQueue


def test_the_lowest_priority_leaves_first_and_ties_go_to_the_lower_id():
    queue = EvictionQueue()
    for item, priority in ((3, 1), (1, 2), (2, 1)):
        queue.push(item, priority)
    assert [queue.pop() for _ in range(3)] == [(2, 1), (3, 1), (1, 2)]


def test_a_push_moves_an_item_either_way():
    queue = EvictionQueue()
    queue.push(1, 5)
    queue.push(2, 4)
    queue.push(1, 3)
    queue.push(2, 6)
    assert [queue.pop(), queue.pop()] == [(1, 3), (2, 6)]
    assert len(queue) == 0


def test_an_item_discarded_and_pushed_again_leaves_once():
    queue = EvictionQueue()
    queue.push(1, 5)
    queue.discard([1])
    queue.discard([1, 2])
    assert 1 not in queue
    queue.push(1, 5)
    assert queue.pop() == (1, 5)
    with pytest.raises(IndexError):
        queue.pop()


def test_push_pop_is_a_push_and_a_pop():
    queue = EvictionQueue()
    assert queue.push_pop(4, 9) == (4, 9)
    for item, priority in ((1, 5), (2, 5), (3, 7)):
        queue.push(item, priority)
    assert [queue.push_pop(0, 5), queue.push_pop(5, 6), queue.pop()] == [(0, 5), (1, 5), (2, 5)]
    assert [queue.pop(), queue.pop(), len(queue)] == [(5, 6), (3, 7), 0]


def test_memory_follows_the_live_items():
    queue = EvictionQueue()
    for item in range(1_000):
        queue.push(item, item)
    for item in range(1_000):
        queue.discard([item])
    queue.push(7, 7)
    assert len(queue._heap) == 1
