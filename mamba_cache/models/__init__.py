"""The reference hybrid model, and what it asks of the caches around it."""

from mamba_cache.models.batch import ModelCaches
from mamba_cache.models.config import HybridModelConfig
from mamba_cache.models.hybrid import HybridModel

__all__ = ["HybridModel", "HybridModelConfig", "ModelCaches"]
