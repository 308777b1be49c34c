"""Reading and writing the layers of a transformers cache, and the tensors of slots and KV blocks.

States lie in slots, keys and values in KV blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.nn import functional

from mamba_cache._torch import outside_inference_mode, to_device
from mamba_cache.errors import InvalidArgumentError, ModelChangedError
from mamba_cache.integrations.transformers.library import transformers
from mamba_cache.states import KVCacheSpec, LayerKind, StatePool, StateSpec

__all__ = [
    "LayerParts",
    "PrefixLayout",
    "PrefixTensors",
    "SequenceMemory",
    "ints_to_device",
    "learn_layers",
    "numbered",
    "read_layers",
    "stack_memories",
]

_KNOWN_LAYERS = (
    "DummyLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionLayer",
)
"""Subclasses of these are refused, because they may keep other data."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The data that one layer keeps of a sequence."""

    kind: str  # the name of the layer's class
    convs: tuple[int, ...]  # indices of its conv states
    recurrents: tuple[int, ...]  # indices of its recurrent states
    has_tokens: bool  # the layer keeps the keys and values of all tokens
    window: int  # number of last tokens whose keys and values it keeps; 0: of all or of none


@dataclass(slots=True)
class SequenceMemory:
    """The tensors of a model's cache, layer by layer, for sequences of one length."""

    num_tokens: int  # number of computed tokens, padding on the left included
    # [rows, *shape] each: conv and recurrent states.
    states: list[torch.Tensor] = field(default_factory=list)
    # [rows, heads, min(num_tokens, window), head_dim] each: keys, then values.
    windows: list[torch.Tensor] = field(default_factory=list)
    # [rows, heads, num_tokens, head_dim] each: keys, then values, of layers without a window.
    tokens: list[torch.Tensor] = field(default_factory=list)

    def row(self, row: int, padding: int = 0) -> SequenceMemory:
        """Return views of one row without the ``padding`` tokens on its left."""
        if not padding and len(self.states[0]) == 1:
            return self
        num_tokens = self.num_tokens - padding
        one = slice(row, row + 1)
        return SequenceMemory(
            num_tokens,
            [state[one] for state in self.states],
            [window[one, :, max(window.shape[2] - num_tokens, 0) :] for window in self.windows],
            [tokens[one, :, padding:] for tokens in self.tokens],
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, in the order of the attributes."""
        return [*self.states, *self.windows, *self.tokens]

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each tensor."""
        return list(map(attrgetter("dtype"), self.tensors()))

    def copy_states(self) -> SequenceMemory:
        """Return copies of the states and windows, without keys and values of other layers."""
        clones = (list(map(torch.clone, own)) for own in (self.states, self.windows))
        return SequenceMemory(self.num_tokens, *clones)

    def to_dtypes(self, dtypes: Sequence[torch.dtype]) -> SequenceMemory:
        """Return copies with these dtypes, which are in the order of ``dtypes``."""
        targets = iter(dtypes)
        states, windows, tokens = (
            [tensor.to(next(targets)) for tensor in tensors]
            for tensors in (self.states, self.windows, self.tokens)
        )
        return SequenceMemory(self.num_tokens, states, windows, tokens)


def stack_memories(memories: Sequence[SequenceMemory], num_tokens: int) -> SequenceMemory:
    """Stack memories of one row each, padded on the left with zeros to ``num_tokens``."""
    short = [num_tokens - memory.num_tokens for memory in memories]
    return SequenceMemory(
        num_tokens,
        [torch.cat(states) for states in zip(*(m.states for m in memories), strict=True)],
        [_cat_padded(rows, short) for rows in zip(*(m.windows for m in memories), strict=True)],
        [_cat_padded(rows, short) for rows in zip(*(m.tokens for m in memories), strict=True)],
    )


def learn_layers(cache: Any) -> tuple[LayerParts, ...]:
    """Return the parts of each layer of a cache that a forward has filled."""
    layers = tuple(_parts_of(index, layer) for index, layer in enumerate(cache.layers))
    if not any(layer.convs or layer.recurrents for layer in layers):
        empty = [i for i, layer in enumerate(layers) if layer.kind.startswith("LinearAttention")]
        if empty:
            raise InvalidArgumentError(
                "the model's linear-attention layers must keep their states in its cache; those "
                f"of layers {empty} are still empty after a forward, so the model keeps them in "
                "its own modules, where nothing can be saved or restored"
            )
        raise InvalidArgumentError(
            f"the model must have linear-attention layers, got {sorted({x.kind for x in layers})}: "
            "attention alone can resume anywhere, so keep a transformers DynamicCache of the "
            "prefix and crop it, or use an engine with a prefix cache of its own"
        )
    memory = read_layers(cache, layers, 0)
    devices = {str(tensor.device) for tensor in memory.tensors()}
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"all layers of the model must be on one device, got {sorted(devices)}"
        )
    return layers


def read_layers(cache: Any, layers: tuple[LayerParts, ...], num_tokens: int) -> SequenceMemory:
    """Return the tensors of a cache after ``num_tokens`` tokens, without copying them."""
    memory, missing = SequenceMemory(num_tokens), []
    for index, (layer, parts) in enumerate(zip(_layers_like(cache, layers), layers, strict=True)):
        convs = [numbered(layer.conv_states)[i] for i in parts.convs]
        recurrents = [numbered(layer.recurrent_states)[i] for i in parts.recurrents]
        tokens = [layer.keys, layer.values] if parts.window or parts.has_tokens else []
        kept = {"conv states": convs, "recurrent states": recurrents, "keys and values": tokens}
        names = [name for name, own in kept.items() if any(x is None for x in own)]
        if names:
            missing.append(f"{' and '.join(names)} in layer {index}")
            continue
        # A cache that can remove tokens again keeps older inputs of convolutions as well.
        if getattr(layer, "record_past", False):
            widths = numbered(layer.conv_kernel_size)
            convs = [x[..., -widths[i] :] for x, i in zip(convs, parts.convs, strict=True)]
        memory.states += [*convs, *recurrents]
        if parts.window:
            if layer.sliding_window != parts.window + 1:  # slots have room for the old size
                raise ModelChangedError(
                    f"the model's sliding window had {parts.window + 1} tokens when the prefix "
                    f"cache was made and has {layer.sliding_window} now: make a new prefix cache"
                )
            memory.windows += [x[:, :, -parts.window :] for x in tokens]
        else:
            memory.tokens += tokens
    if missing:
        raise ModelChangedError(
            f"the model left nothing in its cache where {', '.join(missing)} are expected: a layer "
            "was removed or replaced after the prefix cache was made, so make a new prefix cache"
        )
    return memory


def _cat_padded(rows: Sequence[torch.Tensor], short: Sequence[int]) -> torch.Tensor:
    """Pad each row, [1, heads, tokens, head_dim], on the left by its number in ``short``."""
    padded = [functional.pad(row, (0, 0, n, 0)) for row, n in zip(rows, short, strict=True)]
    length = min(row.shape[2] for row in padded)  # windows have fewer tokens than the sequences
    return torch.cat([row[:, :, row.shape[2] - length :] for row in padded])


_TENSORS = {"conv_states", "recurrent_states", "keys", "values"}


def _attributes_of(layer: Any, parts: LayerParts) -> dict[str, Any]:
    """Return the attributes of a filled layer that are the same for every sequence: no tensors."""
    attributes = dict(vars(layer))
    for name in _TENSORS & attributes.keys():
        kept = attributes[name]
        attributes[name] = dict.fromkeys(kept) if isinstance(kept, dict) else None
    previous = attributes.get("has_previous_state")
    if isinstance(previous, dict):  # only the update of a conv state sets its items
        recurrents = dict.fromkeys(parts.recurrents, True)
        attributes["has_previous_state"] = {**previous, **recurrents}
    return attributes


def _put(layer: Any, name: str, indices: Sequence[int], states: Iterator[torch.Tensor]) -> None:
    kept = getattr(layer, name, None)
    for index in indices:
        if isinstance(kept, dict):
            kept[index] = next(states)
        else:
            setattr(layer, name, next(states))


def _layers_like(cache: Any, layers: Sequence[LayerParts]) -> list[Any]:
    """Return the layers of a cache; raise if their kinds differ from ``layers``."""
    filled: list[Any] = cache.layers
    kinds = list(map(attrgetter("__class__.__name__"), filled))
    expected = list(map(attrgetter("kind"), layers))
    if kinds != expected:
        raise ModelChangedError(
            f"the layers of the model's cache were {expected} when the prefix cache was made and "
            f"are {kinds} now: make a new prefix cache"
        )
    return filled


def _parts_of(index: int, layer: Any) -> LayerParts:
    kind = type(layer).__name__
    if kind not in _KNOWN_LAYERS or type(layer) is not getattr(transformers().cache_utils, kind):
        raise InvalidArgumentError(
            f"layer {index} of the cache must be one of {list(_KNOWN_LAYERS)}, got {kind}"
        )
    convs, recurrents = (
        tuple(i for i, state in numbered(getattr(layer, name, None)).items() if state is not None)
        for name in ("conv_states", "recurrent_states")
    )
    has_keys = getattr(layer, "keys", None) is not None
    window = layer.sliding_window - 1 if has_keys and hasattr(layer, "sliding_window") else 0
    return LayerParts(kind, convs, recurrents, has_keys and not window, window)


def numbered(states: Any) -> dict[int, Any]:
    """Return a layer's states as a dict; before transformers 5.15 a layer had just one."""
    return states if isinstance(states, dict) else {0: states}


_Kept = tuple[str, tuple[int, ...], torch.dtype]
"""A tensor of a layer: its name, its shape in one slot or block, and its dtype."""


class PrefixLayout:
    """The tensors that make up a slot and a KV block of one model.

    A slot holds the conv and recurrent states, and the windows of sliding-window layers, which have
    the same size at every position too. A block holds keys and values of the other layers.

    The layout is read from a ``cache`` that a forward has filled, and its ``sample`` of one row.
    """

    def __init__(
        self,
        cache: Any,
        layers: tuple[LayerParts, ...],
        sample: SequenceMemory,
        block_size_tokens: int,
    ) -> None:
        self.layers = layers
        self._filled = [_attributes_of(*each) for each in zip(cache.layers, layers, strict=True)]
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
        self._num_states = len(states)
        self.dtypes = sample.dtypes()

    def fill(self, cache: Any, memory: SequenceMemory) -> None:
        """Put the tensors of ``memory`` into a fresh cache, which then owns them.

        Nothing is copied: the update methods of layers would need several launches for each state.
        """
        fresh = _layers_like(cache, self.layers)
        states, windows, tokens = iter(memory.states), iter(memory.windows), iter(memory.tokens)
        for layer, parts, filled in zip(fresh, self.layers, self._filled, strict=True):
            # Copied, because the cache writes to its dicts.
            own = {name: x.copy() if isinstance(x, dict) else x for name, x in filled.items()}
            vars(layer).update(own)
            _put(layer, "conv_states", parts.convs, states)
            _put(layer, "recurrent_states", parts.recurrents, states)
            if parts.window:
                layer.keys, layer.values = next(windows), next(windows)
                layer.cumulative_length = memory.num_tokens
            elif parts.has_tokens:
                layer.keys, layer.values = next(tokens), next(tokens)

    @property
    def description(self) -> str:
        """All properties of the layout, as text: part of the identity of entries."""
        return f"{self.layers} {self._widths} {self.state_places} {self.block_tensors}"

    def views(self, tensors: Mapping[str, torch.Tensor], num_tokens: int = 0) -> SequenceMemory:
        """Return the states in tensors of a ``StatePool``, [num_layers, rows, *shape] by name.

        Windows have their full width. Nothing is copied.
        """
        by_layer = {name: tensor.unbind() for name, tensor in tensors.items()}
        found = [by_layer[name][number] for name, number in self.state_places]
        return SequenceMemory(num_tokens, found[: self._num_states], found[self._num_states :])

    def kv_spec(self) -> KVCacheSpec:
        """Return the shape of one token's keys and values in a context."""
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
        self._num_blocks = num_blocks  # the last one is the dummy block, for padding
        self.states = states  # one row for each slot
        self.blocks = [  # for each layer its keys, then its values
            torch.zeros((x.num_layers, num_blocks, *x.shape), dtype=x.dtype, device=layout.device)
            for x in layout.block_tensors
        ]

    def kv_cache(self) -> torch.Tensor:
        """Return the KV blocks in the layout of a context, not copied.

        [num_layers, 2, num_blocks, block_size_tokens, num_kv_heads, head_dim].
        """
        if self.blocks:
            keys = self.blocks[0]
            return keys.view(len(keys) // 2, 2, *keys.shape[1:])
        layout = self._layout
        return layout.kv_spec().allocate(self._num_blocks, layout.block_size_tokens, layout.device)

    def clear(self) -> None:
        """Free the memory."""
        self.states = StatePool(self._layout.state_spec, 0, device=self._layout.device)
        self.blocks = []

    def room(self, slot: int, num_tokens: int) -> SequenceMemory:
        """Return views of a slot's tensors for writing; windows have their full width."""
        return self._layout.views(self._of_slot(slot), num_tokens)

    def _of_slot(self, slot: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:, slot, None] for name, tensor in self.states.tensors.items()}

    def save_state(self, slot: int, memory: SequenceMemory) -> None:
        """Copy the states and windows of a one-row ``memory`` into a slot."""
        room = self.room(slot, memory.num_tokens)
        saved, live = [*room.states, *room.windows], [*memory.states]
        live += self._layout.pad_windows(memory)
        # One launch for all layers of a dtype instead of one for each layer.
        torch._foreach_copy_(saved, live)

    def save_tokens(
        self, block_ids: Sequence[int], memory: SequenceMemory, start: int, end: int
    ) -> None:
        """Copy keys and values from ``start`` to ``end`` of a sequence into consecutive blocks.

        ``start`` and ``end`` are block boundaries.
        """
        for spec, pool in zip(self._layout.block_tensors, self.blocks, strict=True):
            places = zip(memory.tokens, self._layout.token_places, strict=True)
            own = [tokens[0, :, start:end] for tokens, (name, _) in places if name == spec.name]
            size, heads, head_dim = spec.shape
            new = torch.stack(own).to(pool.dtype).view(len(own), heads, -1, size, head_dim)
            ids = ints_to_device(block_ids, pool.device)
            pool.index_copy_(1, ids, new.permute(0, 2, 3, 1, 4))

    def load(self, slot: int, block_ids: Sequence[int], num_tokens: int) -> SequenceMemory:
        """Return a copy of a prefix, in one row.

        One copy for each kind of tensor copies it for all layers.
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
    """Copy ints to the device without waiting for the work that is enqueued there."""
    return to_device(torch.tensor(values, device="cpu"), device)


def _sort(kept: Sequence[Sequence[_Kept]]) -> tuple[list[LayerKind], list[tuple[str, int]]]:
    """Group layers by the tensors that they keep.

    Return the kinds of layers; and each tensor's name in a pool and its layer's index there.
    """
    counts: Counter[tuple[_Kept, ...]] = Counter()
    places: list[tuple[str, int]] = []
    for kind in map(tuple, filter(None, kept)):
        counts[kind] += 1
        name = f"kind{[*counts].index(kind)}"
        places += [(f"{name}.{label}", counts[kind] - 1) for label, *_ in kind]
    kinds = [LayerKind(f"kind{i}", count, kind) for i, (kind, count) in enumerate(counts.items())]
    return kinds, places
