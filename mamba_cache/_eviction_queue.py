"""The priority queue of KV blocks that may be evicted."""

from __future__ import annotations

import heapq
from collections.abc import Collection

__all__ = ["EvictionQueue"]


class EvictionQueue:
    """Items ordered by priority, lowest first; ties go to the item with the lower id.

    A heap with lazy deletion: an item's entry goes stale when the item is removed or pushed anew,
    and stale entries are dropped when they surface, or all at once when they outnumber the live
    ones. So ``push``, ``discard`` and ``pop`` are O(log n) amortised, and memory is O(live items).
    """

    __slots__ = ("_heap", "_priorities")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._priorities: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, item: int) -> bool:
        return item in self._priorities

    def push(self, item: int, priority: float) -> None:
        """Add ``item``, or move it to ``priority`` if it is there."""
        if self._priorities.get(item) == priority:
            return
        heapq.heappush(self._heap, (priority, item))
        self._priorities[item] = priority
        if len(self._heap) > 2 * len(self._priorities) + 16:
            self._rebuild()

    def discard(self, items: Collection[int]) -> None:
        """Remove each of ``items`` that is there."""
        for item in self._priorities.keys() & items:
            del self._priorities[item]

    def push_pop(self, item: int, priority: float) -> tuple[int, float]:
        """Add an item that is not there, then ``pop``: in O(1) if it is the lowest itself."""
        if not self._heap or (priority, item) < self._heap[0]:
            return item, priority
        self.push(item, priority)
        return self.pop()

    def pop(self) -> tuple[int, float]:
        """Remove and return the item of lowest priority, as (item, priority)."""
        while True:
            priority, item = self._heap[0]
            is_live = self._priorities.get(item) == priority
            if is_live:
                del self._priorities[item]  # before its entry goes: see push
            heapq.heappop(self._heap)
            if is_live:
                return item, priority

    def clear(self) -> None:
        """Remove every item."""
        self._heap.clear()
        self._priorities.clear()

    def _rebuild(self) -> None:
        heap = [(priority, item) for item, priority in self._priorities.items()]
        heapq.heapify(heap)
        self._heap = heap
