"""Tiers below the GPU: entries that outlive a slot or a KV block, and how they are verified.

An entry is one KV block or one state. What is restored from a tier was compared with what the
request derived, field by field, and by digest in host memory or by a MAC elsewhere. What does not
match is a counted miss.
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
