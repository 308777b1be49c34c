"""The order in which cached KV blocks are evicted: leaves first, those without a state before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Final

import numpy as np

from mamba_cache._eviction_queue import EvictionQueue
from mamba_cache.protocols import StatesOfBlocks

__all__ = ["LAST_RESORT", "NOBODY", "LeafQueue", "ShareQueue"]

LAST_RESORT = 1 << 62
"""Added to a timestamp, so that the block goes after all to whose timestamps it was not."""

NOBODY: Final = object()
"""The owner of blocks that count in no share."""


class LeafQueue:
    """Cached blocks none of whose children are cached: each may be evicted.

    The least recently used goes first; of equal ones, the lower id. If somebody tells of the states
    of blocks, those without one go before all others, and of the rest the one that they name: no
    state lies below a leaf, so nothing is lost with a leaf that has none itself.
    """

    __slots__ = ("_aside", "_find_states", "_queue")

    def __init__(self) -> None:
        self._queue = EvictionQueue()
        # Leaves that had a state when it was their turn, with their priority.
        self._aside: dict[int, int] = {}
        self._find_states: Callable[[], StatesOfBlocks | None] = _no_states

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._queue or block_id in self._aside

    def ask(self, find_states: Callable[[], StatesOfBlocks | None]) -> None:
        """Ask what this returns of the states of blocks from now on; None: nobody knows."""
        self._find_states = find_states

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

    def look(self, owner: Hashable = NOBODY, num_new: int = 0) -> None:
        """Look which blocks that were set aside have lost their states; before a row of pops.

        Args:
            owner: Who wants blocks; for a ``ShareQueue``.
            num_new: How many.
        """
        if self._aside:
            states = self._find_states()
            blocks = np.array(list(self._aside), np.intp)
            lost = blocks if states is None else blocks[~states.have_states(blocks)]
            for block_id in lost.tolist():
                self.push(block_id, self._aside[block_id])

    def push_pop(self, block_id: int, priority: int) -> int:
        """Add a block that is not there, then ``pop``."""
        if self._find_states is _no_states:
            return self._queue.push_pop(block_id, priority)[0]
        self._queue.push(block_id, priority)
        return self.pop()

    def pop(self) -> int:
        """Remove and return the block to evict first.

        Raises:
            IndexError: There is none.
        """
        states = self._find_states()
        while states is not None and self._queue:
            block_id, priority = self._queue.pop()
            if states.has_state(block_id):
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


class ShareQueue(LeafQueue):
    """The same, where who has more than a share of the blocks gives up their own first.

    An owner is what registered blocks are said to belong to, such as a salt: all blocks of one
    prefix belong to one.

    Args:
        max_owned: Registered blocks of an owner from which on further ones are beyond the share.
    """

    __slots__ = ("_excess", "_leaves_of", "_num_owned", "_over", "_owner_of", "max_owned")

    def __init__(self, max_owned: int) -> None:
        super().__init__()
        self.max_owned = max_owned
        self._owner_of: dict[int, Hashable] = {}
        self._num_owned: dict[Hashable, int] = {}
        self._over: dict[Hashable, None] = {}  # who has more than the share
        self._leaves_of: dict[Hashable, LeafQueue] = {}  # the leaves of each once more
        # Of those whose blocks go first in the present row of pops: how many of them do.
        self._excess: dict[Hashable, int] = {}

    def own(self, block_ids: Collection[int], owner: Hashable) -> None:
        """Record whose blocks these are that become registered."""
        if owner is NOBODY:
            return
        self._owner_of.update(dict.fromkeys(block_ids, owner))
        self._num_owned[owner] = num = self._num_owned.get(owner, 0) + len(block_ids)
        if num > self.max_owned:
            self._over[owner] = None

    def disown(self, block_ids: Collection[int]) -> None:
        """Forget whose blocks these were that are registered no more."""
        for block_id in block_ids:
            owner = self._owner_of.pop(block_id, NOBODY)
            if owner is NOBODY:
                continue
            num = self._num_owned[owner] - 1
            self._num_owned[owner] = num
            if num <= self.max_owned:
                self._over.pop(owner, None)
            if not num:
                del self._num_owned[owner]
                self._leaves_of.pop(owner, None)

    def push(self, block_id: int, priority: int) -> None:
        """Add a block, or move it to ``priority`` if it is there."""
        super().push(block_id, priority)
        owner = self._owner_of.get(block_id, NOBODY)
        if owner is not NOBODY:
            leaves = self._leaves_of.get(owner)
            if leaves is None:
                leaves = self._leaves_of[owner] = LeafQueue()
                leaves.ask(self._find_states)
            leaves.push(block_id, priority)

    def discard(self, block_ids: Collection[int]) -> None:
        """Remove each of these that is there."""
        super().discard(block_ids)
        for block_id in block_ids:
            self._discard_own(block_id)

    def _discard_own(self, block_id: int) -> None:
        leaves = self._leaves_of.get(self._owner_of.get(block_id, NOBODY))
        if leaves is not None:
            leaves.discard((block_id,))

    def look(self, owner: Hashable = NOBODY, num_new: int = 0) -> None:
        """Look who has more than the share, with the blocks that one wants; before a row of pops.

        Args:
            owner: Who wants blocks.
            num_new: How many.
        """
        super().look()
        own = self._num_owned.get(owner, 0) + num_new - self.max_owned
        self._excess = {owner: own} if own > 0 and owner is not NOBODY else {}
        for name in self._over:
            self._excess.setdefault(name, self._num_owned[name] - self.max_owned)
        for name in self._excess:
            if name in self._leaves_of:
                self._leaves_of[name].look()

    def push_pop(self, block_id: int, priority: int) -> int:
        """Add a block that is not there, then ``pop``."""
        self.push(block_id, priority)
        return self.pop()

    def pop(self) -> int:
        """Remove and return the block to evict first.

        Raises:
            IndexError: There is none.
        """
        while self._excess:
            owner = next(iter(self._excess))
            leaves = self._leaves_of.get(owner)
            if leaves and self._excess[owner]:
                self._excess[owner] -= 1
                block_id = leaves.pop()
                super().discard((block_id,))
                return block_id
            del self._excess[owner]
        block_id = super().pop()
        self._discard_own(block_id)
        return block_id

    def clear(self) -> None:
        """Remove every block, and forget whose they were."""
        super().clear()
        for entries in (self._owner_of, self._num_owned, self._over, self._leaves_of, self._excess):
            entries.clear()

    def is_right(self, registered: Collection[int]) -> bool:
        """Say whether owners are those of registered blocks, and their counts and leaves right."""
        own = [b for b in registered if b in self._owner_of]
        counts = Counter(self._owner_of.values())
        leaves = [b for b in own if b in self]
        return (
            len(own) == len(self._owner_of)
            and counts == self._num_owned
            and {*self._over} == {name for name, num in counts.items() if num > self.max_owned}
            and sum(map(len, self._leaves_of.values())) == len(leaves)
            and all(b in self._leaves_of[self._owner_of[b]] for b in leaves)
        )


def _no_states() -> StatesOfBlocks | None:
    return None
