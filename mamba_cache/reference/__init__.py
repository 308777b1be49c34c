"""The reference engine and the reference model: an example of how to embed the cache.

Read ``engine`` first: one step is a dozen lines. ``drafting`` proposes draft tokens; ``sampling``
samples tokens and verifies drafts. ``hybrid_model`` is a hybrid model in plain PyTorch; ``mamba``
shows how a layer reads and writes the cache.
"""

from mamba_cache.reference.drafting import Drafter, NgramDrafter
from mamba_cache.reference.engine import (
    Completion,
    Engine,
    LanguageModel,
    TokenEvent,
)
from mamba_cache.reference.hybrid_model import HybridModel
from mamba_cache.reference.model_config import HybridModelConfig
from mamba_cache.reference.sampling import SamplingParams, sample, verify, verify_greedy_on_device

__all__ = [
    "Completion",
    "Drafter",
    "Engine",
    "HybridModel",
    "HybridModelConfig",
    "LanguageModel",
    "NgramDrafter",
    "SamplingParams",
    "TokenEvent",
    "sample",
    "verify",
    "verify_greedy_on_device",
]
