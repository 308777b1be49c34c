"""What must always hold in a pool of KV blocks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from mamba_cache._eviction_queue import EvictionQueue
from mamba_cache.blocks.prefix_tree import PrefixTree
from mamba_cache.blocks.registration import NO_HASH

__all__ = ["find_breaches"]


def find_breaches(
    *,
    ref_counts: npt.NDArray[np.int32],
    hashes: npt.NDArray[np.int64],
    free_block_ids: Collection[int],
    tree: PrefixTree,
    leaves: EvictionQueue,
    num_cached: int,
) -> list[str]:
    """Return each statement that should hold of a pool's bookkeeping but does not.

    Args:
        ref_counts: [pool_size] int32, CPU.
        hashes: [pool_size] int64, CPU.
        free_block_ids: The free blocks.
        tree: The registered blocks.
        leaves: The blocks that can be evicted at once.
        num_cached: The running count of cached blocks.
    """
    registered = {block.block_id: hash_id for hash_id, block in tree.items()}
    with_hash = np.flatnonzero(hashes != NO_HASH)
    used = set(np.flatnonzero(ref_counts).tolist())
    cached = registered.keys() - used
    evictable = {b for b in cached if not tree.num_cached_children(registered[b])}
    free = set(free_block_ids)
    real_blocks = set(range(len(ref_counts) - 1))
    statements = {
        "no reference count is negative": bool((ref_counts >= 0).all()),
        "no block is registered under two hashes": len(registered) == len(tree),
        "block_hashes and the registered blocks agree": registered
        == dict(zip(with_hash.tolist(), hashes[with_hash].tolist(), strict=True)),
        "children are counted by what their parents say": tree.counts_children_right(cached),
        "no block is free twice": len(free) == len(free_block_ids),
        "free + used + cached is every block but the dummy": free | used | cached == real_blocks
        and len(free) + len(used) + len(cached) == len(real_blocks),
        "cached blocks are counted right": num_cached == len(cached),
        "the queue holds exactly the cached blocks without cached children": len(leaves)
        == len(evictable)
        and all(block_id in leaves for block_id in evictable),
    }
    return [statement for statement, holds in statements.items() if not holds]
