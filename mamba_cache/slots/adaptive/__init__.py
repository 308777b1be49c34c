"""The adaptive policy: it learns which states come back, and keeps those."""

from mamba_cache.slots.adaptive.policy import AdaptiveSlotPolicy

__all__ = ["AdaptiveSlotPolicy"]
