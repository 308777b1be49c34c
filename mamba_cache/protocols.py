"""What an embedder supplies, as Protocols: each lists just what is read of its objects."""

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
    """What slots read of a KV block allocator.

    The embedder owns the arrays and writes into them at any time; what they say is never cached.
    Megatron Core calls ``pool_size`` ``total_count``: both names are read. Arrays on a device are
    read too, and each read waits for it.
    """

    pool_size: int
    """KV blocks in the pool, the dummy block included."""

    block_ref_counts: Any
    """[pool_size] int32, CPU: requests that refer to each block."""

    block_timestamps: Any
    """[pool_size] int64, CPU: larger means used more recently. Read under LRU alone."""

    block_hashes: Any
    """[pool_size] int64, CPU: each block's hash id, -1 if it has none."""


class RankAgreement(Protocol):
    """How the ranks of one model agree on what all of them can do."""

    def largest(self, values: Sequence[float]) -> Sequence[float]:
        """Return the largest of what the ranks give, value by value.

        All ranks call it alike: in the same order, with as many values.
        """


class SlotContext(Protocol):
    """What ``MambaSlotAllocator`` reads of the inference context that embeds it, and nothing more.

    Fields are read when a call needs them, so an object with fewer will do for fewer calls.
    """

    max_requests: int
    block_size_tokens: int
    prefix_caching_eviction_policy: Any
    """A str enum of value "lru" or "ref_zero"; compared by value."""
    mamba_chunk_size: int
    ssm_chunk_alignment: int
    max_mamba_intermediate_states_per_step: int
    """Rows of the scratch that the forward writes checkpoint states to; 0: no scratch. Where it is
    absent, as in Megatron Core before 0.19, three for each of ``max_requests``."""

    @property
    def kv_block_allocator(self) -> KVBlockView:
        """The KV blocks' owner."""

    request_to_kv_block_ids: Any
    """[max_requests, max blocks of a request] int, CPU."""

    mamba_metadata: Any
    """``request_to_mamba_state_idx``, [max_requests] int32, CPU: the live-state row of each request
    row; ``intermediate_count``: states that the forward wrote into the scratch, over all requests
    of the batch; ``per_request_intermediate_counts``: the same for each prefill request of the
    batch, in batch order."""

    mamba_conv_states: Any
    """Live conv states, [num_mamba_layers, max_requests, *conv], on the device."""
    mamba_ssm_states: Any
    """Live SSM states, [num_mamba_layers, max_requests, *ssm], on the device."""
    live_states: Any
    """Live states of other kinds than these two, by name: a ``StatePool``, or a mapping of tensors
    [num_layers, max_requests, *shape] on the device."""

    batch_dimensions: Any
    """``prefill_req_count`` and ``decode_req_count``: the requests of each kind in the batch."""

    paused_request_count: int
