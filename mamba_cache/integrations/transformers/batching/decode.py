"""The decode step: requests in the rows of the live states, computed there as one batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mamba_cache._torch import outside_inference_mode
from mamba_cache.context import DynamicInferenceContext
from mamba_cache.integrations.transformers.batching.kernels import decode_inputs_torch
from mamba_cache.integrations.transformers.batching.layout import BatchLayout
from mamba_cache.integrations.transformers.batching.paged import PagedAttention
from mamba_cache.integrations.transformers.layers import CacheFiller
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.states import kernels_for

__all__ = ["DecodeStep", "padded_sizes"]

_KERNELS = "mamba_cache.integrations.transformers.batching.kernels.decode_inputs"


def padded_sizes(max_requests: int) -> tuple[int, ...]:
    """Return the sizes of decode batches: few enough to capture a CUDA graph for each."""
    sizes = {size for size in (1, 2, 4, 8, 12, 16, 24, 32, 48) if size < max_requests}
    sizes |= {*range(64, max_requests, 32), max_requests}
    return tuple(sorted(sizes))


class DecodeStep:
    """Compute one token of each decoding request, as one batch over the live states.

    Row i of the batch is row i of the live states, which layers read and write in place. Rows
    without a decoding request are computed too: their keys and values go to the dummy block, and
    their live states change.

    All tensors that it reads have fixed addresses, and nothing waits for the device, so it can be
    captured in a CUDA graph.
    """

    @outside_inference_mode
    def __init__(
        self,
        runner: ModelRunner,
        context: DynamicInferenceContext,
        layout: BatchLayout,
        filler: CacheFiller,
        attention: PagedAttention,
    ) -> None:
        self._runner = runner
        self._layout = layout
        self._filler = filler
        self.attention = attention
        self._live = context.live_states.tensors
        self._metadata = context.step_buffers.tensors
        config, device = context.config, context.device
        dummy = context.kv_block_allocator.dummy_block_id * config.block_size_tokens
        self._dummy_slot = dummy
        self._device = device
        self._kernels = kernels_for("auto", device, kernels=_KERNELS, twins=decode_inputs_torch)
        self._caches: dict[int, Any] = {}

    def compute(self, num_rows: int) -> torch.Tensor:
        """Compute the step whose metadata are on the device, for the rows below ``num_rows``.

        Returns [num_rows, vocabulary] logits, undefined for rows that do not decode.
        """
        metadata = self._metadata
        places, tokens, positions, slots = self._kernels.sort_by_row(
            metadata["decode_state_rows"][:, 0],
            metadata["token_ids"],
            metadata["positions"],
            metadata["kv_slot_mapping"],
            num_rows,
            self._dummy_slot,
        )
        is_known = (places >= 0).long()
        with self.attention.during(
            slots, metadata["block_tables"], places, positions, lengths=is_known
        ):
            logits = self._runner.forward_rows(
                tokens[:, None], positions[:, None], self._cache(num_rows)
            )
        return logits[:, -1]

    def clear_step(self) -> None:
        """Mark every row as idle until the next step's metadata arrive."""
        self._metadata["decode_state_rows"].fill_(-1)

    def _cache(self, num_rows: int) -> Any:
        """Return a cache of the model whose states are the live ones."""
        if num_rows in self._caches:
            return self._caches[num_rows]
        first = {name: tensor[:, :num_rows] for name, tensor in self._live.items()}
        spec = self._layout.kv_spec
        nothing = torch.empty(
            (spec.num_layers, 2, num_rows, spec.num_kv_heads, 0, spec.head_dim),
            dtype=spec.dtype,
            device=self._device,
        )
        cache = self._runner.new_cache()
        self._filler.fill(cache, self._layout.memory(self._layout.views(first), nothing, 1))
        number = 0
        for layer, parts in zip(cache.layers, self._layout.layout.layers, strict=True):
            if parts.has_tokens:
                layer.update = partial(self.attention.update, number)
                number += 1
        self._caches[num_rows] = cache
        return cache
