"""The tensors of saved prefixes: states in slots, keys and values in blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from mamba_cache._torch import outside_inference_mode, to_device
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.layers import LayerParts, SequenceMemory
from mamba_cache.states import KVCacheSpec, LayerKind, StatePool, StateSpec

__all__ = ["PrefixLayout", "PrefixTensors", "ints_to_device"]

_Kept = tuple[str, tuple[int, ...], torch.dtype]
"""What one tensor of a layer is called, its shape in one slot or block, and its dtype."""


class PrefixLayout:
    """What a slot and a KV block of one model are made of.

    A slot holds the conv and recurrent states and, because they too have one size at any position,
    the windows of sliding-window layers. A block holds keys and values of all other layers.

    It is learned from what such a cache held of some sequence, one row.
    """

    def __init__(
        self, layers: tuple[LayerParts, ...], sample: SequenceMemory, block_size_tokens: int
    ) -> None:
        self.layers = layers
        self.block_size_tokens = block_size_tokens
        self._widths = [
            parts.window for parts in layers if parts.window for _ in ("keys", "values")
        ]
        windows = [
            ((window.shape[1], width, window.shape[3]), window.dtype)
            for window, width in zip(sample.windows, self._widths, strict=True)
        ]
        states = [(tuple(state.shape[1:]), state.dtype) for state in sample.states]
        left, of_windows = iter(states), iter(windows)
        kept = [
            [(f"conv{i}", *next(left)) for i in parts.convs]
            + [(f"recurrent{i}", *next(left)) for i in parts.recurrents]
            for parts in layers
        ]
        kept += [[(x, *next(of_windows)) for x in ("keys", "values")] for p in layers if p.window]
        kinds, self.state_places = _sort(kept)
        self.state_spec = StateSpec.of(*kinds)
        self.num_state_layers = sum(bool(own.convs or own.recurrents) for own in layers)
        tokens = [((block_size_tokens, x.shape[1], x.shape[3]), x.dtype) for x in sample.tokens]
        kinds, self.token_places = _sort([[("tokens", *each)] for each in tokens])
        self.block_tensors = StateSpec.of(*kinds).tensors if kinds else ()
        self.bytes_per_block = sum(one.num_layers * one.layer_bytes for one in self.block_tensors)
        self.device = sample.states[0].device
        self.has_attention = any(parts.has_tokens or parts.window for parts in layers)
        self.initial = SequenceMemory(  # what a cache holds before the first token: one row
            0,
            [torch.zeros_like(state) for state in sample.states],
            [window[:, :, :0].clone() for window in sample.windows],
            [tokens[:, :, :0].clone() for tokens in sample.tokens],
        )

    @property
    def description(self) -> str:
        """Name all that says how slots and blocks are laid out."""
        return f"{self.layers} {self._widths} {self.state_places} {self.block_tensors}"

    def views(self, tensors: Mapping[str, torch.Tensor], num_tokens: int = 0) -> SequenceMemory:
        """Return the states in tensors of a ``StatePool``, [num_layers, rows, *shape] by name.

        Windows are of their full width. Nothing is copied.
        """
        by_layer = {name: tensor.unbind() for name, tensor in tensors.items()}
        found = [by_layer[name][number] for name, number in self.state_places]
        num_states = len(self.initial.states)
        return SequenceMemory(num_tokens, found[:num_states], found[num_states:])

    def kv_spec(self) -> KVCacheSpec:
        """Return what one token's keys and values are in a context, if it has a place for them."""
        windows = [i for i, parts in enumerate(self.layers) if parts.window]
        if windows:
            raise InvalidArgumentError(
                f"generate_batch cannot serve this model: layers {windows} have a sliding window, "
                "and a context keeps the keys and values of all tokens; generate serves it"
            )
        if not self.block_tensors:
            return KVCacheSpec(num_layers=0, num_kv_heads=1, head_dim=1, dtype=torch.float32)
        if len(self.block_tensors) > 1:
            shapes = sorted(str((*one.shape[1:], one.dtype)) for one in self.block_tensors)
            raise InvalidArgumentError(
                "generate_batch cannot serve this model: its attention layers must have keys and "
                f"values of one shape, got (heads, size of a head, dtype) {shapes}; generate "
                "serves it"
            )
        [own] = self.block_tensors
        _, heads, head_dim = own.shape
        return KVCacheSpec(own.num_layers // 2, heads, head_dim, own.dtype)

    def pad_windows(self, memory: SequenceMemory) -> list[torch.Tensor]:
        """Return a sequence's windows, widened to their full size with zeros at the end."""
        return [
            functional.pad(window, (0, 0, 0, width - window.shape[2]))
            for window, width in zip(memory.windows, self._widths, strict=True)
        ]


class PrefixTensors:
    """Storage for saved states and KV blocks; ownership is tracked by the index."""

    @outside_inference_mode
    def __init__(self, layout: PrefixLayout, states: StatePool, num_blocks: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks  # padding is written to the last one
        self.states = states  # as in slots
        self.blocks = [  # of a layer keys come first, then values
            torch.zeros((x.num_layers, num_blocks, *x.shape), dtype=x.dtype, device=layout.device)
            for x in layout.block_tensors
        ]

    def kv_cache(self) -> torch.Tensor:
        """Return the KV blocks as a context has them, not copied.

        [num_layers, 2, num_blocks, block_size_tokens, num_kv_heads, head_dim].
        """
        if self.blocks:
            keys = self.blocks[0]
            return keys.view(len(keys) // 2, 2, *keys.shape[1:])
        layout = self._layout
        return layout.kv_spec().allocate(self._num_blocks, layout.block_size_tokens, layout.device)

    def clear(self) -> None:
        """Give the memory back."""
        self.states = StatePool(self._layout.state_spec, 0, device=self._layout.device)
        self.blocks = []

    def room(self, slot: int, num_tokens: int) -> SequenceMemory:
        """Return the tensors of a slot, to be written; windows are of their full width."""
        return self._layout.views(self._of_slot(slot), num_tokens)

    def _of_slot(self, slot: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:, slot, None] for name, tensor in self.states.tensors.items()}

    def save_state(self, slot: int, memory: SequenceMemory) -> None:
        """Copy the states and windows of a one-row ``memory`` into a slot."""
        room = self.room(slot, memory.num_tokens)
        saved, live = [*room.states, *room.windows], [*memory.states]
        live += self._layout.pad_windows(memory)
        # One launch for all layers of a dtype, where a loop would take one for each.
        torch._foreach_copy_(saved, live)

    def save_tokens(
        self, block_ids: Sequence[int], memory: SequenceMemory, start: int, end: int
    ) -> None:
        """Copy keys and values from ``start`` to ``end`` of a sequence into consecutive blocks.

        Both are block boundaries.
        """
        for spec, pool in zip(self._layout.block_tensors, self.blocks, strict=True):
            places = zip(memory.tokens, self._layout.token_places, strict=True)
            own = [tokens[0, :, start:end] for tokens, (name, _) in places if name == spec.name]
            size, heads, head_dim = spec.shape
            new = torch.stack(own).to(pool.dtype).view(len(own), heads, -1, size, head_dim)
            ids = ints_to_device(block_ids, pool.device)
            pool.index_copy_(1, ids, new.permute(0, 2, 3, 1, 4))

    def load(self, slot: int, block_ids: Sequence[int], num_tokens: int) -> SequenceMemory:
        """Return a prefix in tensors of its own, one row.

        One copy for each kind of state serves all layers, and one for keys and values alike.
        """
        own = {name: tensor.clone() for name, tensor in self._of_slot(slot).items()}
        saved = self._layout.views(own, num_tokens)
        saved.windows = [window[:, :, :num_tokens] for window in saved.windows]
        found: dict[str, Sequence[torch.Tensor]] = {}
        for spec, pool in zip(self._layout.block_tensors, self.blocks, strict=True):
            ids = ints_to_device(block_ids, pool.device)
            tokens = pool.index_select(1, ids).flatten(1, 2)[:, :num_tokens].transpose(1, 2)
            found[spec.name] = tokens.unsqueeze(1).unbind()
        saved.tokens = [found[name][number] for name, number in self._layout.token_places]
        return saved


def ints_to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Bring ints to the device without waiting for what is enqueued there."""
    return to_device(torch.tensor(values, device="cpu"), device)


def _sort(kept: Sequence[Sequence[_Kept]]) -> tuple[list[LayerKind], list[tuple[str, int]]]:
    """Sort layers by the tensors that they keep.

    Return their kinds; and what each tensor is called in a pool, and its layer's number there.
    """
    counts: Counter[tuple[_Kept, ...]] = Counter()
    places: list[tuple[str, int]] = []
    for kind in map(tuple, filter(None, kept)):
        counts[kind] += 1
        name = f"kind{[*counts].index(kind)}"
        places += [(f"{name}.{label}", counts[kind] - 1) for label, *_ in kind]
    kinds = [LayerKind(f"kind{i}", count, kind) for i, (kind, count) in enumerate(counts.items())]
    return kinds, places
