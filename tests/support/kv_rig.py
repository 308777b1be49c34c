"""A small KV pool, and prefixes with one token per block."""

import numpy as np

from mamba_cache.cache import BlockHasher, BlockHashes, KVBlockAllocator, compute_block_hashes

HASHER = BlockHasher(secret=b"key")


def prefix(*tokens: int) -> BlockHashes:
    """Hashes of a sequence with one block per token."""
    return compute_block_hashes(list(tokens), 1, hasher=HASHER)


def by_id(*hash_ids: int) -> BlockHashes:
    """Hashes with these ids, which may be equal as for colliding digests."""
    return BlockHashes([hash_id.to_bytes(8, "little") + b"a digest" for hash_id in hash_ids])


def snapshot(pool: KVBlockAllocator) -> tuple:
    arrays = (pool.block_ref_counts, pool.block_timestamps, pool.block_hashes)
    counts = (pool.num_free_blocks, pool.num_cached_blocks, pool.num_used_blocks)
    return (*(np.asarray(array).tolist() for array in arrays), counts, pool.evicted_blocks_total)


def cache(pool: KVBlockAllocator, *tokens: int) -> list[int]:
    """Fill blocks with a sequence, like a finished request."""
    block_ids = pool.allocate_memory_blocks(len(tokens))
    pool.register_kv_block_hashes(block_ids, prefix(*tokens))
    pool.release_memory_blocks(block_ids)
    return block_ids
