"""The tree of prefixes: which block stands for which hash, and which blocks are its children."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from mamba_cache.blocks.hashing import BlockHashes
from mamba_cache.cache import NONE, RowIds, as_rows, values_at

__all__ = ["PrefixTree"]

# Of the counts' own dtype: with any other, ``np.add.at`` takes 30 times as long.
_STEPS: Final = {1: np.int32(1), -1: np.int32(-1)}


class PrefixTree:
    """What blocks hold: the hash and digest of each registered block, and its parent.

    A parent is known by its hash id, so children may outlive it, and have a parent again when
    another block takes its hash. Children are counted at their parent's block; those whose parent
    is not registered, by its hash id. Where a parent's block was is kept beside its hash id, and
    believed as long as that block has this hash: so many blocks are counted by whole arrays.

    It trusts its owner: block ids are in range and different, hash ids are what the owner checked.
    """

    __slots__ = (
        "_block_of",
        "_digests",
        "_no_block",
        "_orphans",
        "_parent_at",
        "_parent_block_at",
        "_parent_blocks",
        "_parents",
        "cached_children_at",
        "children_at",
        "hash_at",
        "hashes",
        "num_cached_children",
        "num_children",
    )

    def __init__(self, pool_size: int) -> None:
        self._no_block = pool_size - 1
        self.hashes = np.empty(pool_size, np.int64)  # of each block, or NONE
        self._parents = np.empty(pool_size, np.int64)
        self._parent_blocks = np.empty(pool_size, np.intp)
        self.num_children = np.zeros(pool_size, np.int32)
        self.num_cached_children = np.zeros(pool_size, np.int32)
        self._digests = np.empty(pool_size, object)
        self.hash_at = self.hashes.data
        self._parent_at, self._parent_block_at = self._parents.data, self._parent_blocks.data
        self.children_at = self.num_children.data
        self.cached_children_at = self.num_cached_children.data
        self.clear()

    def clear(self) -> None:
        """Deregister every block."""
        self.hashes.fill(NONE)
        self._parents.fill(NONE)
        self._parent_blocks.fill(self._no_block)
        self._block_of: dict[int, int] = {}
        self._digests.fill(None)
        # By the hash id of a parent that is not registered: its children, and the cached ones.
        self._orphans: dict[int, list[int]] = {}

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
        if not hashes or hashes[0] not in self._block_of:
            return []  # without reading the ids of a long prompt that nobody has seen
        block_ids = []
        find, own_digests = self._block_of.get, self._digests
        for hash_id, digest in zip(hashes, hashes.digests, strict=True):
            block_id = find(hash_id)
            if block_id is None or own_digests[block_id] != digest:
                break
            block_ids.append(block_id)
        return block_ids

    def digest_of(self, block_id: int) -> bytes | None:
        """Return a block's full digest; None if it is not registered."""
        digest: bytes | None = self._digests[block_id]
        return digest

    def digests_of(self, blocks: RowIds) -> list[bytes]:
        """Return the full digests of registered blocks."""
        digests: list[bytes] = self._digests[blocks].tolist()
        return digests

    def parent_of(self, block_id: int) -> int | None:
        """Return the block that is a registered block's parent; None if it is not registered."""
        parent, block = self._parent_at[block_id], self._parent_block_at[block_id]
        if self.hash_at[block] != parent:
            return self._block_of.get(parent)
        return None if block == self._no_block else block

    def add_chain(
        self,
        block_ids: list[int],
        hash_ids: list[int],
        digests: Sequence[bytes],
        parent: int | None,
    ) -> bool:
        """Register consecutive blocks of one sequence if their hash ids are all new."""
        # One look at each id tells whose it is, and makes it the block's where it is nobody's.
        holders = list(map(self._block_of.setdefault, hash_ids, block_ids))
        parent_block = self._block_of.get(NONE if parent is None else parent)
        is_own_parent = parent_block is not None and self.hash_at[parent_block] == NONE
        if holders != block_ids or is_own_parent or not self._orphans.keys().isdisjoint(hash_ids):
            for hash_id, holder, block_id in zip(hash_ids, holders, block_ids, strict=True):
                if holder == block_id:
                    del self._block_of[hash_id]
            return False
        blocks = as_rows(block_ids)
        if isinstance(blocks, list):
            last, last_hash = self._no_block, NONE
            for block_id, hash_id, digest in zip(block_ids, hash_ids, digests, strict=True):
                self.hash_at[block_id], self._digests[block_id] = hash_id, digest
                self._parent_at[block_id], self._parent_block_at[block_id] = last_hash, last
                self.children_at[block_id], self.cached_children_at[block_id] = 1, 0
                last, last_hash = block_id, hash_id
        else:
            self.hashes[blocks] = hash_ids
            self._digests[blocks] = digests
            before, after = blocks[:-1], blocks[1:]
            self._parents[after], self._parent_blocks[after] = self.hashes[before], before
            self.num_children[before] = 1
            self.num_cached_children[blocks] = 0
        self.children_at[block_ids[-1]] = 0
        self._join(block_ids[0], parent)
        return True

    def add(self, block_id: int, hash_id: int, digest: bytes, parent: int | None) -> None:
        """Register a block under a hash id that nobody holds."""
        self._block_of[hash_id] = block_id
        self.hash_at[block_id] = hash_id
        self._digests[block_id] = digest
        children = self._orphans.pop(hash_id, (0, 0)) if self._orphans else (0, 0)
        self.children_at[block_id], self.cached_children_at[block_id] = children
        self._join(block_id, parent)

    def _join(self, block_id: int, parent: int | None) -> None:
        """Make a block the child of the one with a hash id."""
        parent_block = self._no_block
        if parent is None:
            parent = NONE
        elif parent in self._block_of:
            parent_block = self._block_of[parent]
            self.children_at[parent_block] += 1
        else:
            self._orphans.setdefault(parent, [0, 0])[0] += 1
        self._parent_at[block_id], self._parent_block_at[block_id] = parent, parent_block

    def remove(self, blocks: RowIds, cached: RowIds) -> list[int]:
        """Deregister blocks, of which some are cached; return their parents that still are."""
        self.count_cached(cached, -1)
        parents = self._count(self.num_children, 0, blocks, -1)
        hash_ids = values_at(self.hash_at, self.hashes, blocks)
        if isinstance(blocks, list):
            for block_id in blocks:
                self.hash_at[block_id], self._digests[block_id] = NONE, None
        else:
            self.hashes[blocks], self._digests[blocks] = NONE, None
        counts = values_at(self.children_at, self.num_children, blocks)
        for block_id, hash_id, num_children in zip(blocks, hash_ids, counts, strict=True):
            del self._block_of[hash_id]
            if num_children:
                self._orphans[hash_id] = [num_children, self.cached_children_at[block_id]]
        return [parent for parent in parents if self.hash_at[parent] != NONE]

    def count_cached(self, blocks: RowIds, step: int) -> list[int]:
        """Count registered blocks as cached from now on, or with ``step`` -1 no longer."""
        return self._count(self.num_cached_children, 1, blocks, step)

    def _count(
        self, counts: npt.NDArray[np.int32], kind: int, blocks: RowIds, step: int
    ) -> list[int]:
        """Change a count at the parents of blocks; ``kind`` is its place among those of orphans."""
        if isinstance(blocks, list):
            found, count_at = [], counts.data
            for block_id in blocks:
                parent, hash_id = self._parent_block_at[block_id], self._parent_at[block_id]
                if self.hash_at[parent] != hash_id:
                    parent = self._count_moved(hash_id, kind, step)
                count_at[parent] += step
                found.append(parent)
            return found
        parents, hash_ids = self._parent_blocks[blocks], self._parents[blocks]
        now = self.hashes[parents]
        for index in (now != hash_ids).nonzero()[0].tolist():
            parents[index] = self._count_moved(hash_ids.item(index), kind, step)
        np.add.at(counts, parents, _STEPS[step])
        as_list: list[int] = parents.tolist()
        return as_list

    def _count_moved(self, parent: int, kind: int, step: int) -> int:
        """Return the block of a parent that had another; if there is none, count at its hash id."""
        block_id = self._block_of.get(parent)
        if block_id is not None:
            return block_id
        self._orphans[parent][kind] += step
        if not self._orphans[parent][0]:
            del self._orphans[parent]
        return self._no_block

    def closes_ring(self, hash_id: int, parent: int | None) -> bool:
        """Say whether a block's ancestors would lead back to it: none of them could be evicted.

        Hashes are chained, so that takes an id that an ancestor's other digest had, too. It needs
        children that are there already; only then are the parents walked, because registering a
        block must not cost as much as its prefix is long.
        """
        if hash_id not in self._orphans:
            return hash_id == parent
        while parent is not None and parent != hash_id:
            parent = self._parent_hash(parent)
        return parent is not None

    def _parent_hash(self, hash_id: int) -> int | None:
        """Return the hash id of a block's parent; None if it has none, or is not registered."""
        block_id = self.find(hash_id)
        parent = NONE if block_id is None else self._parent_at[block_id]
        return None if parent == NONE else parent

    def counts_children_right(self, cached: Collection[int]) -> bool:
        """Say whether the counts of children are what the blocks' parents add up to."""
        parents = {b: p for b in self.blocks() if (p := self._parent_at[b]) != NONE}
        children = Counter(parents.values())
        cached_children = Counter(parents[b] for b in parents if b in cached)
        orphans = {p: [n, cached_children[p]] for p, n in children.items() if self.find(p) is None}
        return self._orphans == orphans and all(
            self.num_children[block_id] == children[hash_id]
            and self.num_cached_children[block_id] == cached_children[hash_id]
            for hash_id, block_id in self.items()
        )

    def agrees_with_hashes(self) -> bool:
        """Say whether both directions, from hash to block and from block to hash, say the same."""
        with_hash = np.flatnonzero(self.hashes != NONE)
        by_block = zip(self.hashes[with_hash].tolist(), with_hash.tolist(), strict=True)
        return self._block_of == dict(by_block) and len(self._block_of) == len(with_hash)
