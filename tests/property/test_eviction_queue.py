"""EvictionQueue against a plain dict."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mamba_cache.cache.rows import EvictionQueue

ITEMS = st.integers(0, 9)
PRIORITIES = st.integers(-3, 3)


class QueueMachine(RuleBasedStateMachine):
    """Few items and few priorities, so that items are pushed anew and priorities tie."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = EvictionQueue()
        self.model: dict[int, float] = {}

    @rule(item=ITEMS, priority=PRIORITIES)
    def push(self, item: int, priority: float) -> None:
        self.queue.push(item, priority)
        self.model[item] = priority

    @rule(items=st.lists(ITEMS, max_size=3))
    def discard(self, items: list[int]) -> None:
        self.queue.discard(items)
        for item in items:
            self.model.pop(item, None)

    @rule(item=ITEMS, priority=PRIORITIES)
    def push_pop(self, item: int, priority: float) -> None:
        if item in self.model:
            return
        self.model[item] = priority
        lowest = min(self.model, key=lambda item: (self.model[item], item))
        assert self.queue.push_pop(item, priority) == (lowest, self.model.pop(lowest))

    @rule()
    def pop(self) -> None:
        if not self.model:
            with pytest.raises(IndexError):
                self.queue.pop()
            return
        expected = min(self.model, key=lambda item: (self.model[item], item))
        assert self.queue.pop() == (expected, self.model.pop(expected))

    @rule()
    def clear(self) -> None:
        self.queue.clear()
        self.model.clear()

    @invariant()
    def same_items(self) -> None:
        assert len(self.queue) == len(self.model)
        assert [item in self.queue for item in range(10)] == [i in self.model for i in range(10)]


TestQueue = QueueMachine.TestCase


def test_stale_entries_do_not_pile_up() -> None:
    """Elsewhere, nodes that were unlinked but not freed grew by gigabytes an hour."""
    queue = EvictionQueue()
    queue.push(9, 20_000)  # left alone, so it must survive every rebuild
    for time in range(10_000):
        queue.push(time % 8, time)
        assert len(queue._heap) <= 2 * len(queue) + 17
    expected = [(time % 8, time) for time in range(9_992, 10_000)]
    assert [queue.pop() for _ in range(9)] == [*expected, (9, 20_000)]
