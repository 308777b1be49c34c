"""The inference context: what an engine embeds."""

from mamba_cache.context.context import DynamicInferenceContext
from mamba_cache.context.device_tokens import DeviceTokens
from mamba_cache.context.extractions import CapturedExtractions
from mamba_cache.context.forks import Forks
from mamba_cache.context.matching import MissReason, PrefixMatch
from mamba_cache.context.memory import CacheMemory
from mamba_cache.context.requests import (
    Admission,
    PreparedRequest,
    Request,
    RequestProgress,
    RequestStatus,
)
from mamba_cache.context.stats import CacheStats
from mamba_cache.context.step import ScheduledRequest, Step

__all__ = [
    "Admission",
    "CacheMemory",
    "CacheStats",
    "CapturedExtractions",
    "DeviceTokens",
    "DynamicInferenceContext",
    "Forks",
    "MissReason",
    "PrefixMatch",
    "PreparedRequest",
    "Request",
    "RequestProgress",
    "RequestStatus",
    "ScheduledRequest",
    "Step",
]
