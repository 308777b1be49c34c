"""What a context must hold for a model's layers, and which of its tensors each layer's are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.layers import SequenceMemory
from mamba_cache.integrations.transformers.tensors import PrefixLayout
from mamba_cache.states import KVCacheSpec, LayerKind, StateSpec

__all__ = ["BatchLayout"]


class BatchLayout:
    """The states and KV blocks of a context, as the layers of a model's cache see them.

    Attributes:
        layout: What each layer of the model keeps.
        state_spec: What one live state, and one slot, holds.
        kv_spec: What one KV block holds.
        num_state_layers: Layers that keep a state.

    Raises:
        InvalidArgumentError: A layer keeps what a context has no place for.
    """

    def __init__(self, layout: PrefixLayout) -> None:
        self.layout = layout
        windows = [i for i, parts in enumerate(layout.layers) if parts.window]
        if windows:
            raise InvalidArgumentError(
                f"generate_batch cannot serve this model: layers {windows} have a sliding window, "
                "and a context keeps the keys and values of all tokens; generate serves it"
            )
        self.kv_spec = _kv_spec(layout.initial.tokens)
        self._places = layout.state_places
        self.state_spec = StateSpec.of(
            *(LayerKind(name, number, kind) for name, (number, kind) in layout.state_kinds.items())
        )
        self.num_state_layers = sum(kind.num_layers for kind in self.state_spec.kinds)

    def kv_cache(self, blocks: Sequence[torch.Tensor], pool_size: int) -> torch.Tensor:
        """Return what ``PrefixTensors.blocks`` holds as a context has it, not copied.

        [num_layers, 2, pool_size, block_size_tokens, num_kv_heads, head_dim].
        """
        if blocks:
            keys = blocks[0]
            return keys.view(len(keys) // 2, 2, *keys.shape[1:])
        layout = self.layout
        return self.kv_spec.allocate(pool_size, layout.block_size_tokens, layout.device)

    def views(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the states of tensors [num_layers, rows, *shape] as layers see them.

        [rows, *shape] each, in the order of ``SequenceMemory.states``; not copied.
        """
        return [tensors[name][layer] for name, layer in self._places]

    def memory(
        self, states: list[torch.Tensor], kv: torch.Tensor, num_tokens: int
    ) -> SequenceMemory:
        """Return what a model's cache is filled with.

        Of states [rows, *shape] each, and [num_layers, 2, rows, kv_heads, num_tokens, head_dim]
        keys and values.
        """
        return SequenceMemory(num_tokens, states, [], list(kv.flatten(0, 1).unbind()))


def _kv_spec(tokens: Sequence[torch.Tensor]) -> KVCacheSpec:
    """Return what one token's keys and values are."""
    shapes = {(t.shape[1], t.shape[3], t.dtype) for t in tokens}
    if not shapes:
        return KVCacheSpec(num_layers=0, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    if len(shapes) > 1:
        raise InvalidArgumentError(
            "generate_batch cannot serve this model: its attention layers must have keys and "
            "values of one shape, got (heads, size of a head, dtype) "
            f"{sorted(map(str, shapes))}; generate serves it"
        )
    heads, head_dim, dtype = shapes.pop()
    return KVCacheSpec(
        num_layers=len(tokens) // 2, num_kv_heads=heads, head_dim=head_dim, dtype=dtype
    )
