"""Which blocks are registered under which hash, and which of them are parents of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from mamba_cache._checks import check_int
from mamba_cache.blocks.hashing import BlockHashes
from mamba_cache.errors import InvalidArgumentError

__all__ = ["PrefixTree", "RegisteredBlock"]


class RegisteredBlock(NamedTuple):
    """What is known of the block behind a hash id.

    Attributes:
        block_id: The block.
        digest: Its full digest; None if it was registered by id alone.
        parent_hash: Hash id of the block before it; None for a sequence's first block.
    """

    block_id: int
    digest: bytes | None
    parent_hash: int | None


class PrefixTree:
    """Registered blocks by hash id.

    Children are counted by their parent's hash id, not its block: the count outlives a parent that
    is deregistered before its children, and holds again when another block takes its hash. Those
    of them that are cached, so that nobody refers to them, are counted as well.
    """

    __slots__ = ("_blocks", "_num_cached_children", "_num_children")

    def __init__(self) -> None:
        self._blocks: dict[int, RegisteredBlock] = {}
        self._num_children: dict[int, int] = {}
        self._num_cached_children: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def items(self) -> Iterator[tuple[int, RegisteredBlock]]:
        """Yield every (hash id, block)."""
        return iter(self._blocks.items())

    def find(self, hash_id: int | None) -> RegisteredBlock | None:
        """Return the block behind a hash id, verified by nothing but the id."""
        return None if hash_id is None else self._blocks.get(hash_id)

    def find_block(self, hash_id: int, digest: bytes | None) -> int | None:
        """Return the block behind a hash id, if its digest agrees with the one that is given.

        Raises:
            InvalidArgumentError: The id is no int, or the digest is not ``bytes``.
        """
        if digest is not None and not isinstance(digest, bytes):
            raise InvalidArgumentError(f"a digest must be bytes, got {digest!r}")
        block = self._blocks.get(check_int("a hash id", hash_id))
        if block is None or (digest is not None and block.digest != digest):
            return None
        return block.block_id

    def match(self, hashes: BlockHashes) -> list[int]:
        """Return the blocks of the longest run from the start whose full digests agree."""
        block_ids = []
        for hash_id, digest in zip(hashes, hashes.digests, strict=True):
            block = self._blocks.get(hash_id)
            if block is None or block.digest != digest:
                break
            block_ids.append(block.block_id)
        return block_ids

    def num_children(self, hash_id: int) -> int:
        """Return how many registered blocks have this one as their parent."""
        return self._num_children.get(hash_id, 0)

    def num_cached_children(self, hash_id: int) -> int:
        """Return how many of them are cached."""
        return self._num_cached_children.get(hash_id, 0)

    def closes_ring(self, hash_id: int, parent_hash: int | None) -> bool:
        """Say whether a block's ancestors would lead back to it: none of them could be evicted.

        Hashes are chained, so that takes an id that an ancestor's other digest had, too. It needs
        children that are there already; only then are the parents walked, because registering a
        block must not cost as much as its prefix is long.

        Args:
            hash_id: A hash id that nobody holds.
            parent_hash: Its block's parent.
        """
        if not self.num_children(hash_id):
            return hash_id == parent_hash
        ancestor = parent_hash
        while ancestor is not None and ancestor != hash_id:
            block = self._blocks.get(ancestor)
            ancestor = None if block is None else block.parent_hash
        return ancestor is not None

    def add(self, hash_id: int, block: RegisteredBlock) -> None:
        """Register a block that is used under a hash id that nobody holds."""
        self._blocks[hash_id] = block
        _count(self._num_children, [block.parent_hash], 1)

    def remove(self, hash_id: int) -> RegisteredBlock:
        """Deregister and return the block behind a registered hash id, which is not cached."""
        block = self._blocks.pop(hash_id)
        _count(self._num_children, [block.parent_hash], -1)
        return block

    def note_cached(self, hash_ids: Sequence[int]) -> set[int | None]:
        """Note that nobody refers to registered blocks any more; return their other parents."""
        return self._count_cached(hash_ids, 1)

    def note_used(self, hash_ids: Sequence[int]) -> set[int | None]:
        """Note that cached blocks are cached no longer; return their other parents."""
        return self._count_cached(hash_ids, -1)

    def _count_cached(self, hash_ids: Sequence[int], step: int) -> set[int | None]:
        parents = [self._blocks[hash_id].parent_hash for hash_id in hash_ids]
        _count(self._num_cached_children, parents, step)
        return set(parents).difference(hash_ids)

    def counts_children_right(self, cached_block_ids: Collection[int]) -> bool:
        """Return whether the counts of children are what the blocks' parents add up to."""
        blocks = [block for block in self._blocks.values() if block.parent_hash is not None]
        cached = [block for block in blocks if block.block_id in cached_block_ids]
        return self._num_children == Counter(block.parent_hash for block in blocks) and (
            self._num_cached_children == Counter(block.parent_hash for block in cached)
        )


def _count(counts: dict[int, int], parents: Iterable[int | None], step: int) -> None:
    """Count children up or down by their parents; a count of 0 takes no room."""
    for parent_hash in parents:
        if parent_hash is None:
            continue
        count = counts.get(parent_hash, 0) + step
        if count:
            counts[parent_hash] = count
        else:
            del counts[parent_hash]
