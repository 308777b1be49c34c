"""A small engine over the context: continuous batching, and the example of how to embed it.

Read ``engine`` first: one step is a dozen lines. ``scheduler`` decides who takes part in it,
``waiting`` lets requests that begin alike share work, and ``sampling`` picks tokens.
"""

from mamba_cache.engine.engine import Engine
from mamba_cache.engine.model import LanguageModel, ModelShape
from mamba_cache.engine.results import Completion, FinishReason, TokenEvent
from mamba_cache.engine.sampling import SamplingParams, sample

__all__ = [
    "Completion",
    "Engine",
    "FinishReason",
    "LanguageModel",
    "ModelShape",
    "SamplingParams",
    "TokenEvent",
    "sample",
]
