"""Protocols of vLLM's objects: the attributes that this package reads.

Functions of this package name these arguments alike:

- ``scheduler_output``, ``input_batch`` and ``kv_cache_config`` as described below; ``requests``:
  ``RequestState`` by request id.
- ``forward_context``: the layers by name. A layer's ``kv_cache`` has a tensor for each kind of
  state; the first axis is the physical block. States must keep their storage.
- ``copy_funcs`` or ``mamba_state_copy_funcs``: a copy function for each kind of state, by
  ``mamba_type`` of the layer's spec; before vLLM 0.32 one sequence for all layers.
- ``mamba_state_idx``: the running column of each request, by request id.
- ``req_ids`` and ``num_reqs``: requests in batch order; the first ``num_reqs`` are used.
- ``max_num_reqs``: maximum number of requests in a batch. ``device``: device of the states.
- ``make_buffer(n, dtype=...)``: creates a ``HostDeviceBuffer`` of ``n`` elements.
- ``backend``: "torch", "triton", or "auto": the kernels on CUDA, plain Python elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["HostDeviceBuffer", "InputBatch", "KVCacheConfig", "RequestState", "SchedulerOutput"]


class SchedulerOutput(Protocol):
    """The requests and tokens that a step computes."""

    finished_req_ids: Iterable[str]
    preempted_req_ids: Iterable[str] | None
    scheduled_cached_reqs: Any
    """Has ``resumed_req_ids``, the only place where a forced preemption shows up."""
    num_scheduled_tokens: Mapping[str, int]
    scheduled_spec_decode_tokens: Mapping[str, Sequence[Any]]
    """Drafts by request id, for requests with drafts."""


class InputBatch(Protocol):
    """The requests of a step, in batch order."""

    req_ids: Sequence[str]
    num_accepted_tokens_cpu: Any
    """Writable int array by request: accepted tokens of the last step, >= 1."""
    block_table: Any
    """By KV cache group: ``get_device_tensor(num_reqs)`` returns the first rows of its block table,
    [num_reqs, columns] int32 on the device."""


class RequestState(Protocol):
    """A running request."""

    num_computed_tokens: int
    """Tokens that the state contains before the step."""
    block_ids: Sequence[Sequence[int]]
    """By KV cache group: the physical block of each column."""


class KVCacheConfig(Protocol):
    """All KV cache groups of a model."""

    kv_cache_groups: Any
    """Each has ``layer_names``, which share a block table, and their ``kv_cache_spec``."""


class HostDeviceBuffer(Protocol):
    """One array on the host and on the device."""

    np: Any
    cpu: torch.Tensor
    gpu: torch.Tensor

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Enqueue a copy of the first ``n`` elements (default: all); return them on the device."""
