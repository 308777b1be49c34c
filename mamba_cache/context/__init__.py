"""The inference context, which an engine embeds."""

from mamba_cache.cache.sequence import MissReason, PrefixMatch, Request
from mamba_cache.context.context import DynamicInferenceContext
from mamba_cache.context.memory import CacheStats, Pin
from mamba_cache.context.prefetch import Prefetch, PrefetchState
from mamba_cache.context.requests import Admission, PreparedRequest, RequestStatus
from mamba_cache.context.speculation import DeviceTokens
from mamba_cache.context.step import CapturedExtractions, Forks, ScheduledRequest, Step
from mamba_cache.context.verification import (
    HitToVerify,
    PrefixContent,
    VerificationStats,
)

__all__ = [
    "Admission",
    "CacheStats",
    "CapturedExtractions",
    "DeviceTokens",
    "DynamicInferenceContext",
    "Forks",
    "HitToVerify",
    "MissReason",
    "Pin",
    "Prefetch",
    "PrefetchState",
    "PrefixContent",
    "PrefixMatch",
    "PreparedRequest",
    "Request",
    "RequestStatus",
    "ScheduledRequest",
    "Step",
    "VerificationStats",
]
