"""Tiers below the GPU: entries that outlive a slot or a KV block, and how they are verified.

An entry is one KV block or one state. Before an entry is restored, each field of its header is
compared with the request's facts, and its payload is verified: in host memory by a digest,
elsewhere by a MAC. A mismatch is a counted miss.
"""

from mamba_cache.tiers.entry import Refusal
from mamba_cache.tiers.host import TierStats
from mamba_cache.tiers.identity import CacheIdentity, ModelIdentity, Numerics, ParallelRank
from mamba_cache.tiers.planner import LoadPlanner, Rates

__all__ = [
    "CacheIdentity",
    "LoadPlanner",
    "ModelIdentity",
    "Numerics",
    "ParallelRank",
    "Rates",
    "Refusal",
    "TierStats",
]
