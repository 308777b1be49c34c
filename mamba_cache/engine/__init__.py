"""A small engine over the context: continuous batching, and the example of how to embed it.

Read ``engine`` first: one step is a dozen lines. ``scheduler`` decides who takes part in it,
``waiting`` lets requests that begin alike share work, ``sampling`` picks tokens, ``drafting``
guesses them, and ``verification`` keeps the guesses that were right.
"""

from mamba_cache.engine.drafting import Drafter, NgramDrafter
from mamba_cache.engine.engine import Engine
from mamba_cache.engine.model import LanguageModel, ModelShape
from mamba_cache.engine.results import Completion, DecodingStats, FinishReason, TokenEvent
from mamba_cache.engine.sampling import SamplingParams, sample
from mamba_cache.engine.verification import verify, verify_greedy_on_device

__all__ = [
    "Completion",
    "DecodingStats",
    "Drafter",
    "Engine",
    "FinishReason",
    "LanguageModel",
    "ModelShape",
    "NgramDrafter",
    "SamplingParams",
    "TokenEvent",
    "sample",
    "verify",
    "verify_greedy_on_device",
]
