"""The tensors of saved prefixes: states in slots, keys and values in blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from mamba_cache._torch import outside_inference_mode, to_device
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.transformers.layers import LayerParts, SequenceMemory
from mamba_cache.states import KVCacheSpec, LayerKind, StateSpec

__all__ = ["PrefixLayout", "PrefixTensors", "ints_to_device"]

_ALIGNMENT = 16
"""Bytes: what the widest access of a GPU needs, so no kernel runs slower on a tensor in a slot."""


@dataclass(frozen=True, slots=True)
class _SlotGroup:
    """Tensors in a slot that are alike, one after the other: one call makes the views of all."""

    indices: tuple[int, ...]  # which of the slot's tensors they are
    dtype: torch.dtype
    shape: tuple[int, ...]  # how many there are, one row, and the shape of each
    strides: tuple[int, ...]  # of elements; only between two tensors may be gaps, to align them
    start: int  # the first element of the first, if all of the slot were of this dtype
    name: str  # of its states in a pool; empty for windows


@dataclass(frozen=True, slots=True)
class _TokenGroup:
    """Layers' keys and values of one shape and dtype, which one tensor keeps."""

    indices: tuple[int, ...]  # which of ``SequenceMemory.tokens`` they are
    heads: int
    head_dim: int
    dtype: torch.dtype


class PrefixLayout:
    """What a slot and a KV block of one model are made of.

    A slot holds the conv and recurrent states and, because they too have one size at any position,
    the windows of sliding-window layers, one after the other in one row of bytes: a state is
    restored by one copy. A block holds keys and values of all other layers.

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
            (window.shape[1], width, window.shape[3])
            for window, width in zip(sample.windows, self._widths, strict=True)
        ]
        states = [tuple(state.shape[1:]) for state in sample.states]
        dtypes = [x.dtype for x in (*sample.states, *sample.windows)]
        kinds, self._state_places = _sort_states(layers, sample.states)
        self.state_spec = StateSpec.of(*kinds)  # of a state in a pool, without windows
        self.num_state_layers = sum(kind.num_layers for kind in kinds)
        names = [name for name, _ in self._state_places] + [""] * len(windows)
        self._slot_groups, self.bytes_per_slot = _arrange([*states, *windows], dtypes, names)
        self.token_groups = _group(sample.tokens)
        self.bytes_per_block = block_size_tokens * sum(
            len(group.indices) * group.heads * group.head_dim * group.dtype.itemsize
            for group in self.token_groups
        )
        self.device = sample.states[0].device
        self.initial = SequenceMemory(  # what a cache holds before the first token: one row
            0,
            [torch.zeros_like(state) for state in sample.states],
            [window[:, :, :0].clone() for window in sample.windows],
            [tokens[:, :, :0].clone() for tokens in sample.tokens],
        )

    @property
    def description(self) -> str:
        """Name all that says how slots and blocks are laid out."""
        return f"{self.layers} {self._widths} {self._slot_groups} {self.token_groups}"

    @property
    def has_attention(self) -> bool:
        """Whether any layer keeps keys and values."""
        return any(parts.has_tokens or parts.window for parts in self.layers)

    def slot_views(self, row: torch.Tensor, num_tokens: int) -> SequenceMemory:
        """Return the tensors in a row of bytes, [bytes_per_slot], windows in their full width."""
        views: dict[int, torch.Tensor] = {}
        for group in self._slot_groups:  # every hit makes them, so not one by one
            typed = row.view(group.dtype)
            start = typed.storage_offset() + group.start
            alike = typed.as_strided(group.shape, group.strides, start).unbind()
            views.update(zip(group.indices, alike, strict=True))
        found = [views[index] for index in range(len(views))]
        num_states = len(self.initial.states)
        return SequenceMemory(num_tokens, found[:num_states], found[num_states:])

    def pool_views(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the states in slots, [num_slots, bytes_per_slot], as a ``StatePool`` has them.

        By name [num_layers, num_slots, *shape]; not copied.
        """
        views = {}
        for group in self._slot_groups:
            if group.name:
                typed = slots.view(group.dtype)
                shape = (group.shape[0], len(slots), *group.shape[2:])
                strides = (group.strides[0], typed.stride(0), *group.strides[2:])
                views[group.name] = typed.as_strided(shape, strides, group.start)
        return views

    def state_views(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the states of tensors [num_layers, rows, *shape] as layers see them.

        [rows, *shape] each, in the order of ``SequenceMemory.states``; not copied.
        """
        return [tensors[name][layer] for name, layer in self._state_places]

    def kv_spec(self) -> KVCacheSpec:
        """Return what one token's keys and values are in a context, if it has a place for them."""
        windows = [i for i, parts in enumerate(self.layers) if parts.window]
        if windows:
            raise InvalidArgumentError(
                f"generate_batch cannot serve this model: layers {windows} have a sliding window, "
                "and a context keeps the keys and values of all tokens; generate serves it"
            )
        if not self.token_groups:
            return KVCacheSpec(num_layers=0, num_kv_heads=1, head_dim=1, dtype=torch.float32)
        if len(self.token_groups) > 1:
            shapes = sorted(str((g.heads, g.head_dim, g.dtype)) for g in self.token_groups)
            raise InvalidArgumentError(
                "generate_batch cannot serve this model: its attention layers must have keys and "
                f"values of one shape, got (heads, size of a head, dtype) {shapes}; generate "
                "serves it"
            )
        [group] = self.token_groups
        return KVCacheSpec(
            num_layers=len(group.indices) // 2,
            num_kv_heads=group.heads,
            head_dim=group.head_dim,
            dtype=group.dtype,
        )

    def pad_windows(self, memory: SequenceMemory) -> list[torch.Tensor]:
        """Return a sequence's windows, widened to their full size with zeros at the end."""
        return [
            functional.pad(window, (0, 0, 0, width - window.shape[2]))
            for window, width in zip(memory.windows, self._widths, strict=True)
        ]


class PrefixTensors:
    """Storage for saved states and KV blocks; ownership is tracked by the index."""

    @outside_inference_mode
    def __init__(self, layout: PrefixLayout, *, num_slots: int, num_blocks: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        size, device = layout.block_size_tokens, layout.device
        self.slots = torch.zeros(num_slots, layout.bytes_per_slot, dtype=torch.uint8, device=device)
        # Of a layer keys come first, then values; padding is written to the last block.
        self.blocks = [
            torch.zeros(
                (len(group.indices), num_blocks + 1, size, group.heads, group.head_dim),
                dtype=group.dtype,
                device=device,
            )
            for group in layout.token_groups
        ]

    def kv_cache(self) -> torch.Tensor:
        """Return the KV blocks as a context has them, not copied.

        [num_layers, 2, num_blocks + 1, block_size_tokens, num_kv_heads, head_dim].
        """
        if self.blocks:
            keys = self.blocks[0]
            return keys.view(len(keys) // 2, 2, *keys.shape[1:])
        layout = self._layout
        return layout.kv_spec().allocate(
            self._num_blocks + 1, layout.block_size_tokens, layout.device
        )

    def clear(self) -> None:
        """Give the memory back."""
        self.slots, self.blocks = self.slots[:0].clone(), []

    def room(self, slot: int, num_tokens: int) -> SequenceMemory:
        """Return the tensors of a slot, to be written; windows are of their full width."""
        return self._layout.slot_views(self.slots[slot], num_tokens)

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
        size = self._layout.block_size_tokens
        for pool, group in zip(self.blocks, self._layout.token_groups, strict=True):
            tokens = torch.stack([memory.tokens[i][0, :, start:end] for i in group.indices])
            tokens = tokens.to(pool.dtype)
            ids = ints_to_device(block_ids, pool.device)
            shape = (len(group.indices), group.heads, len(block_ids), size, group.head_dim)
            pool.index_copy_(1, ids, tokens.view(shape).permute(0, 2, 3, 1, 4))

    def load(self, slot: int, block_ids: Sequence[int], num_tokens: int) -> SequenceMemory:
        """Return a prefix in tensors of its own: one copy of its state, one of its KV blocks.

        One row. States are views of one row of bytes, keys and values of one tensor.
        """
        saved = self._layout.slot_views(self.slots[slot].clone(), num_tokens)
        saved.windows = [window[:, :, :num_tokens] for window in saved.windows]
        found: dict[int, torch.Tensor] = {}
        for pool, group in zip(self.blocks, self._layout.token_groups, strict=True):
            ids = ints_to_device(block_ids, pool.device)
            tokens = pool.index_select(1, ids).flatten(1, 2)[:, :num_tokens].transpose(1, 2)
            found.update(zip(group.indices, tokens.unsqueeze(1).unbind(), strict=True))
        saved.tokens = [found[index] for index in sorted(found)]
        return saved


def ints_to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Bring ints to the device without waiting for what is enqueued there."""
    return to_device(torch.tensor(values, device="cpu"), device)


def _sort_states(
    layers: Sequence[LayerParts], states: Sequence[torch.Tensor]
) -> tuple[list[LayerKind], list[tuple[str, int]]]:
    """Sort layers by what they keep; return their kinds, and each state's name and number."""
    counts: Counter[tuple[Any, ...]] = Counter()
    places: list[tuple[str, int]] = []
    left = iter(states)
    for parts in layers:
        labels = [f"conv{i}" for i in parts.convs]
        labels += [f"recurrent{i}" for i in parts.recurrents]
        if not labels:
            continue
        own = zip(labels, left, strict=False)
        kind = tuple((label, tuple(state.shape[1:]), state.dtype) for label, state in own)
        counts[kind] += 1
        name = f"kind{[*counts].index(kind)}"
        places += [(f"{name}.{label}", counts[kind] - 1) for label in labels]
    kinds = [LayerKind(f"kind{i}", count, kind) for i, (kind, count) in enumerate(counts.items())]
    return kinds, places


def _arrange(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], names: Sequence[str]
) -> tuple[list[_SlotGroup], int]:
    """Lay tensors one after the other; return where they are, and the bytes of all."""
    alike: dict[tuple[tuple[int, ...], torch.dtype, str], list[int]] = {}
    for index, key in enumerate(zip(shapes, dtypes, names, strict=True)):
        alike.setdefault(key, []).append(index)
    groups, end = [], 0
    for (shape, dtype, name), indices in alike.items():
        num_bytes = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        strides = (num_bytes // dtype.itemsize, *torch.empty((1, *shape), device="meta").stride())
        group_shape = (len(indices), 1, *shape)
        groups.append(
            _SlotGroup(tuple(indices), dtype, group_shape, strides, end // dtype.itemsize, name)
        )
        end += len(indices) * num_bytes
    return groups, end


def _group(tokens: Sequence[torch.Tensor]) -> list[_TokenGroup]:
    groups: dict[tuple[int, int, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tokens):
        key = tensor.shape[1], tensor.shape[3], tensor.dtype
        groups.setdefault(key, []).append(index)
    return [_TokenGroup(tuple(indices), *key) for key, indices in groups.items()]
