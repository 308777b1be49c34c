"""The Protocol of a model that the engine can run."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from mamba_cache.metadata import StepMetadata
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = ["LanguageModel", "ModelShape"]


class ModelShape(Protocol):
    """What a model says about its tokens, its chunks and the memory that it needs."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def ssm_chunk_size(self) -> int:
        """Tokens of the longest chunk that its SSM scan takes."""

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        """What one slot holds for weights of ``dtype``."""

    def kv_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """What one KV block holds for weights of ``dtype``."""


class LanguageModel(Protocol):
    """A hybrid model that computes one step of the context."""

    @property
    def config(self) -> ModelShape:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    def forward(self, metadata: StepMetadata, caches: Any) -> torch.Tensor:
        """Compute a step: advance live states, fill the KV cache, write checkpoints.

        Args:
            metadata: The step.
            caches: The ``DynamicInferenceContext``; a model names what it reads of it.

        Returns:
            Logits [num_decode_tokens + num_prefills, vocab_size] of every token of the decoding
            requests and of each prefill's last token, in batch order.
        """
