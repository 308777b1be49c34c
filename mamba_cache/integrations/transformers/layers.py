"""The layers of a transformers cache, read and written through their own methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch.nn import functional

from mamba_cache.errors import InvalidArgumentError, ModelChangedError
from mamba_cache.integrations.transformers.library import transformers

__all__ = [
    "CacheFiller",
    "LayerParts",
    "SequenceMemory",
    "copier_of",
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
"""Exactly these: a layer derived from one of them keeps something else besides, or elsewhere."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What one layer keeps of a sequence."""

    kind: str  # the name of the layer's class
    convs: tuple[int, ...]  # indices of its conv states
    recurrents: tuple[int, ...]  # indices of its recurrent states
    has_tokens: bool  # it keeps the keys and values of all tokens
    window: int  # it keeps those of as many tokens, the last ones; 0 if of none or of all


@dataclass(slots=True)
class SequenceMemory:
    """All that a model's cache holds of sequences of one length, layer by layer."""

    num_tokens: int  # whose effect is in it, padding on the left included
    # [rows, *shape] each: conv and recurrent states.
    states: list[torch.Tensor] = field(default_factory=list)
    # [rows, heads, min(num_tokens, window), head_dim] each: keys, then values.
    windows: list[torch.Tensor] = field(default_factory=list)
    # [rows, heads, num_tokens, head_dim] each: keys, then values, of the other layers.
    tokens: list[torch.Tensor] = field(default_factory=list)

    def row(self, row: int, padding: int = 0) -> SequenceMemory:
        """Return views of one row without the ``padding`` tokens on its left."""
        if not padding and self.num_rows == 1:
            return self
        num_tokens = self.num_tokens - padding
        one = slice(row, row + 1)
        return SequenceMemory(
            num_tokens,
            [state[one] for state in self.states],
            [window[one, :, max(window.shape[2] - num_tokens, 0) :] for window in self.windows],
            [tokens[one, :, padding:] for tokens in self.tokens],
        )

    @property
    def num_rows(self) -> int:
        """How many sequences it holds."""
        return self.states[0].shape[0]

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, in the order of the attributes."""
        return [*self.states, *self.windows, *self.tokens]

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each tensor."""
        return list(map(attrgetter("dtype"), self.tensors()))

    def copy_states(self) -> SequenceMemory:
        """Return copies of the states and windows, without the other tokens."""
        states, windows = ([x.clone() for x in own] for own in (self.states, self.windows))
        return SequenceMemory(self.num_tokens, states, windows)

    def to_dtypes(self, dtypes: Sequence[torch.dtype]) -> SequenceMemory:
        """Return copies with the dtypes that ``dtypes`` of another one returned."""
        wanted = iter(dtypes)
        states, windows, tokens = (
            [tensor.to(next(wanted)) for tensor in tensors]
            for tensors in (self.states, self.windows, self.tokens)
        )
        return SequenceMemory(self.num_tokens, states, windows, tokens)


def stack_memories(memories: Sequence[SequenceMemory], num_tokens: int) -> SequenceMemory:
    """Make one batch of sequences of one row each, padded on the left with zeros to a length."""
    short = [num_tokens - memory.num_tokens for memory in memories]
    return SequenceMemory(
        num_tokens,
        [torch.cat(states) for states in zip(*(m.states for m in memories), strict=True)],
        [_cat_padded(rows, short) for rows in zip(*(m.windows for m in memories), strict=True)],
        [_cat_padded(rows, short) for rows in zip(*(m.tokens for m in memories), strict=True)],
    )


def learn_layers(cache: Any) -> tuple[LayerParts, ...]:
    """Find out what each layer of a cache keeps that a forward has filled."""
    layers = tuple(_parts_of(index, layer) for index, layer in enumerate(_layers(cache)))
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
    """Return the tensors of a cache that ``num_tokens`` tokens went through, not copied."""
    memory, filled = SequenceMemory(num_tokens), _layers_like(cache, layers)
    for layer, parts in zip(filled, layers, strict=True):
        if parts.convs:
            convs = list(map(numbered(layer.conv_states).__getitem__, parts.convs))
            # A cache that can take tokens back keeps the windows before them as well.
            if getattr(layer, "record_past", False):
                widths, pairs = (
                    numbered(layer.conv_kernel_size),
                    zip(convs, parts.convs, strict=True),
                )
                convs = [x if x is None else x[..., -widths[i] :] for x, i in pairs]
            memory.states += convs
        if parts.recurrents:
            kept = numbered(layer.recurrent_states)
            memory.states += map(kept.__getitem__, parts.recurrents)
        if parts.window:
            if layer.sliding_window != parts.window + 1:  # what a slot has room for
                raise ModelChangedError(
                    f"the model's sliding window had {parts.window + 1} tokens when the prefix "
                    f"cache was made and has {layer.sliding_window} now: make a new prefix cache"
                )
            memory.windows += [_last(x, parts.window) for x in (layer.keys, layer.values)]
        elif parts.has_tokens:
            memory.tokens += layer.keys, layer.values
    if any(map(is_, memory.tensors(), repeat(None))):
        raise _nothing_left(filled, layers)
    return memory


def _last(kept: Any, num_tokens: int) -> Any:
    """Return the last tokens of a layer's keys or values; None if there are none yet."""
    return None if kept is None else kept[:, :, -num_tokens:]


def _nothing_left(filled: Sequence[Any], layers: Sequence[LayerParts]) -> ModelChangedError:
    missing = []
    for index, (layer, parts) in enumerate(zip(filled, layers, strict=True)):
        expected = {
            "conv states": [numbered(layer.conv_states)[i] for i in parts.convs],
            "recurrent states": [numbered(layer.recurrent_states)[i] for i in parts.recurrents],
            "keys and values": [layer.keys] if parts.window or parts.has_tokens else [],
        }
        names = [name for name, tensors in expected.items() if any(t is None for t in tensors)]
        if names:
            missing.append(f"{' and '.join(names)} in layer {index}")
    return ModelChangedError(
        f"the model left nothing in its cache where {', '.join(missing)} are expected: a layer was "
        "removed or replaced after the prefix cache was made, so make a new prefix cache"
    )


def _cat_padded(rows: Sequence[torch.Tensor], short: Sequence[int]) -> torch.Tensor:
    """Pad each of ``rows``, [1, heads, tokens, head_dim], by as many tokens as it is short."""
    padded = [functional.pad(row, (0, 0, n, 0)) for row, n in zip(rows, short, strict=True)]
    length = min(row.shape[2] for row in padded)  # a window drops what is before it
    return torch.cat([row[:, :, row.shape[2] - length :] for row in padded])


def copier_of(cache: Any) -> Callable[[], Any]:
    """Return what copies an empty cache; no two copies share anything that is written to."""
    layers = [(type(layer), *_split(vars(layer))) for layer in _layers(cache)]

    def copy_cache() -> Any:
        made = copy.copy(cache)
        made.layers = []
        for kind, plain, nested in layers:
            layer = object.__new__(kind)
            attributes = vars(layer)
            attributes.update(plain)
            for name, value in nested:
                attributes[name] = value.copy()
            made.layers.append(layer)
        return made

    return copy_cache


def _split(attributes: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return the attributes that are not written into, and those that are."""
    nested = [(name, x) for name, x in attributes.items() if isinstance(x, (dict, list))]
    return {name: x for name, x in attributes.items() if name not in dict(nested)}, nested


class CacheFiller:
    """Fills fresh caches with tensors that they may keep, without copying or allocating.

    Going through the methods of each layer costs several launches a state. The other attributes
    that these methods set are the same for every sequence: they are taken from the fresh cache
    ``fresh``, which the methods fill with a sample.
    """

    def __init__(self, fresh: Any, layers: tuple[LayerParts, ...], sample: SequenceMemory) -> None:
        self._layers = layers
        states, windows, tokens = iter(sample.states), iter(sample.windows), iter(sample.tokens)
        for layer, parts in zip(_layers(fresh), layers, strict=True):
            _write_states(layer, parts, states)
            if parts.window or parts.has_tokens:
                own = windows if parts.window else tokens
                layer.update(next(own), next(own))
            for name in _TENSORS & vars(layer).keys():
                kept = getattr(layer, name)
                setattr(layer, name, dict.fromkeys(kept) if isinstance(kept, dict) else None)
        self._filled = [_split(vars(layer)) for layer in _layers(fresh)]

    def fill(self, cache: Any, memory: SequenceMemory) -> None:
        """Make a fresh cache own the tensors of ``memory``, which nothing else may use."""
        fresh = _layers_like(cache, self._layers)
        states, windows, tokens = iter(memory.states), iter(memory.windows), iter(memory.tokens)
        for layer, parts, (plain, nested) in zip(fresh, self._layers, self._filled, strict=True):
            vars(layer).update(plain)
            for name, value in nested:
                setattr(layer, name, value.copy())
            if parts.convs:
                _put(layer, "conv_states", parts.convs, states)
            if parts.recurrents:
                _put(layer, "recurrent_states", parts.recurrents, states)
            if parts.window:
                layer.keys, layer.values = next(windows), next(windows)
                layer.cumulative_length = memory.num_tokens
            elif parts.has_tokens:
                layer.keys, layer.values = next(tokens), next(tokens)


_TENSORS = {"conv_states", "recurrent_states", "keys", "values"}


def _put(layer: Any, name: str, indices: Sequence[int], states: Iterator[torch.Tensor]) -> None:
    kept = getattr(layer, name)
    for index in indices:
        if isinstance(kept, dict):
            kept[index] = next(states)
        else:
            setattr(layer, name, next(states))


def _layers_like(cache: Any, layers: Sequence[LayerParts]) -> list[Any]:
    """Return the layers of a cache, which must be of the kinds that were learned."""
    filled = _layers(cache)
    kinds = list(map(attrgetter("__class__.__name__"), filled))
    expected = list(map(attrgetter("kind"), layers))
    if kinds != expected:
        raise ModelChangedError(
            f"the layers of the model's cache were {expected} when the prefix cache was made and "
            f"are {kinds} now: make a new prefix cache"
        )
    return filled


def _layers(cache: Any) -> list[Any]:
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise InvalidArgumentError(
            f"the model's cache must be made of transformers cache layers, got "
            f"{type(cache).__name__}: this model needs a newer transformers"
        )
    return list(layers)


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
    """Return a layer's dict of states; before transformers 5.15 it had at most one of a kind."""
    return states if isinstance(states, dict) else {0: states}


def _write_states(layer: Any, parts: LayerParts, states: Iterator[torch.Tensor]) -> None:
    for i in parts.convs:
        layer.update_conv_state(next(states), state_idx=i)
    for i in parts.recurrents:
        layer.update_recurrent_state(next(states), state_idx=i)
    previous = getattr(layer, "has_previous_state", None)
    if isinstance(previous, dict):  # which only the update of a conv state sets
        previous.update(dict.fromkeys(parts.recurrents, True))
