"""Tiers below the GPU: entries that outlive a slot or a KV block, and how they are verified.

An entry is one KV block or one state. What is restored from a tier was compared with what the
request derived, field by field, and by digest in host memory or by a MAC elsewhere. What does not
match is a counted miss.
"""

from mamba_cache.tiers.cuda import CudaTransfers, pinner_for
from mamba_cache.tiers.directory import (
    CacheFolder,
    cache_secret,
    folders,
    remove_folder,
)
from mamba_cache.tiers.disk import DiskTier
from mamba_cache.tiers.entry import (
    HEADER_BYTES,
    EntryFacts,
    EntryHeader,
    EntryKey,
    EntryKind,
    EntryMacs,
    PayloadMac,
    Refusal,
    payload_digest,
)
from mamba_cache.tiers.host import HostTier, RowFormat, TierStats
from mamba_cache.tiers.identity import (
    CacheIdentity,
    ModelIdentity,
    Numerics,
    ParallelRank,
    tenant_digest,
)
from mamba_cache.tiers.jobs import Done, Found, QueuedTier
from mamba_cache.tiers.memory import Pinner, RowMemory
from mamba_cache.tiers.planner import LoadPlanner, Rates, Resumption, quickest
from mamba_cache.tiers.remote import RemoteTier
from mamba_cache.tiers.rows import RowLease, RowPool
from mamba_cache.tiers.transfers import (
    CopyJob,
    Mark,
    PlainTransfers,
    RowLayout,
    Ticket,
    Transfers,
)

__all__ = [
    "HEADER_BYTES",
    "CacheFolder",
    "CacheIdentity",
    "CopyJob",
    "CudaTransfers",
    "DiskTier",
    "Done",
    "EntryFacts",
    "EntryHeader",
    "EntryKey",
    "EntryKind",
    "EntryMacs",
    "Found",
    "HostTier",
    "LoadPlanner",
    "Mark",
    "ModelIdentity",
    "Numerics",
    "ParallelRank",
    "PayloadMac",
    "Pinner",
    "PlainTransfers",
    "QueuedTier",
    "Rates",
    "Refusal",
    "RemoteTier",
    "Resumption",
    "RowFormat",
    "RowLayout",
    "RowLease",
    "RowMemory",
    "RowPool",
    "Ticket",
    "TierStats",
    "Transfers",
    "cache_secret",
    "folders",
    "payload_digest",
    "pinner_for",
    "quickest",
    "remove_folder",
    "tenant_digest",
]
