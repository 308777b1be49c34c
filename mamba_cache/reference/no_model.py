"""A stand-in for a model, to run the control plane in replays and benchmarks."""

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
    """Count the states of a step as handed over, as if a model had computed them."""
    lengths = metadata.num_chunks, metadata.num_prefill_tokens
    context.count_extractions(CapturedExtractions(dict.fromkeys(range(num_layers), lengths)))


class NoModel:
    """A model that computes nothing and answers with token 0; also its own ``config``."""

    dtype = torch.float32
    device = torch.device("cpu")
    vocab_size = ssm_chunk_size = INT32_MAX

    @property
    def config(self) -> NoModel:
        """The object itself, which has the sizes that the engine reads."""
        return self

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        """Return a spec of one layer with one number per state, so that slots are tiny."""
        return StateSpec.mamba(1, (1, 1), (1, 1, 1), dtype, dtype)

    def kv_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return a spec without layers: no KV cache is allocated."""
        return KVCacheSpec(0, 1, 1, dtype)

    def forward(self, metadata: StepMetadata, caches: DynamicInferenceContext) -> torch.Tensor:
        """Return logits [num_requests, 1], and count the states as handed over."""
        count_as_computed(caches, metadata)
        return torch.zeros(metadata.num_requests, 1)
