"""The life cycle of a pool's rows: free, held by references, or cached; the order of eviction."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mamba_cache.errors import DoubleFreeError, UnknownBlockError

__all__ = ["NONE", "EvictionQueue", "RowIds", "Rows", "add_at", "as_rows"]

RowIds: TypeAlias = "npt.NDArray[np.intp]"
"""[n] rows, in the dtype with which numpy looks up a few of them as fast as a loop."""

NONE: Final = -1
"""The item of ``Rows.names`` for a row without a name."""


def as_rows(ids: Collection[int]) -> RowIds:
    """Return rows as an index array."""
    return np.fromiter(ids, np.intp, len(ids))


def add_at(array: npt.NDArray[np.int32], rows: RowIds, step: int) -> None:
    """Add to an array's values at rows, which may repeat."""
    np.add.at(array, rows, np.int32(step))  # 30 times slower if the dtypes differ


class Rows:
    """Rows of one kind: KV blocks, slots, or host entries.

    A row with references is *held*. A row without references is *cached* if it has a name, by which
    its content is found; else it is *free*, and on the stack of free rows. Embedders write these
    tables by index, so no fact is kept twice. Callers have checked that rows are in range.
    """

    __slots__ = ("_what", "free", "names", "num_free", "num_rows", "ref_at", "refs")

    def __init__(self, what: str, num_rows: int, names: npt.NDArray[Any]) -> None:
        self._what = what
        self.num_rows = num_rows
        self.names = names  # [num_rows or more] name of each row, or NONE
        self.refs = np.zeros(len(names), np.int32)
        self.free = np.empty(num_rows, np.int32)  # a stack: entries below ``num_free`` are free
        # Single elements are read and written several times faster through a memoryview.
        self.ref_at = self.refs.data
        self.clear()

    def clear(self) -> None:
        """Make every row free; the caller resets the names."""
        self.refs.fill(0)
        self.free[:] = np.arange(self.num_rows)
        self.num_free = self.num_rows

    def take(self, num_rows: int, num_references: int = 1) -> RowIds:
        """Take free rows, of which there are enough; without references the caller names them."""
        end = self.num_free
        taken: RowIds = self.free[end - num_rows : end].astype(np.intp)
        self.num_free = end - num_rows
        self.refs[taken] = num_references
        return taken

    def push(self, ids: Sequence[int] | RowIds) -> None:
        """Put rows without references and names on the stack of free rows."""
        end = self.num_free + len(ids)
        self.free[self.num_free : end] = ids
        self.num_free = end

    def without_references(self, rows: RowIds) -> RowIds:
        """Return the cached rows among rows that are held or cached.

        Raises:
            UnknownBlockError: A row is free.
        """
        refs = self.refs[rows].tolist()
        if all(refs):
            return rows[:0]
        cached = rows[self.refs[rows] == 0] if any(refs) else rows
        names = self.names[cached].tolist()
        if NONE in names:
            row = cached[names.index(NONE)]
            raise UnknownBlockError(f"{self._what} {row} is free: allocate it first")
        return cached

    def hold(self, rows: RowIds) -> RowIds:
        """Add a reference to rows that are held or cached; return the rows that were cached."""
        cached = self.without_references(rows)
        if len(cached) == len(rows) == len(set(rows.tolist())):
            self.refs[rows] = 1
            return cached
        add_at(self.refs, rows, 1)
        return np.unique(cached)

    def release(self, rows: RowIds) -> RowIds:
        """Release a reference to each row; return rows that are cached now, free unnamed ones.

        Raises:
            DoubleFreeError: More references of a row are released than it has.
        """
        ids: list[int] = rows.tolist()
        refs = self.refs[rows].tolist()
        left: list[int] = []
        if len(set(ids)) < len(ids) or refs.count(1) < len(ids):
            given = Counter(ids)
            ids = list(given)
            rows = as_rows(ids)
            refs = self.refs[rows].tolist()
            left = [count - given[row] for row, count in zip(ids, refs, strict=True)]
            if min(left) < 0:
                row = ids[left.index(min(left))]
                raise DoubleFreeError(
                    f"{self._what} {row} has {self.refs[row]} references, "
                    f"but {given[row]} are released"
                )
        self.refs[rows] = 0
        if any(left):
            self.refs[rows] = left
            rows = rows[self.refs[rows] == 0]
        is_free = self.names[rows] == NONE
        if np.count_nonzero(is_free):
            self.push(rows[is_free])
            rows = rows[~is_free]
        return rows

    def statements(self) -> dict[str, bool]:
        """Return checks for ``require_all``: each row is exactly one of free, held or cached."""
        free = self.free[: max(self.num_free, 0)].tolist()
        held = self.refs[: self.num_rows] != 0
        cached = (self.names[: self.num_rows] != NONE) & ~held
        together = sorted([*free, *held.nonzero()[0].tolist(), *cached.nonzero()[0].tolist()])
        return {
            f"there are 0 to {self.num_rows} free {self._what}s": (
                0 <= self.num_free <= self.num_rows
            ),
            "no reference count is negative": bool((self.refs >= 0).all()),
            f"no {self._what} is free twice": len(free) == len(set(free)),
            f"free + held + cached is every {self._what}": (
                together == list(range(self.num_rows)) and not self.refs[self.num_rows :].any()
            ),
        }


class EvictionQueue:
    """Items ordered by priority, lowest first; of equal priorities the lower id comes first.

    A heap with lazy deletion: stale entries are dropped when they reach the top, or all at once
    when they outnumber the live ones. So a call is O(log n) amortised, and memory O(live items).
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
        """Add ``item``, or set its priority if it is in the queue."""
        if self._priorities.get(item) == priority:
            return
        heapq.heappush(self._heap, (priority, item))
        self._priorities[item] = priority
        if len(self._heap) > 2 * len(self._priorities) + 16:
            heap = [(priority, item) for item, priority in self._priorities.items()]
            heapq.heapify(heap)
            self._heap = heap

    def discard(self, items: Collection[int]) -> None:
        """Remove each of ``items`` that is in the queue."""
        for item in self._priorities.keys() & items:
            del self._priorities[item]

    def push_pop(self, item: int, priority: float) -> tuple[int, float]:
        """Add a new item, then ``pop``; in O(1) if the new item is the lowest."""
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
                del self._priorities[item]  # first: push relies on a heap entry for each item
            heapq.heappop(self._heap)
            if is_live:
                return item, priority

    def clear(self) -> None:
        """Remove every item."""
        self._heap.clear()
        self._priorities.clear()
