"""Stores: blobs by key, in a place that several processes share."""

from mamba_cache.stores.mooncake import MooncakeStore
from mamba_cache.stores.protocols import BlobStore, StoreFault, StoreHealth
from mamba_cache.stores.urls import open_store
from mamba_cache.stores.valkey import ValkeyStore

__all__ = [
    "BlobStore",
    "MooncakeStore",
    "StoreFault",
    "StoreHealth",
    "ValkeyStore",
    "open_store",
]
