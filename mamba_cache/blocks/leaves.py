"""The order in which cached KV blocks are evicted: leaves first, those without a state before."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from mamba_cache._eviction_queue import EvictionQueue
from mamba_cache.protocols import SlotsOfBlocks

__all__ = ["LAST_RESORT", "LeafQueue"]

LAST_RESORT = 1 << 62
"""Added to a timestamp, so that the block goes after all to whose timestamps it was not."""


class LeafQueue:
    """Cached blocks none of whose children are cached: each may be evicted.

    The least recently used goes first; of equal ones, the lower id. If somebody tells of the states
    of blocks, those without one go before all others, and of the rest the one that they name: no
    state lies below a leaf, so nothing is lost with a leaf that has none itself.
    """

    __slots__ = ("_aside", "_queue", "find_states")

    def __init__(self) -> None:
        self._queue = EvictionQueue()
        # Leaves that had a state when it was their turn, with their priority.
        self._aside: dict[int, int] = {}
        self.find_states: Callable[[], SlotsOfBlocks | None] = _no_states

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._queue or block_id in self._aside

    def push(self, block_id: int, priority: int) -> None:
        """Add a block, or move it to ``priority`` if it is there."""
        self._queue.push(block_id, priority)
        self._aside.pop(block_id, None)

    def discard(self, block_ids: Collection[int]) -> None:
        """Remove each of these that is there."""
        self._queue.discard(block_ids)
        if self._aside:
            for block_id in block_ids:
                self._aside.pop(block_id, None)

    def look(self) -> None:
        """Look which blocks that were set aside have lost their states; before a row of pops."""
        if self._aside:
            states = self.find_states()
            blocks = np.array(list(self._aside), np.intp)
            lost = blocks if states is None else blocks[~states.have_states(blocks)]
            for block_id in lost.tolist():
                self.push(block_id, self._aside[block_id])

    def push_pop(self, block_id: int, priority: int) -> int:
        """Add a block that is not there, then ``pop``."""
        if self.find_states is _no_states:
            return self._queue.push_pop(block_id, priority)[0]
        self._queue.push(block_id, priority)
        return self.pop()

    def pop(self) -> int:
        """Remove and return the block to evict first."""
        states = self.find_states()
        while states is not None and self._queue:
            block_id, priority = self._queue.pop()
            if states.holds_state(block_id):
                self._aside[block_id] = int(priority)
            elif priority >= LAST_RESORT and self._aside:
                self._queue.push(block_id, priority)
                break
            else:
                return block_id
        if states is None or not self._aside:
            return self._queue.pop()[0]
        blocks = np.array(list(self._aside), np.intp)
        block_id = states.first_to_go(blocks)
        del self._aside[block_id]
        return block_id

    def clear(self) -> None:
        """Remove every block."""
        self._queue.clear()
        self._aside.clear()


def _no_states() -> SlotsOfBlocks | None:
    return None
