"""What is read of vLLM's own objects, as Protocols with the attribute names that they have.

Of a running request two attributes are read: ``num_computed_tokens``, the tokens whose effect is in
the state before the step, and ``block_ids``, by KV cache group the physical block ids, one for each
column. Of a layer of the forward context one: ``kv_cache``, a tensor for each kind of state, the
first axis being the physical block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = [
    "CacheSettings",
    "EngineConfig",
    "HostDeviceBuffer",
    "HybridModel",
    "InputBatch",
    "KVCacheConfig",
    "MakeBuffer",
    "NewRequest",
    "ResidentBatch",
    "SchedulerOutput",
    "StateSpecView",
]


class SchedulerOutput(Protocol):
    """What a step computes."""

    finished_req_ids: Iterable[str]
    preempted_req_ids: Iterable[str] | None
    scheduled_cached_reqs: Any
    """``resumed_req_ids``; a forced preemption shows up only among these."""
    num_scheduled_tokens: Mapping[str, int]
    scheduled_spec_decode_tokens: Mapping[str, Sequence[Any]]
    """Drafts of each request that has any."""


class InputBatch(Protocol):
    """The requests of a step, in batch order."""

    req_ids: Sequence[str]
    num_accepted_tokens_cpu: Any
    """Writable ints, one for each request: accepted tokens of the last step, at least 1."""
    block_table: Any
    """By KV cache group: ``get_device_tensor(num_reqs)`` returns the first rows of its block table,
    [num_reqs, columns] int32 on the device."""


class StateSpecView(Protocol):
    """What is read of the spec of a Mamba group."""

    @property
    def block_size(self) -> int:
        """Tokens of one column."""

    @property
    def num_speculative_blocks(self) -> int:
        """Columns after the running one, one for each draft."""

    @property
    def mamba_cache_mode(self) -> str:
        """Where states are kept: "none", "align" or "all"."""


class KVCacheConfig(Protocol):
    """All KV cache groups of a model."""

    kv_cache_groups: Any
    """Each with the ``layer_names`` that share a block table, and their ``kv_cache_spec``."""


class CacheSettings(Protocol):
    """The engine's cache settings."""

    enable_prefix_caching: bool
    mamba_cache_mode: str


class HostDeviceBuffer(Protocol):
    """One array on the host and on the device."""

    np: Any
    cpu: torch.Tensor
    gpu: torch.Tensor

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Enqueue the copy of the first ``n`` elements, or of all; return them on the device."""


class MakeBuffer(Protocol):
    """What makes a buffer of ``n`` elements."""

    def __call__(self, n: int, *, dtype: torch.dtype) -> Any:
        """Return a ``HostDeviceBuffer``."""


class NewRequest(Protocol):
    """A request that gets a slot of the resident state."""

    num_computed_tokens: int


class ResidentBatch(Protocol):
    """A batch whose state is resident on the GPU."""

    num_reqs: int
    idx_mapping: torch.Tensor
    """[num_reqs] int32 or int64 on the device: the request slot of each row, -1 to skip the row."""
    query_start_loc: torch.Tensor
    """[num_reqs + 1] int32 on the device: the first token of each row, then their number."""


class HybridModel(Protocol):
    """A model with Mamba layers."""

    def get_mamba_state_copy_func(self) -> Sequence[Any]:
        """Return the copy function of each kind of state.

        Models of vLLM from 0.32 on have ``get_mamba_state_copy_funcs(mamba_types)`` instead, which
        returns them in a dict by kind of layer.
        """


class EngineConfig(Protocol):
    """What the resident state reads of an engine's configuration."""

    cache_config: Any
    """``mamba_cache_mode``, and ``mamba_block_size`` where no KV cache config is given."""
    scheduler_config: Any
    """``max_num_seqs``."""
    model_config: Any
    """``max_model_len``."""
    compilation_config: Any
    """``static_forward_context``: layers by name."""
    num_speculative_tokens: int
