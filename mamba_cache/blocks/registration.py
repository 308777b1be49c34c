"""What a call of ``register_kv_block_hashes`` asks for, checked."""

from __future__ import annotations

from collections.abc import Sequence

from mamba_cache._checks import as_ints, as_items, check_int
from mamba_cache.blocks.hashing import BlockHashes
from mamba_cache.blocks.prefix_tree import PrefixTree, RegisteredBlock
from mamba_cache.errors import HashConflictError, InvalidArgumentError

__all__ = ["MAX_HASH_ID", "NO_HASH", "check_carried_hashes", "plan_registration"]

NO_HASH = -1
"""What stands in ``block_hashes`` for a block that is not registered."""

MAX_HASH_ID = 2**63 - 1
"""Hash ids are positive and fit an int64."""


def plan_registration(
    tree: PrefixTree,
    block_ids: list[int],
    block_hashes: Sequence[int],
    digests: Sequence[bytes] | None,
    parent_hash: int | None,
) -> list[tuple[int, RegisteredBlock]]:
    """Return (hash id, block) for consecutive blocks, each one the parent of the next.

    Raises:
        InvalidArgumentError: Lengths differ, a hash id is out of range, a digest is not ``bytes``,
            or ids without digests make a block its own ancestor.
    """
    hash_ids = as_ints("block_hashes", block_hashes)
    if digests is None and isinstance(block_hashes, BlockHashes):
        digests = block_hashes.digests
    given = [] if digests is None else as_items("digests", digests, "bytes")
    all_digests = [None] * len(block_ids) if digests is None else given
    if not len(block_ids) == len(hash_ids) == len(all_digests):
        raise InvalidArgumentError(
            "block_ids, block_hashes and digests must be of one length, "
            f"got {len(block_ids)}, {len(hash_ids)} and {len(all_digests)}"
        )
    if parent_hash is not None:
        parent_hash = check_int("parent_hash", parent_hash, minimum=1, maximum=MAX_HASH_ID)
    for hash_id in hash_ids:
        check_int("a hash id", hash_id, minimum=1, maximum=MAX_HASH_ID)
    for digest in given:
        if not isinstance(digest, bytes):
            raise InvalidArgumentError(f"a digest must be bytes, got {digest!r}")
    parents = [parent_hash, *hash_ids[:-1]] if hash_ids else []
    if digests is None:
        _check_ancestry(tree, hash_ids, parents)
    blocks = map(RegisteredBlock, block_ids, all_digests, parents)
    return list(zip(hash_ids, blocks, strict=True))


def check_carried_hashes(plan: Sequence[tuple[int, RegisteredBlock]], hashes: memoryview) -> None:
    """Check that no block would get a second hash.

    Args:
        plan: As ``plan_registration`` returns it.
        hashes: [pool_size] int64. The hash id of each block, ``NO_HASH`` for none.

    Raises:
        HashConflictError: A block carries another hash already, or is named twice with two.
    """
    carried: dict[int, int] = {}
    for hash_id, (block_id, _, _) in plan:
        own = carried.setdefault(block_id, hashes[block_id])
        if own not in (NO_HASH, hash_id):
            raise HashConflictError(
                f"block {block_id} carries hash {own}, and cannot be registered as {hash_id}"
            )
        carried[block_id] = hash_id


def _check_ancestry(
    tree: PrefixTree, hash_ids: Sequence[int], parents: Sequence[int | None]
) -> None:
    """Refuse blocks whose parents lead back to them: none of them could ever be evicted.

    Hash ids that a caller makes up can do that. Those of digests may as well, when they collide,
    and are dealt with one by one (``PrefixTree.closes_ring``). Such a ring needs a new
    block that has children already, or that is named twice. That is rare, and only then are the
    parents walked: registering a block must not cost as much as its prefix is long.
    """
    named = reversed(list(zip(hash_ids, parents, strict=True)))  # of two mentions the first counts
    new = {hash_id: parent for hash_id, parent in named if tree.find(hash_id) is None}
    may_close = len({*hash_ids, *parents}) <= len(hash_ids) or any(map(tree.num_children, new))
    walked: dict[int, int] = {}
    for start in new if may_close else ():
        ancestor: int | None = start
        while ancestor is not None and ancestor not in walked:
            walked[ancestor] = start
            block = tree.find(ancestor)
            ancestor = new.get(ancestor) if block is None else block.parent_hash
        if ancestor is not None and walked[ancestor] == start:
            raise InvalidArgumentError(
                f"a block cannot be its own ancestor, got hash {ancestor} as one of its own parents"
            )
