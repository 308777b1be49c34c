"""Tiers below the GPU: entries that outlive a slot or a KV block, and how they are verified.

An entry is one KV block or one state. What is restored from a tier was compared with what the
request derived, field by field and by digest; what does not match is a counted miss.
"""

from mamba_cache.tiers.directory import CacheFolder, FolderLock, folders, remove_folder
from mamba_cache.tiers.disk import DiskStats, DiskTier
from mamba_cache.tiers.entry import (
    HEADER_BYTES,
    EntryFacts,
    EntryHeader,
    EntryKey,
    EntryKind,
    Refusal,
    block_digest,
    payload_digest,
)
from mamba_cache.tiers.identity import (
    CacheIdentity,
    ModelIdentity,
    Numerics,
    ParallelRank,
    tenant_digest,
)
from mamba_cache.tiers.inspection import RowReport, count_rows, inspect_rows

__all__ = [
    "HEADER_BYTES",
    "CacheFolder",
    "CacheIdentity",
    "DiskStats",
    "DiskTier",
    "EntryFacts",
    "EntryHeader",
    "EntryKey",
    "EntryKind",
    "FolderLock",
    "ModelIdentity",
    "Numerics",
    "ParallelRank",
    "Refusal",
    "RowReport",
    "block_digest",
    "count_rows",
    "folders",
    "inspect_rows",
    "payload_digest",
    "remove_folder",
    "tenant_digest",
]
