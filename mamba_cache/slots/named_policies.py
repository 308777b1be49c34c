"""The slot policies by the names that settings and commands give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mamba_cache.slots.adaptive import AdaptiveSlotPolicy
from mamba_cache.slots.policies import (
    ConsumedSlotPolicy,
    LruSlotPolicy,
    ScoreSlotPolicy,
    SlotEvictionPolicy,
)

__all__ = ["SLOT_POLICIES"]

SLOT_POLICIES: Final[dict[str, Callable[[], SlotEvictionPolicy]]] = {
    "adaptive": AdaptiveSlotPolicy,
    "lru": LruSlotPolicy,
    "consumed": ConsumedSlotPolicy,
    "score": ScoreSlotPolicy,
}
"""What makes each; the names are ``SlotPolicyName``'s."""
