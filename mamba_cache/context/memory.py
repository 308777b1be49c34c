"""Sizes of the pools, and the small facts about live rows that slots read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_cache.config import CacheConfig
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import KVCacheSpec, StateSpec, blocks_in_budget, slots_in_budget

__all__ = ["BatchCounts", "LiveRows", "kv_pool_size", "num_slots"]


class LiveRows:
    """The metadata of Mamba layers that slots read; here a request's row is its live-state row.

    Attributes:
        request_to_mamba_state_idx: [max_requests] int32, CPU: the identity.
        intermediate_count: 0: checkpoints are written to their slots, not to a scratch.
        per_request_intermediate_counts: Empty, likewise.
    """

    def __init__(self, max_requests: int) -> None:
        self.request_to_mamba_state_idx = torch.arange(max_requests, dtype=torch.int32)
        self.intermediate_count = 0
        self.per_request_intermediate_counts: tuple[int, ...] = ()


@dataclass(slots=True)
class BatchCounts:
    """How many requests of each kind the step in flight has.

    Attributes:
        prefill_req_count: Requests that compute a chunk of their prompt.
        decode_req_count: Requests that decode.
    """

    prefill_req_count: int = 0
    decode_req_count: int = 0


def kv_pool_size(config: CacheConfig, kv_spec: KVCacheSpec | None) -> int:
    """Return the KV blocks of the pool, the dummy block included.

    Raises:
        InvalidArgumentError: A budget in GB is given, but not the size of a block.
        BudgetError: The budget does not hold one block and the dummy block.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks + 1
    if kv_spec is None:
        raise InvalidArgumentError(
            "kv_cache_gb needs kv_spec, which says how large a block is; give it, or num_kv_blocks"
        )
    assert config.kv_cache_gb is not None
    return blocks_in_budget(config.kv_cache_gb, kv_spec, config.block_size_tokens)


def num_slots(config: CacheConfig, state_spec: StateSpec) -> int:
    """Return the slots that the budget holds; none if prefix caching is off.

    Raises:
        BudgetError: The budget does not hold one slot.
    """
    if not config.enable_prefix_caching:
        return 0
    if config.max_slots is not None:
        return config.max_slots
    assert config.mamba_cache_gb is not None
    return slots_in_budget(config.mamba_cache_gb, state_spec)
