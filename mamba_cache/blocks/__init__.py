"""Block hashes, and the pool of KV blocks that are found again by them.

Stands alone: it needs numpy and xxhash, knows nothing of slots or states, and tells whoever asks
which blocks become findable and which cease to be (``KVBlockAllocator.add_observer``).
"""

from mamba_cache.blocks.events import BlockEvent, BlockObserver, BlocksRemoved, BlocksStored
from mamba_cache.blocks.hash_chain import BlockHashChain, compute_block_hashes
from mamba_cache.blocks.hashing import BlockHasher, BlockHashes, ExtraKey, hash_id_of
from mamba_cache.blocks.kv_block_allocator import DeregistrationObserver, KVBlockAllocator
from mamba_cache.blocks.tokens import MAX_TOKEN_ID, as_token_array

__all__ = [
    "MAX_TOKEN_ID",
    "BlockEvent",
    "BlockHashChain",
    "BlockHasher",
    "BlockHashes",
    "BlockObserver",
    "BlocksRemoved",
    "BlocksStored",
    "DeregistrationObserver",
    "ExtraKey",
    "KVBlockAllocator",
    "as_token_array",
    "compute_block_hashes",
    "hash_id_of",
]
