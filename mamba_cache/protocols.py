"""Protocols of the objects that an embedder supplies: each has exactly the fields that are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = [
    "KVBlockView",
    "RankAgreement",
    "SlotContext",
]

# `Any` stands for a CPU torch tensor or a numpy array: this module imports neither.


class KVBlockView(Protocol):
    """The fields of a KV block allocator that slots read.

    The embedder owns the arrays and may write them at any time; slots keep no copies. Megatron Core
    calls ``pool_size`` ``total_count``: both names are read. Arrays may be on a device, but then
    each read waits for the device.
    """

    pool_size: int
    """Number of KV blocks in the pool, with the dummy block."""

    block_ref_counts: Any
    """[pool_size] int32, CPU: number of references to each block."""

    block_timestamps: Any
    """[pool_size] int64, CPU: larger means used more recently. Read only under LRU."""

    block_hashes: Any
    """[pool_size] int64, CPU: hash id of each block, -1 for none."""


class RankAgreement(Protocol):
    """Lets the ranks of one model agree on values."""

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Return the maximum over all ranks, value by value.

        All ranks must make the same calls in the same order, with equally many values.
        """


class SlotContext(Protocol):
    """The fields of an embedding inference context that ``MambaSlotAllocator`` reads.

    Fields are read when a call needs them. An embedder that does not make such calls can omit them.
    """

    max_requests: int
    block_size_tokens: int
    prefix_caching_eviction_policy: Any
    """A str enum with the value "lru" or "ref_zero"; compared by value."""
    mamba_chunk_size: int
    ssm_chunk_alignment: int
    max_mamba_intermediate_states_per_step: int
    """Number of rows of the scratch to which the forward writes checkpoint states; 0: no scratch.
    Default, as for Megatron Core before 0.19: three for each of ``max_requests``."""

    @property
    def kv_block_allocator(self) -> KVBlockView:
        """The owner of the KV blocks."""

    request_to_kv_block_ids: Any
    """[max_requests, max blocks of a request] int, CPU."""

    mamba_metadata: Any
    """``request_to_mamba_state_idx``, [max_requests] int32, CPU: the live-state row of each request
    row; ``intermediate_count``: number of states that the forward wrote to the scratch, over all
    requests of the batch; ``per_request_intermediate_counts``: the same number for each prefill
    request, in batch order."""

    mamba_conv_states: Any
    """Live conv states, [num_mamba_layers, max_requests, *conv], on the device."""
    mamba_ssm_states: Any
    """Live SSM states, [num_mamba_layers, max_requests, *ssm], on the device."""
    live_states: Any
    """Live states of other kinds, by name: a ``StatePool``, or a mapping of names to tensors
    [num_layers, max_requests, *shape] on the device."""

    batch_dimensions: Any
    """``prefill_req_count`` and ``decode_req_count``: numbers of requests in the batch."""

    paused_request_count: int
