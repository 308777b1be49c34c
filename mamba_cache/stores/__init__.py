"""Stores: blobs by key, in a place that several processes share."""

from mamba_cache.stores.faulty import FaultyStore, Trouble
from mamba_cache.stores.memory import MemoryStore
from mamba_cache.stores.mooncake import MooncakeStore
from mamba_cache.stores.protocols import BlobStore, StoreFault, StoreHealth
from mamba_cache.stores.urls import open_store
from mamba_cache.stores.valkey import ValkeyStore

__all__ = [
    "BlobStore",
    "FaultyStore",
    "MemoryStore",
    "MooncakeStore",
    "StoreFault",
    "StoreHealth",
    "Trouble",
    "ValkeyStore",
    "open_store",
]
