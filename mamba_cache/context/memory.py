"""What the memory of a context is made of: sizes within budgets, slots, and kinds of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import torch

from mamba_cache.cache import (
    SLOT_POLICIES,
    KVBlockAllocator,
    RefZeroSlotPolicy,
    SlotEvictionPolicy,
)
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
    slots_in_budget,
)

__all__ = ["SLOT_FIELDS", "CacheMemory", "make_memory"]

SLOT_FIELDS = (
    "device", "kv_block_allocator", "max_requests", "block_size_tokens",
    "prefix_caching_eviction_policy", "mamba_chunk_size", "ssm_chunk_alignment",
    "max_mamba_intermediate_states_per_step", "request_to_kv_block_ids", "mamba_metadata",
    "mamba_conv_states", "mamba_ssm_states", "live_states", "batch_dimensions",
    "paused_request_count",
)  # fmt: skip
"""What slots read: ``protocols.SlotContext``, and where the tensors are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMemory:
    """KV blocks and slots, their tensors, and what is kept of them.

    A context makes its own, or runs over that of an owner who computes prefixes of the same model.
    An owner puts both behind a guard and holds none of them while a call of the context runs,
    beside what is cached.
    """

    slots: MambaSlotAllocator  # over the KV blocks; the context is embedded in them
    kv_cache: torch.Tensor | None
    pins: Pins
    counters: Counter[str] = field(default_factory=Counter)
    on_admitted: Callable[[ActiveRequest, Admission], object] | None = None
    refuses_states: bool = True  # whether the policy may; not where each state is copied elsewhere


def make_memory(
    config: CacheConfig,
    state_spec: StateSpec,
    kv_spec: KVCacheSpec | None,
    *,
    device: torch.device,
    policy: SlotEvictionPolicy | None,
    clock: Callable[[], float],
) -> CacheMemory:
    """Make the memory of a context of its own."""
    kv_blocks = KVBlockAllocator(
        _kv_pool_size(config, kv_spec),
        eviction_policy=config.eviction_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        as_tensor=torch.from_numpy,
    )
    kv_cache = None
    if kv_spec is not None:
        kv_cache = kv_spec.allocate(kv_blocks.pool_size, config.block_size_tokens, device)
    fields = SimpleNamespace(  # until the context is embedded
        kv_block_allocator=kv_blocks,
        device=device,
        max_requests=config.max_requests,
        max_mamba_intermediate_states_per_step=0,
    )
    quantization, slot_spec = None, state_spec
    if config.slot_quantization is not None:
        quantization = SlotQuantization(config.quantized_tensors)
        slot_spec = quantization.slot_spec(state_spec)
    num_slots = config.max_slots if config.enable_prefix_caching else 0
    if num_slots is None:
        assert config.slot_budget_gb is not None
        num_slots = slots_in_budget(config.slot_budget_gb, slot_spec)
    if policy is None:
        is_ref_zero = config.eviction_policy is EvictionPolicy.REF_ZERO
        policy_of = RefZeroSlotPolicy if is_ref_zero else SLOT_POLICIES["adaptive"]
        policy = SLOT_POLICIES.get(config.slot_policy or "", policy_of)()
    slots = MambaSlotAllocator.from_spec(
        cast(SlotContext, fields),
        num_slots,
        state_spec,
        policy=policy,
        quantization=quantization,
    )
    if slots.knows_prompts:
        kv_blocks.ask_states()
    pins = Pins(kv_blocks, slots, max_share=config.max_pinned_share, clock=clock)
    return CacheMemory(slots=slots, kv_cache=kv_cache, pins=pins)


def _kv_pool_size(config: CacheConfig, kv_spec: KVCacheSpec | None) -> int:
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
    num_blocks = int(budget * 2**30) // block_bytes
    if num_blocks < 2:
        raise BudgetError(
            f"kv_cache_gb={budget} GiB is too small: it must be at least "
            f"{2 * block_bytes / 2**30} GiB, for one KV block of {block_bytes} bytes and the dummy "
            "block that padding is written to"
        )
    return num_blocks
