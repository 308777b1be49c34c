"""Stores: blobs by key, in a place that several processes share."""

from mamba_cache.stores.protocols import BlobStore, StoreFault, StoreHealth

__all__ = ["BlobStore", "StoreFault", "StoreHealth"]
