"""What is read of vLLM's own objects, as Protocols with the attribute names that they have.

Functions of this package take these objects under the same names:

- ``scheduler_output``, ``input_batch`` and ``kv_cache_config`` as described below; ``requests``:
  each ``RequestState`` by request id.
- ``forward_context``: the layers by name. Of a layer ``kv_cache`` is read, a tensor for each kind
  of state, the first axis being the physical block. States must keep their storage.
- ``copy_funcs`` or ``mamba_state_copy_funcs``: what each kind of state is, by ``mamba_type`` of the
  layer's spec; before vLLM 0.32 one sequence for all layers.
- ``mamba_state_idx``: the running column of each request, by request id.
- ``req_ids`` and ``num_reqs``: requests in batch order, and how many of them are meant.
- ``max_num_reqs``: the most requests of a batch. ``device``: where the states live.
- ``make_buffer(n, dtype=...)``: makes a ``HostDeviceBuffer`` of ``n`` elements.
- ``backend``: "torch", "triton", or "auto": the kernels on CUDA, plain Python elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["HostDeviceBuffer", "InputBatch", "KVCacheConfig", "RequestState", "SchedulerOutput"]


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
    """Writable int array, one entry for each request: accepted tokens of the last step, >= 1."""
    block_table: Any
    """By KV cache group: ``get_device_tensor(num_reqs)`` returns the first rows of its block table,
    [num_reqs, columns] int32 on the device."""


class RequestState(Protocol):
    """A running request."""

    num_computed_tokens: int
    """Tokens whose effect is in the state before the step."""
    block_ids: Sequence[Sequence[int]]
    """By KV cache group the physical block of each column."""


class KVCacheConfig(Protocol):
    """All KV cache groups of a model."""

    kv_cache_groups: Any
    """Each with the ``layer_names`` that share a block table, and their ``kv_cache_spec``."""


class HostDeviceBuffer(Protocol):
    """One array on the host and on the device."""

    np: Any
    cpu: torch.Tensor
    gpu: torch.Tensor

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Enqueue the copy of the first ``n`` elements, or of all; return them on the device."""
