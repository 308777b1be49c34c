"""EvictionQueue holds no more than its items.

The machines of both allocators test the order of eviction.
"""

from mamba_cache.cache.rows import EvictionQueue


def test_stale_entries_do_not_pile_up() -> None:
    """In another system, unlinked but unfreed nodes grew by gigabytes an hour."""
    queue = EvictionQueue()
    queue.push(9, 20_000)  # never changed, so it must survive every rebuild
    for time in range(10_000):
        queue.push(time % 8, time)
        assert len(queue._heap) <= 2 * len(queue) + 17
    expected = [(time % 8, time) for time in range(9_992, 10_000)]
    assert [queue.pop() for _ in range(9)] == [*expected, (9, 20_000)]


def test_of_equal_priorities_the_lower_id_goes_first() -> None:
    queue = EvictionQueue()
    for item in (3, 1):
        queue.push(item, 5)
    assert [queue.push_pop(item, 5) for item in (2, 0)] == [(1, 5), (0, 5)]
    assert [queue.pop(), queue.pop()] == [(2, 5), (3, 5)]
