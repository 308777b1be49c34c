"""The memory of a context: KV cache, live states and slots, with the books over each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache._weak_callback import WeakCallback
from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.config import CacheConfig
from mamba_cache.context.extractions import CapturedExtractions, StepExtractions
from mamba_cache.context.request_rows import RequestRows
from mamba_cache.errors import BudgetError, InvalidArgumentError, StepOrderError
from mamba_cache.metadata import StepBuffers, StepMetadata
from mamba_cache.protocols import SlotContext
from mamba_cache.slots import MambaSlotAllocator, SlotEvictionPolicy
from mamba_cache.states import (
    KVCacheSpec,
    SlotQuantization,
    StatePool,
    StateSpec,
    as_device,
    blocks_in_budget,
    extract_checkpoint_states,
    slots_in_budget,
)

__all__ = ["BatchCounts", "CacheMemory", "LiveRows"]


_SLOT_FIELDS = (
    "device", "kv_block_allocator", "max_requests", "block_size_tokens",
    "prefix_caching_eviction_policy", "mamba_chunk_size", "ssm_chunk_alignment",
    "max_mamba_intermediate_states_per_step", "request_to_kv_block_ids", "mamba_metadata",
    "mamba_conv_states", "mamba_ssm_states", "batch_dimensions", "paused_request_count",
)  # fmt: skip
"""What slots read: ``protocols.SlotContext``, and where the tensors are."""


class LiveRows:
    """The metadata of Mamba layers that slots read; here a request's row is its live-state row.

    Attributes:
        request_to_mamba_state_idx: [max_requests] int32, CPU: the identity; -1 with drafts, when
            the device alone knows which of a request's rows holds its state.
        intermediate_count: 0: checkpoints are written to their slots, not to a scratch.
        per_request_intermediate_counts: Empty, likewise.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.request_to_mamba_state_idx = torch.arange(
            config.max_requests, dtype=torch.int32, device="cpu"
        )
        if config.num_speculative_tokens:
            self.request_to_mamba_state_idx[:] = -1
        self.intermediate_count = 0
        self.per_request_intermediate_counts: tuple[int, ...] = ()


@dataclass(slots=True)
class BatchCounts:
    """How many requests of each kind the latest step has.

    Attributes:
        prefill_req_count: Requests that compute a chunk of their prompt.
        decode_req_count: Requests that decode.
    """

    prefill_req_count: int = 0
    decode_req_count: int = 0


class CacheMemory:
    """Tensors for a model's states, keys and values, and the allocators that keep their books.

    It has every field of ``protocols.SlotContext``, so that slots can be embedded in it.

    Args:
        config: Settings.
        state_spec: What one state holds.
        kv_spec: What one token's keys and values hold, or None.
        device: Where the tensors are.
        slot_policy: Which states are given up first.

    Attributes:
        config: Settings.
        device: Where the tensors are.
        kv_block_allocator: Bookkeeping of KV blocks.
        slot_allocator: Bookkeeping of slots, and the saved states.
        bytes_per_slot: What one slot holds, in bytes.
        request_rows: Requests as rows of arrays, and their KV blocks.
        step_buffers: The tensors of a step's metadata.
        kv_cache: [num_layers, 2, pool_size, block_size_tokens, num_kv_heads, head_dim], keys then
            values; None without ``kv_spec``. The last block is the dummy block.
        live_states: The states that running requests read and write,
            ``config.live_rows_per_request`` rows each.

    Raises:
        BudgetError: A budget is too small for one block, or for one slot.
        InvalidArgumentError: The settings do not fit each other.
    """

    @outside_inference_mode
    def __init__(
        self,
        config: CacheConfig,
        state_spec: StateSpec,
        kv_spec: KVCacheSpec | None,
        *,
        device: torch.device | str,
        slot_policy: SlotEvictionPolicy | None,
    ) -> None:
        _check_tensors(state_spec)
        self.config = config
        self.device = as_device(device)
        self.kv_block_allocator = KVBlockAllocator(
            _kv_pool_size(config, kv_spec),
            eviction_policy=config.eviction_policy,
            enable_prefix_caching=config.enable_prefix_caching,
            as_tensor=torch.from_numpy,
        )
        blocks = self.kv_block_allocator.pool_size, config.block_size_tokens
        self.kv_cache = None if kv_spec is None else kv_spec.allocate(*blocks, self.device)
        live_rows = config.max_requests * config.live_rows_per_request
        self.live_states = StatePool(state_spec, live_rows, device=self.device)
        self.request_rows = RequestRows(
            self.kv_block_allocator,
            max_requests=config.max_requests,
            max_blocks=config.max_blocks_per_request,
            block_size_tokens=config.block_size_tokens,
            max_decode_tokens=config.max_decode_tokens,
        )
        self.step_buffers = self._make_step_buffers()
        self._set_slot_fields()
        self.bytes_per_slot = _slot_spec(config, state_spec).bytes_per_slot
        # Of its own fields, not of this: it would keep all tensors until a garbage collection.
        fields = SimpleNamespace(**{name: getattr(self, name) for name in _SLOT_FIELDS})
        self.slot_allocator = _slot_allocator(config, fields, state_spec, slot_policy)
        self._extractions = StepExtractions(self.slot_allocator.num_mamba_layers, self.step_buffers)
        self.kv_block_allocator.on_blocks_deregistered = WeakCallback(
            self.slot_allocator.on_kv_blocks_deregistered
        )

    def _make_step_buffers(self) -> StepBuffers:
        config = self.config
        return StepBuffers(
            self.request_rows.block_tables,
            table_stamps=self.request_rows.table_stamps,
            block_size_tokens=config.block_size_tokens,
            chunk_size=config.ssm_chunk_size,
            max_tokens=config.max_tokens,
            max_checkpoints=config.checkpoints_per_step,
            max_decode_tokens=config.max_decode_tokens,
            live_rows_per_request=config.live_rows_per_request,
            device=self.device,
        )

    def _set_slot_fields(self) -> None:
        """Set what ``protocols.SlotContext`` lists beside the attributes above."""
        config = self.config
        self.max_requests = config.max_requests
        self.block_size_tokens = config.block_size_tokens
        self.prefix_caching_eviction_policy = config.eviction_policy
        self.mamba_chunk_size = config.ssm_chunk_size
        self.ssm_chunk_alignment = config.chunk_alignment
        self.max_mamba_intermediate_states_per_step = 0  # checkpoints go straight to their slots
        self.request_to_kv_block_ids = torch.from_numpy(self.request_rows.block_tables)
        self.mamba_metadata = LiveRows(config)
        self.mamba_conv_states = self.live_states["conv"]
        self.mamba_ssm_states = self.live_states["ssm"]
        self.batch_dimensions = BatchCounts()
        self.paused_request_count = 0

    def extract_checkpoint_states(
        self,
        layer: int,
        chunk_states: torch.Tensor,
        conv_input: torch.Tensor,
        metadata: StepMetadata,
    ) -> None:
        """Write one Mamba layer's states at the step's checkpoints straight into their slots.

        Call it in every Mamba layer of every step, before the layer overwrites its live conv
        state. ``commit_step`` publishes a state only if every layer has handed it over. A step
        without checkpoints inside its chunks asks for nothing, and nothing is looked at.

        Args:
            layer: Which Mamba layer, from 0.
            chunk_states: [num_chunks, *ssm] SSM state at the end of each chunk, on the device.
            conv_input: [num_prefill_tokens, conv_dim] inputs of the convolution, on the device.
                Within ``capture_extractions`` both have room for the longest step to be replayed.
            metadata: ``Step.metadata`` of the step in flight.

        Raises:
            StepOrderError: No step is in flight, or a CUDA graph is captured outside of
                ``capture_extractions``.
            InvalidArgumentError: There is no such layer, the metadata are another step's, or the
                tensors are not as long as the step, or of another shape or dtype than the states.
        """
        extractions = self._extractions
        if extractions.captured is not None:
            extractions.check_layer(layer)
        else:
            extractions.check(layer, chunk_states, conv_input, metadata)
            if not extractions.fields:
                return
            if self.device.type == "cuda":  # pragma: no cover - tests/gpu run it
                self._check_not_capturing()
        slots = self.slot_allocator
        extract_checkpoint_states(
            slots.conv_states[layer],
            slots.ssm_states[layer],
            self.mamba_conv_states[layer],
            chunk_states,
            conv_input,
            slot_scales=None if slots.ssm_scales is None else slots.ssm_scales[layer],
            quantization=slots.quantization,
            **extractions.fields,  # type: ignore[arg-type] # no tensor is a backend's name
        )
        extractions.record(layer, chunk_states, conv_input)

    def capture_extractions(self) -> AbstractContextManager[CapturedExtractions]:
        """Have the calls of ``extract_checkpoint_states`` within counted at each replay.

        At a replay no line of Python runs, so what a captured graph hands over must be said::

            with context.capture_extractions() as captured, torch.cuda.graph(graph):
                model(...)
            ...
            graph.replay()
            context.count_extractions(captured)

        Within, the calls cover all checkpoints that a step can have, not those of one step, and
        hand nothing over for the step in flight, if there is one. Warm-ups belong there too.

        Raises:
            StepOrderError: On entry: another capture is not over.
        """
        return self._extractions.capture()

    def count_extractions(self, captured: CapturedExtractions) -> None:
        """Count what a replayed CUDA graph has handed over in the step in flight.

        Call it at every replay, once the replay is enqueued.

        Args:
            captured: What ``capture_extractions`` gave when the graph was captured.

        Raises:
            StepOrderError: No step is in flight.
            InvalidArgumentError: It is something else, names a layer that there is not, or was
                captured with shorter tensors than the step needs. Nothing was counted.
        """
        self._extractions.count(captured)

    def _check_not_capturing(self) -> None:  # pragma: no cover - tests/gpu run it
        if torch.cuda.is_current_stream_capturing():
            raise StepOrderError(
                "states were handed over while a CUDA graph was captured: capture it within "
                "context.capture_extractions(), and call context.count_extractions() with what "
                "that gave wherever the graph is replayed"
            )


def _kv_pool_size(config: CacheConfig, kv_spec: KVCacheSpec | None) -> int:
    """Return the KV blocks of the pool, the dummy block included.

    Raises:
        InvalidArgumentError: A budget in GiB is given, but not the size of a block.
        BudgetError: The budget does not hold one block and the dummy block.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks + 1
    if kv_spec is None:
        raise InvalidArgumentError(
            "kv_cache_gb needs kv_spec, which says how large a block is; give it, or num_kv_blocks"
        )
    assert config.kv_cache_gb is not None
    block_bytes = kv_spec.bytes_per_block(config.block_size_tokens)
    if not block_bytes:
        raise InvalidArgumentError(
            "a model without attention has no KV blocks to measure in kv_cache_gb: "
            "give num_kv_blocks"
        )
    if config.kv_cache_gb * 2**30 < 2 * block_bytes:
        raise BudgetError(
            f"kv_cache_gb={config.kv_cache_gb} GiB is too small: it must be at least "
            f"{2 * block_bytes / 2**30} GiB, for one KV block of {block_bytes} bytes and the dummy "
            "block that padding is written to"
        )
    return blocks_in_budget(config.kv_cache_gb, kv_spec, config.block_size_tokens)


def _check_tensors(state_spec: StateSpec) -> None:
    """Check that a state is made of what slots are made for.

    Raises:
        InvalidArgumentError: It is made of other tensors.
    """
    names = [tensor.name for tensor in state_spec.tensors]
    if names != ["conv", "ssm"]:
        raise InvalidArgumentError(
            f"a state must be made of 'conv' and 'ssm' (StateSpec.mamba), got {names}"
        )


def _slot_allocator(
    config: CacheConfig,
    fields: SimpleNamespace,
    state_spec: StateSpec,
    policy: SlotEvictionPolicy | None,
) -> MambaSlotAllocator:
    """Make the slots for states of a conv window and an SSM state in each Mamba layer.

    Raises:
        BudgetError: The budget does not hold one slot.
        InvalidArgumentError: Slots are to be quantised and the states are not of the kind for it.
    """
    conv, ssm = state_spec.tensors
    return MambaSlotAllocator(
        cast(SlotContext, fields),
        _num_slots(config, _slot_spec(config, state_spec)),
        conv.num_layers,
        conv.shape,
        ssm.shape,
        conv.dtype,
        ssm.dtype,
        policy=policy,
        quantization=_quantization(config),
    )


def _slot_spec(config: CacheConfig, state_spec: StateSpec) -> StateSpec:
    """Return what one slot holds.

    Raises:
        InvalidArgumentError: Slots are to be quantised and the states are not of the kind for it.
    """
    quantization = _quantization(config)
    return quantization.slot_spec(state_spec) if quantization else state_spec


def _quantization(config: CacheConfig) -> SlotQuantization | None:
    """Return how slots keep SSM states in int8, or None if they keep them as they are."""
    if config.slot_quantization is None:
        return None
    return SlotQuantization(config.slot_rounding, config.slot_rounding_seed)


def _num_slots(config: CacheConfig, slot_spec: StateSpec) -> int:
    """Return the slots that the budget holds; none if prefix caching is off.

    Raises:
        BudgetError: The budget does not hold one slot.
    """
    if not config.enable_prefix_caching:
        return 0
    if config.max_slots is not None:
        return config.max_slots
    assert config.mamba_cache_gb is not None
    return slots_in_budget(config.mamba_cache_gb, slot_spec)
