"""What a call of ``register_kv_block_hashes`` asks for, checked."""

from __future__ import annotations

from collections.abc import Sequence

from mamba_cache.blocks.arguments import as_ints
from mamba_cache.blocks.hashing import BlockHashes
from mamba_cache.blocks.prefix_tree import RegisteredBlock
from mamba_cache.errors import InvalidArgumentError

__all__ = ["NO_HASH", "plan_registration"]

NO_HASH = -1
"""What stands in ``block_hashes`` for a block that is not registered."""

_MAX_HASH_ID = 2**63 - 1


def plan_registration(
    block_ids: list[int],
    block_hashes: Sequence[int],
    digests: Sequence[bytes] | None,
    parent_hash: int | None,
) -> list[tuple[int, RegisteredBlock]]:
    """Return (hash id, block) for consecutive blocks, each one the parent of the next.

    Raises:
        InvalidArgumentError: Lengths differ, a hash id is out of range, or a digest not ``bytes``.
    """
    hash_ids = as_ints("block_hashes", block_hashes)
    if digests is None and isinstance(block_hashes, BlockHashes):
        digests = block_hashes.digests
    all_digests = [None] * len(block_ids) if digests is None else list(digests)
    if not len(block_ids) == len(hash_ids) == len(all_digests):
        raise InvalidArgumentError(
            "block_ids, block_hashes and digests must be of one length, "
            f"got {len(block_ids)}, {len(hash_ids)} and {len(all_digests)}"
        )
    for hash_id in hash_ids if parent_hash is None else [parent_hash, *hash_ids]:
        _check_hash_id(hash_id)
    if hash_ids[:1] == [parent_hash]:
        raise InvalidArgumentError(
            f"a block cannot be its own parent, got hash {parent_hash} twice"
        )
    for digest in digests or ():
        if not isinstance(digest, bytes):
            raise InvalidArgumentError(f"a digest must be bytes, got {digest!r}")
    parents = [parent_hash, *hash_ids]
    blocks = map(RegisteredBlock, block_ids, all_digests, parents)
    return list(zip(hash_ids, blocks, strict=True))


def _check_hash_id(hash_id: object) -> None:
    if type(hash_id) is not int or not 0 < hash_id <= _MAX_HASH_ID:
        raise InvalidArgumentError(
            f"a hash id must be an int from 1 to {_MAX_HASH_ID}, got {hash_id!r}"
        )
