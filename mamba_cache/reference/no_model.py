"""A stand-in for a model: the control plane runs without one in replays and benchmarks."""

from __future__ import annotations

import torch

from mamba_cache._checks import INT32_MAX
from mamba_cache.context import CapturedExtractions, DynamicInferenceContext
from mamba_cache.metadata import StepMetadata
from mamba_cache.states import KVCacheSpec, StateSpec

__all__ = ["NoModel", "count_as_computed"]


def count_as_computed(
    context: DynamicInferenceContext, metadata: StepMetadata, num_layers: int = 1
) -> None:
    """Have the states of a step counted as handed over, as if there were a model."""
    lengths = metadata.num_chunks, metadata.num_prefill_tokens
    context.count_extractions(CapturedExtractions(dict.fromkeys(range(num_layers), lengths)))


class NoModel:
    """Computes nothing and answers with token 0; it is its own ``config``."""

    dtype = torch.float32
    device = torch.device("cpu")
    vocab_size = ssm_chunk_size = INT32_MAX

    @property
    def config(self) -> NoModel:
        """What the engine asks for sizes."""
        return self

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        """Return one layer of states of one number each, so that slots cost next to nothing."""
        return StateSpec.mamba(1, (1, 1), (1, 1, 1), dtype, dtype)

    def kv_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return a spec without layers: no KV cache is allocated."""
        return KVCacheSpec(0, 1, 1, dtype)

    def forward(self, metadata: StepMetadata, caches: DynamicInferenceContext) -> torch.Tensor:
        """Return logits [num_requests, 1], and count the states as handed over."""
        count_as_computed(caches, metadata)
        return torch.zeros(metadata.num_requests, 1)
