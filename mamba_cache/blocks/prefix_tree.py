"""The tree of prefixes: which block stands for which hash, and which blocks are its children."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np

from mamba_cache.blocks.hashing import BlockHashes
from mamba_cache.errors import InvalidArgumentError

__all__ = ["NO_HASH", "PrefixTree"]

NO_HASH: Final = -1
"""What stands in ``hashes`` for a block that is not registered."""


class PrefixTree:
    """What blocks hold: the hash and digest of each registered block, and its parent's hash.

    Children are counted by their parent's hash id, not its block: the count outlives a parent that
    is deregistered before its children, and holds again when another block takes its hash. Those
    of them that are cached, so that nobody refers to them, are counted as well.

    It trusts its owner: block ids are in range, and hash ids are what the owner checked.

    Args:
        pool_size: Blocks that can be registered.

    Attributes:
        hashes: [pool_size] int64. The hash id of each block, ``NO_HASH`` for none.
    """

    __slots__ = (
        "_block_of",
        "_digests",
        "_hash_of",
        "_num_cached_children",
        "_num_children",
        "_parents",
        "hashes",
    )

    def __init__(self, pool_size: int) -> None:
        self.hashes = np.empty(pool_size, dtype=np.int64)
        # Single elements are read and written several times faster through a memoryview.
        self._hash_of = self.hashes.data
        self.clear()

    def clear(self) -> None:
        """Deregister every block."""
        self.hashes.fill(NO_HASH)
        self._block_of: dict[int, int] = {}
        self._digests: list[bytes | None] = [None] * len(self.hashes)
        self._parents: list[int | None] = [None] * len(self.hashes)
        self._num_children: dict[int, int] = {}
        self._num_cached_children: dict[int, int] = {}

    def blocks(self) -> list[int]:
        """Return the registered blocks, in the order in which they were registered."""
        return list(self._block_of.values())

    def items(self) -> Iterable[tuple[int, int]]:
        """Return every (hash id, block), in the order in which they were registered."""
        return self._block_of.items()

    def find(self, hash_id: int | None) -> int | None:
        """Return the block behind a hash id, verified by nothing but the id."""
        return None if hash_id is None else self._block_of.get(hash_id)

    def match(self, hashes: BlockHashes) -> list[int]:
        """Return the blocks of the longest run from the start whose full digests agree."""
        block_ids = []
        for hash_id, digest in zip(hashes, hashes.digests, strict=True):
            block_id = self._block_of.get(hash_id)
            if block_id is None or self._digests[block_id] != digest:
                break
            block_ids.append(block_id)
        return block_ids

    def digest_of(self, block_id: int) -> bytes | None:
        """Return a block's full digest; None if it was registered by id alone, or is not."""
        return self._digests[block_id]

    def parent_of(self, block_id: int) -> int | None:
        """Return the hash id of a registered block's parent; None for a sequence's first block."""
        return self._parents[block_id]

    def num_children(self, hash_id: int) -> int:
        """Return how many registered blocks have this one as their parent."""
        return self._num_children.get(hash_id, 0)

    def num_cached_children(self, hash_id: int) -> int:
        """Return how many of them are cached."""
        return self._num_cached_children.get(hash_id, 0)

    def add(self, block_id: int, hash_id: int, digest: bytes | None, parent: int | None) -> None:
        """Register a block that is not cached under a hash id that nobody holds."""
        self._block_of[hash_id] = block_id
        self._hash_of[block_id] = hash_id
        self._digests[block_id], self._parents[block_id] = digest, parent
        _count(self._num_children, parent, 1)

    def remove(self, block_id: int, *, is_cached: bool) -> int | None:
        """Deregister a registered block, and return the hash id of its parent.

        Args:
            block_id: The block.
            is_cached: Whether it is counted as cached.
        """
        parent = self._parents[block_id]
        del self._block_of[self._hash_of[block_id]]
        self._hash_of[block_id] = NO_HASH
        self._digests[block_id] = self._parents[block_id] = None
        _count(self._num_children, parent, -1)
        if is_cached:
            _count(self._num_cached_children, parent, -1)
        return parent

    def count_cached(self, block_ids: Sequence[int], step: int) -> set[int | None]:
        """Count registered blocks as cached from now on, or as cached no longer.

        Args:
            block_ids: The blocks.
            step: 1 or -1.

        Returns:
            The hash ids of their parents that are not among them.
        """
        parents = [self._parents[block_id] for block_id in block_ids]
        for parent in parents:
            _count(self._num_cached_children, parent, step)
        return set(parents).difference(map(self._hash_of.__getitem__, block_ids))

    def closes_ring(self, hash_id: int, parent: int | None) -> bool:
        """Say whether a block's ancestors would lead back to it: none of them could be evicted.

        Hashes are chained, so that takes an id that an ancestor's other digest had, too. It needs
        children that are there already; only then are the parents walked, because registering a
        block must not cost as much as its prefix is long.

        Args:
            hash_id: A hash id that nobody holds.
            parent: The hash id of its block's parent.
        """
        if hash_id not in self._num_children:
            return hash_id == parent
        while parent is not None and parent != hash_id:
            block_id = self.find(parent)
            parent = None if block_id is None else self._parents[block_id]
        return parent is not None

    def check_ancestry(self, hash_ids: Sequence[int], parents: Sequence[int | None]) -> None:
        """Refuse ids without digests whose parents lead back to them, as made-up ones can.

        As in ``closes_ring``, the parents are walked only if a new block has children already, or
        is named twice.

        Args:
            hash_ids: The hash id of each block that is to be registered.
            parents: The hash id of each block's parent.

        Raises:
            InvalidArgumentError: A block would be its own ancestor.
        """
        pairs = reversed(list(zip(hash_ids, parents, strict=True)))  # the first mention counts
        new = {hash_id: parent for hash_id, parent in pairs if self.find(hash_id) is None}
        may_close = len({*hash_ids, *parents}) <= len(hash_ids) or any(map(self.num_children, new))
        walked: dict[int, int] = {}
        for start in new if may_close else ():
            ancestor: int | None = start
            while ancestor is not None and ancestor not in walked:
                walked[ancestor] = start
                block_id = self.find(ancestor)
                ancestor = new.get(ancestor) if block_id is None else self._parents[block_id]
            if ancestor is not None and walked[ancestor] == start:
                raise InvalidArgumentError(
                    f"a block cannot be its own ancestor, got hash {ancestor} as one of its own "
                    "parents"
                )

    def counts_children_right(self, cached: Collection[int]) -> bool:
        """Say whether the counts of children are what the blocks' parents add up to."""
        parents = {b: self._parents[b] for b in self.blocks() if self._parents[b] is not None}
        return self._num_children == Counter(parents.values()) and (
            self._num_cached_children == Counter(parents[b] for b in parents if b in cached)
        )

    def agrees_with_hashes(self) -> bool:
        """Say whether both directions, from hash to block and from block to hash, say the same."""
        with_hash = np.flatnonzero(self.hashes != NO_HASH)
        by_block = zip(self.hashes[with_hash].tolist(), with_hash.tolist(), strict=True)
        return self._block_of == dict(by_block) and len(self._block_of) == len(with_hash)


def _count(counts: dict[int, int], parent: int | None, step: int) -> None:
    """Count a child up or down by its parent; a count of 0 takes no room."""
    if parent is None:
        return
    count = counts.get(parent, 0) + step
    if count:
        counts[parent] = count
    else:
        del counts[parent]
