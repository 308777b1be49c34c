"""A stand-in for a model: the control plane runs without one in replays and benchmarks."""

from __future__ import annotations

import torch

from mamba_cache._checks import INT32_MAX
from mamba_cache.context import CapturedExtractions, DynamicInferenceContext
from mamba_cache.metadata import StepMetadata
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = ["NoModel", "count_as_computed", "smallest_state"]

_MADE_UP_TOKENS = 64


def smallest_state(dtype: torch.dtype = torch.float32) -> StateSpec:
    """Return one layer of states of one number each, so that slots cost next to nothing."""
    return StateSpec.mamba(1, (1, 1), (1, 1, 1), dtype, dtype)


def count_as_computed(
    context: DynamicInferenceContext, metadata: StepMetadata, num_layers: int = 1
) -> None:
    """Have the states of a step counted as handed over, as if there were a model."""
    lengths = metadata.num_chunks, metadata.num_prefill_tokens
    context.count_extractions(CapturedExtractions(dict.fromkeys(range(num_layers), lengths)))


class NoModel:
    """Computes nothing and makes up the next tokens; in all else the engine finds it a model.

    It is its own ``config``.

    Args:
        seed: Of the tokens that it makes up.
        keeps_kv: Whether it has a layer of keys and values, the smallest, so that tiers count them.
        fails_every: Raise in every so manieth forward; 0: never.

    Attributes:
        dtype: Of weights that it does not have.
        device: The CPU.
        vocab_size: The most that there can be.
        ssm_chunk_size: Likewise.
    """

    def __init__(self, seed: int = 0, *, keeps_kv: bool = False, fails_every: int = 0) -> None:
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.vocab_size = self.ssm_chunk_size = INT32_MAX
        self._keeps_kv = keeps_kv
        self._fails_every = fails_every
        self._generator = torch.Generator().manual_seed(seed)
        self._num_forwards = 0

    @property
    def config(self) -> NoModel:
        """What the engine asks for sizes."""
        return self

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        """Return ``smallest_state``."""
        return smallest_state(dtype)

    def kv_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """One layer of a byte for each key and value, or none."""
        return KVCacheSpec(1, 1, 1, torch.uint8) if self._keeps_kv else KVCacheSpec(0, 1, 1, dtype)

    def forward(self, metadata: StepMetadata, caches: DynamicInferenceContext) -> torch.Tensor:
        """Return random logits [num_requests, 64], and count the states as handed over.

        Raises:
            InterruptedError: It is this forward's turn to fail.
        """
        self._num_forwards += 1
        if self._fails_every and self._num_forwards % self._fails_every == 0:
            raise InterruptedError(f"forward {self._num_forwards} fails, as it was told to")
        count_as_computed(caches, metadata)
        return self._draw_logits(metadata)

    def _draw_logits(self, metadata: StepMetadata) -> torch.Tensor:
        return torch.rand(metadata.num_requests, _MADE_UP_TOKENS, generator=self._generator)
