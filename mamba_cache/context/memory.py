"""What the memory of a context is made of: sizes within budgets, slots, and kinds of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import cast

import torch

from mamba_cache.cache import SLOT_POLICIES, RefZeroSlotPolicy, SlotEvictionPolicy
from mamba_cache.config import CacheConfig, EvictionPolicy
from mamba_cache.context.pins import Pins
from mamba_cache.context.requests import ActiveRequest, Admission
from mamba_cache.errors import BudgetError, InvalidArgumentError
from mamba_cache.protocols import SlotContext
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import (
    KVCacheSpec,
    SlotQuantization,
    StateSpec,
    blocks_in_budget,
    slots_in_budget,
)

__all__ = [
    "SLOT_FIELDS",
    "SharedStore",
    "check_shared",
    "kv_pool_size",
    "layer_labels",
    "layers_by_kind",
    "make_slot_allocator",
    "paired",
    "slot_spec",
]


SLOT_FIELDS = (
    "device", "kv_block_allocator", "max_requests", "block_size_tokens",
    "prefix_caching_eviction_policy", "mamba_chunk_size", "ssm_chunk_alignment",
    "max_mamba_intermediate_states_per_step", "request_to_kv_block_ids", "mamba_metadata",
    "mamba_conv_states", "mamba_ssm_states", "live_states", "batch_dimensions",
    "paused_request_count",
)  # fmt: skip
"""What slots read: ``protocols.SlotContext``, and where the tensors are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStore:
    """Prefixes that a context shares with somebody else who computes them with the same model.

    Whoever made it keeps its bookkeeping: has slots hear of KV blocks that are deregistered, puts
    both behind a guard, and holds none of them while a call of the context runs, beside what it
    has cached.

    Attributes:
        slots: The slots; their ``kv_blocks`` are the KV blocks, a ``KVBlockAllocator``. The context
            is embedded in them.
        kv_cache: As the context's; None without ``kv_spec``.
        counters: Where the context counts.
        on_admitted: Called with each request that begins to run, and what was found of it, by
            whoever logs and verifies what all that share this do.
        pins: Prompts that stay cached for all that share this; None: the context has its own.
        refuses_states: Whether the slots' policy may refuse states; not where whoever made this
            copies each of them elsewhere.
    """

    slots: MambaSlotAllocator
    kv_cache: torch.Tensor | None
    counters: Counter[str]
    on_admitted: Callable[[ActiveRequest, Admission], object] | None = None
    pins: Pins | None = None
    refuses_states: bool = True


def kv_pool_size(config: CacheConfig, kv_spec: KVCacheSpec | None) -> int:
    """Return the KV blocks of the pool, the dummy block included."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks + 1
    if kv_spec is None:
        raise InvalidArgumentError(
            "kv_cache_gb and cache_gb need kv_spec, which says how large a block is: give it, or "
            "num_kv_blocks"
        )
    budget = config.kv_budget_gb
    assert budget is not None
    block_bytes = kv_spec.bytes_per_block(config.block_size_tokens)
    if not block_bytes:
        raise InvalidArgumentError(
            "a model without attention has no KV blocks to measure in kv_cache_gb or cache_gb: "
            "give num_kv_blocks"
        )
    if budget * 2**30 < 2 * block_bytes:
        raise BudgetError(
            f"kv_cache_gb={budget} GiB is too small: it must be at least "
            f"{2 * block_bytes / 2**30} GiB, for one KV block of {block_bytes} bytes and the dummy "
            "block that padding is written to"
        )
    return blocks_in_budget(budget, kv_spec, config.block_size_tokens)


def layers_by_kind(spec: StateSpec) -> dict[str, tuple[range, dict[str, str]]]:
    """Number the layers of all kinds in order; return each kind's, and its tensors' names in pools.

    The names in a pool are by the names within a layer.
    """
    layers, first = {}, 0
    for kind in spec.kinds:
        names = {name: kind.name_in_pool(name) for name in kind.names}
        layers[kind.name] = range(first, first + kind.num_layers), names
        first += kind.num_layers
    return layers


def layer_labels(spec: StateSpec) -> list[int | str]:
    """Say what messages call each layer: a number, or the name of its kind and a number."""
    return [
        f"{kind.name} {layer}" if kind.name else layer
        for kind in spec.kinds
        for layer in range(kind.num_layers)
    ]


_Pair = tuple[str | None, torch.Tensor | None, str | None, torch.Tensor | None]
"""What one launch extracts: a state's name in the pool and its values, and a window's."""


def paired(
    names: Mapping[str, str],
    chunk_states: Mapping[str, torch.Tensor],
    window_inputs: Mapping[str, torch.Tensor],
) -> list[_Pair]:
    """Pair the states that a layer hands over with its windows."""
    if not isinstance(chunk_states, Mapping) or not isinstance(window_inputs, Mapping):
        raise InvalidArgumentError(
            "chunk_states and window_inputs must map names to tensors, "
            f"got {type(chunk_states).__name__} and {type(window_inputs).__name__}"
        )
    given = [*chunk_states, *window_inputs]
    if len(given) != len(names) or set(given) != names.keys():
        raise InvalidArgumentError(
            f"a layer of this kind must hand over each of {[*names]} once, as chunk_states "
            f"or as window_inputs, got {[*chunk_states]} and {[*window_inputs]}"
        )
    tensors = [*chunk_states.values(), *window_inputs.values()]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        raise InvalidArgumentError(
            "chunk_states and window_inputs must be tensors, one row for each chunk and each "
            f"prefill token, got {tensors!r}"
        )
    states = [(names[name], tensor) for name, tensor in chunk_states.items()]
    windows = [(names[name], tensor) for name, tensor in window_inputs.items()]
    nothing = (None, None)
    return [(*a, *b) for a, b in zip_longest(states, windows, fillvalue=nothing)]


def make_slot_allocator(
    config: CacheConfig,
    fields: SimpleNamespace,
    state_spec: StateSpec,
    policy: SlotEvictionPolicy | None,
) -> MambaSlotAllocator:
    """Make the slots."""
    return MambaSlotAllocator.from_spec(
        cast(SlotContext, fields),
        _num_slots(config, slot_spec(config, state_spec)),
        state_spec,
        policy=_default_policy(config) if policy is None else policy,
        quantization=_quantization(config),
    )


def check_shared(
    shared: SharedStore, config: CacheConfig, state_spec: StateSpec, kv_spec: KVCacheSpec | None
) -> None:
    """Check that what is shared is what the settings describe."""
    slots, kv_cache = shared.slots, shared.kv_cache
    pool_size = kv_pool_size(config, kv_spec)
    shape = None
    if kv_spec is not None:
        part = pool_size, config.block_size_tokens, kv_spec.num_kv_heads, kv_spec.head_dim
        shape = (kv_spec.num_layers, 2, *part), kv_spec.dtype
    given = slots.kv_blocks.pool_size, slots.max_slots, slots.states.spec
    own = pool_size, _num_slots(config, slot_spec(config, state_spec)), state_spec
    has = None if kv_cache is None else (tuple(kv_cache.shape), kv_cache.dtype)
    if given != own or has != shape:
        raise InvalidArgumentError(
            "what a context shares must have its KV blocks, slots, states, and keys and values: "
            f"{own} and {shape}, got {given} and {has}"
        )


def _default_policy(config: CacheConfig) -> SlotEvictionPolicy:
    if config.slot_policy is None and config.eviction_policy is EvictionPolicy.REF_ZERO:
        return RefZeroSlotPolicy()
    return SLOT_POLICIES[config.slot_policy or "adaptive"]()


def slot_spec(config: CacheConfig, state_spec: StateSpec) -> StateSpec:
    """Return what one slot holds."""
    quantization = _quantization(config)
    return quantization.slot_spec(state_spec) if quantization else state_spec


def _quantization(config: CacheConfig) -> SlotQuantization | None:
    """Return which tensors slots keep in int8, or None if they keep all as they are."""
    if config.slot_quantization is None:
        return None
    return SlotQuantization(config.quantized_tensors)


def _num_slots(config: CacheConfig, slot_spec: StateSpec) -> int:
    """Return the slots that the budget holds; none if prefix caching is off."""
    if not config.enable_prefix_caching:
        return 0
    if config.max_slots is not None:
        return config.max_slots
    assert config.slot_budget_gb is not None
    return slots_in_budget(config.slot_budget_gb, slot_spec)
