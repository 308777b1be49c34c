"""A small hybrid model in plain PyTorch, which shows that the cache fits real layers.

Each layer of the pattern is residual, hidden + layer(RMSNorm(hidden)), between an embedding and a
head. Modules ``mamba`` and ``attention`` have these layers; the MLP uses the squared ReLU of So et
al., 2021 (arXiv:2109.08668).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from mamba_cache.context import DynamicInferenceContext
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.metadata import StepMetadata
from mamba_cache.reference.attention import AttentionLayer
from mamba_cache.reference.batch import PackedBatch
from mamba_cache.reference.mamba import Mamba2Layer
from mamba_cache.reference.model_config import (
    HybridModelConfig,
    WeightMaker,
    rms_norm,
    state_dtype_of,
)
from mamba_cache.states import as_device

__all__ = ["HybridModel"]


class _MLPLayer:
    """Two projections around a squared ReLU, without memory between tokens."""

    def __init__(self, config: HybridModelConfig, layer: int, weights: WeightMaker) -> None:
        self.up_proj = weights.linear(config.mlp_size, config.hidden_size)
        self.down_proj = weights.linear(config.hidden_size, config.mlp_size)

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, caches: DynamicInferenceContext
    ) -> Tensor:
        return F.linear(F.relu(F.linear(hidden, self.up_proj)).square(), self.down_proj)


_LAYERS: Final = {"M": Mamba2Layer, "*": AttentionLayer, "-": _MLPLayer}


class HybridModel:
    """A language model with random weights.

    Args:
        config: The model's shape. Default: ``HybridModelConfig()``.
        dtype: Dtype of weights, keys, values and conv states. SSM states have at least float32.
        device: Device of the model.
        seed: Seed of the weights; a seed gives the same weights for every dtype and device.

    Raises:
        InvalidArgumentError: ``dtype`` is not a floating-point type.
    """

    def __init__(
        self,
        config: HybridModelConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        if not dtype.is_floating_point:
            raise InvalidArgumentError(f"dtype must be a floating-point type, got {dtype}")
        self.config = config = config or HybridModelConfig()
        self.dtype = dtype
        self.device = as_device(device)
        weights = WeightMaker(seed, dtype, self.device)
        self.embedding = weights.normal(config.vocab_size, config.hidden_size)
        self.head = weights.linear(config.vocab_size, config.hidden_size)
        self.norm_weight = torch.ones_like(self.embedding[0])
        self.layers: list[Any] = []
        num_made = Counter[str]()
        for kind in config.layer_pattern:
            self.layers.append(_LAYERS[kind](config, num_made[kind], weights))
            num_made[kind] += 1

    @torch.no_grad()
    def forward(self, metadata: StepMetadata, caches: DynamicInferenceContext) -> Tensor:
        """Compute one step: advance the live states, fill the KV cache, save the checkpoints.

        Nothing is read back from the device, so the host can run ahead of the device.

        Args:
            metadata: The step; the live states are already restored or zeroed.
            caches: The context with ``live_states``, ``kv_cache`` (its last block is the dummy
                block, which is never read) and slots; the layers write to them.

        Returns:
            Logits [num_decode_tokens + num_prefills, vocab_size] of every token of the decoding
            requests and of each prefill's last token, in batch order and in at least float32.

        Raises:
            InvalidArgumentError: The caches were not made for this model, or the step is empty.
        """
        self._check(metadata, caches)
        batch = PackedBatch.build(metadata, self.config)
        hidden = self.embedding[metadata.token_ids[: metadata.num_tokens]]
        for layer in self.layers:
            normed = rms_norm(hidden, self.norm_weight)
            hidden = hidden + layer(normed, batch, caches)
        ends = metadata.query_start_loc[metadata.num_decodes + 1 : metadata.num_requests + 1]
        decoded = hidden[: metadata.num_decode_tokens]
        final = torch.cat([decoded, hidden[ends.long() - 1]])
        final = rms_norm(final, self.norm_weight)
        return F.linear(final, self.head).to(state_dtype_of(self.dtype))

    def _check(self, metadata: StepMetadata, caches: DynamicInferenceContext) -> None:
        if not metadata.num_requests:
            raise InvalidArgumentError("the step has no request; forward needs at least one")
        if metadata.chunk_size > self.config.ssm_chunk_size:
            raise InvalidArgumentError(
                f"the step has chunks of {metadata.chunk_size} tokens; this model's scan takes at "
                f"most {self.config.ssm_chunk_size} (ssm_chunk_size)"
            )
        spec = self.config.state_spec(self.dtype)
        if caches.live_states.spec != spec:
            raise InvalidArgumentError(
                f"live_states must be made for {spec}, got {caches.live_states.spec}"
            )
