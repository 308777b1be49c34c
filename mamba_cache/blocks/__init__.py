"""Block hashes, and the pool of KV blocks that are found again by them.

It needs numpy and xxhash. Listeners get the blocks that become findable and that cease to be
(``KVBlockAllocator.listeners``).
"""

from mamba_cache.blocks.hash_chain import BlockHashChain, compute_block_hashes
from mamba_cache.blocks.hashing import BlockHasher, BlockHashes, ExtraKey, hash_id_of
from mamba_cache.blocks.kv_block_allocator import KVBlockAllocator
from mamba_cache.blocks.tokens import MAX_TOKEN_ID, as_token_array

__all__ = [
    "MAX_TOKEN_ID",
    "BlockHashChain",
    "BlockHasher",
    "BlockHashes",
    "ExtraKey",
    "KVBlockAllocator",
    "as_token_array",
    "compute_block_hashes",
    "hash_id_of",
]
