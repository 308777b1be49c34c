"""Tiers below the GPU: entries that outlive a slot or a KV block, and how they are verified.

An entry is one KV block or one state. What is restored from a tier was compared with what the
request derived, field by field and by digest; what does not match is a counted miss.
"""

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

__all__ = [
    "HEADER_BYTES",
    "CacheIdentity",
    "EntryFacts",
    "EntryHeader",
    "EntryKey",
    "EntryKind",
    "ModelIdentity",
    "Numerics",
    "ParallelRank",
    "Refusal",
    "block_digest",
    "payload_digest",
    "tenant_digest",
]
