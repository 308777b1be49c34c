"""The memory of a context: KV cache, live states and slots, with the books over each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch

from mamba_cache._checks import check_int
from mamba_cache._lasting import lasting
from mamba_cache._weak_callback import WeakCallback
from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.config import CacheConfig
from mamba_cache.context.extractions import CapturedExtractions, StepExtractions
from mamba_cache.context.request_rows import RequestRows
from mamba_cache.errors import BudgetError, InvalidArgumentError, StepOrderError
from mamba_cache.metadata import StepBuffers, StepMetadata
from mamba_cache.protocols import SlotContext
from mamba_cache.slots import MambaSlotAllocator, SlotEvictionPolicy
from mamba_cache.slots.fingerprint import fingerprint_of
from mamba_cache.states import (
    KVCacheSpec,
    SlotQuantization,
    StatePool,
    StateSpec,
    as_device,
    blocks_in_budget,
    plan_extraction,
    slots_in_budget,
)

__all__ = ["BatchCounts", "CacheMemory", "LiveRows"]


_SLOT_FIELDS = (
    "device", "kv_block_allocator", "max_requests", "block_size_tokens",
    "prefix_caching_eviction_policy", "mamba_chunk_size", "ssm_chunk_alignment",
    "max_mamba_intermediate_states_per_step", "request_to_kv_block_ids", "mamba_metadata",
    "mamba_conv_states", "mamba_ssm_states", "live_states", "batch_dimensions",
    "paused_request_count",
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
        state_spec: What one state holds, of one kind of layers or several.
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

    @lasting
    def __init__(
        self,
        config: CacheConfig,
        state_spec: StateSpec,
        kv_spec: KVCacheSpec | None,
        *,
        device: torch.device | str,
        slot_policy: SlotEvictionPolicy | None,
    ) -> None:
        self._layers = _layers_by_kind(state_spec)
        self._kinds_fingerprint = _fingerprint_of_kinds(_slot_spec(config, state_spec))
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
        self._extractions = StepExtractions(_layer_labels(state_spec), self.step_buffers)
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
        live_states = self.live_states.tensors if self.live_states.spec.is_mamba else {}
        self.mamba_conv_states = live_states.get("conv")
        self.mamba_ssm_states = live_states.get("ssm")
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
        without checkpoints inside its chunks asks for nothing, and nothing is looked at. Layers
        of other kinds than ``StateSpec.mamba`` describes call ``extract_states``.

        Args:
            layer: Which Mamba layer, from 0.
            chunk_states: [num_chunks, *ssm] SSM state at the end of each chunk, on the device.
            conv_input: [num_prefill_tokens, conv_dim] inputs of the convolution, on the device.
                Within ``capture_extractions`` both have room for the longest step to be replayed.
            metadata: ``Step.metadata`` of the step in flight.

        Raises:
            StepOrderError: No step is in flight, or a CUDA graph is captured outside of
                ``capture_extractions``.
            InvalidArgumentError: There is no such layer, the metadata are another step's, the
                tensors are not as long as the step, or of another shape or dtype than the states,
                or these are not of conv and SSM.
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
        if self.mamba_conv_states is None:
            raise InvalidArgumentError(
                "extract_checkpoint_states takes conv and SSM states (StateSpec.mamba): layers of "
                f"the kinds {[*self._layers]} call extract_states"
            )
        write = plan_extraction(
            slots.conv_states[layer],
            slots.ssm_states[layer],
            self.mamba_conv_states[layer],
            chunk_states,
            conv_input,
            fields=extractions.fields,
            slot_scales=None if slots.ssm_scales is None else slots.ssm_scales[layer],
            quantization=slots.quantization,
        )
        write()
        extractions.record(layer, chunk_states, conv_input)

    def extract_states(
        self,
        kind: str,
        layer: int,
        chunk_states: Mapping[str, torch.Tensor],
        window_inputs: Mapping[str, torch.Tensor],
        metadata: StepMetadata,
    ) -> None:
        """Write the states of one layer of any kind at the step's checkpoints into their slots.

        What ``extract_checkpoint_states`` does for Mamba layers. Each tensor that the layer keeps
        is given in one of two ways: by its states at the ends of the step's chunks, or, where it
        holds the last inputs of a convolution or a token shift, by these inputs.

        Args:
            kind: The layer's kind, as the spec calls it.
            layer: Which layer of that kind, from 0.
            chunk_states: By the tensor's name within a layer, [num_chunks, *shape] its states at
                the ends of the chunks that ``metadata.cu_chunk_seqlens`` bounds, on the device.
            window_inputs: By name, [num_prefill_tokens, channels] inputs, for a tensor of
                [channels, width], newest last, or [channels], the last one alone.
            metadata: ``Step.metadata`` of the step in flight.

        Raises:
            StepOrderError: As in ``extract_checkpoint_states``.
            InvalidArgumentError: There is no such kind or layer, the names are not those of its
                tensors, each once, or as in ``extract_checkpoint_states``.
        """
        extractions = self._extractions
        is_captured = extractions.captured is not None
        if not is_captured and not extractions.are_asked_for(metadata):
            return
        known = self._layers.get(kind) if isinstance(kind, str) else None
        if known is None:
            raise InvalidArgumentError(f"kind must be one of {[*self._layers]}, got {kind!r}")
        layer = check_int("layer", layer, minimum=0, maximum=known.num_layers - 1)
        number, pairs = known.first + layer, _paired(known, chunk_states, window_inputs)
        if not is_captured:
            handed_over = chunk_states.values(), window_inputs.values()
            extractions.check_all(number, *handed_over, metadata)
            if self.device.type == "cuda":  # pragma: no cover - tests/gpu run it
                self._check_not_capturing()
        # All are checked before the first is written.
        for write in [self._extraction(layer, *pair) for pair in pairs]:
            write()
        extractions.record_all(number, chunk_states.values(), window_inputs.values())

    def _extraction(
        self,
        layer: int,
        name: str | None,
        states: torch.Tensor | None,
        window: str | None,
        inputs: torch.Tensor | None,
    ) -> Callable[[], None]:
        """Return what extracts a state, a window, or both of one layer in one launch."""
        saved, live = self.slot_allocator.states.tensors, self.live_states.tensors
        quantization = self.slot_allocator.quantization
        scales = quantization.scales_of(name) if quantization and name else None
        return plan_extraction(
            None if window is None else saved[window][layer],
            None if name is None else saved[name][layer],
            None if window is None else live[window][layer],
            states,
            inputs,
            fields=self._extractions.fields,
            slot_scales=None if scales is None else saved[scales][layer],
            quantization=quantization,
        )

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


class _KindLayers(NamedTuple):
    """The layers of one kind.

    Attributes:
        first: Number of the first of them, where the layers of all kinds are counted in order.
        num_layers: How many there are.
        names: What each of a layer's tensors is called in a pool, by its name within the layer.
    """

    first: int
    num_layers: int
    names: dict[str, str]


def _layers_by_kind(spec: StateSpec) -> dict[str, _KindLayers]:
    """Number the layers of a spec.

    Raises:
        InvalidArgumentError: Tensors of one kind differ in the number of layers.
    """
    layers, first = {}, 0
    for kind in spec.kinds:
        names = {name: kind.name_in_pool(name) for name in kind.names}
        layers[kind.name] = _KindLayers(first, kind.num_layers, names)
        first += kind.num_layers
    return layers


def _fingerprint_of_kinds(slot_spec: StateSpec) -> int:
    """Digest what slots hold, but for the sizes, of which each rank has its own shard."""
    return fingerprint_of(
        *(list(f"{tensor.name} {tensor.dtype}".encode()) for tensor in slot_spec.tensors)
    )


def _layer_labels(spec: StateSpec) -> list[int | str]:
    """Say what messages call each layer: a number, or the name of its kind and a number."""
    return [
        f"{kind.name} {layer}" if kind.name else layer
        for kind in spec.kinds
        for layer in range(kind.num_layers)
    ]


_Pair = tuple[str | None, torch.Tensor | None, str | None, torch.Tensor | None]
"""What one launch extracts: a state's name in the pool and its values, and a window's."""


def _paired(
    layers: _KindLayers,
    chunk_states: Mapping[str, torch.Tensor],
    window_inputs: Mapping[str, torch.Tensor],
) -> list[_Pair]:
    """Pair the states that a layer hands over with its windows.

    Raises:
        InvalidArgumentError: It does not hand over each of its tensors once.
    """
    if not isinstance(chunk_states, Mapping) or not isinstance(window_inputs, Mapping):
        raise InvalidArgumentError(
            "chunk_states and window_inputs must map names to tensors, "
            f"got {type(chunk_states).__name__} and {type(window_inputs).__name__}"
        )
    given = [*chunk_states, *window_inputs]
    if len(given) != len(layers.names) or set(given) != layers.names.keys():
        raise InvalidArgumentError(
            f"a layer of this kind must hand over each of {[*layers.names]} once, as chunk_states "
            f"or as window_inputs, got {[*chunk_states]} and {[*window_inputs]}"
        )
    tensors = [*chunk_states.values(), *window_inputs.values()]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        raise InvalidArgumentError(
            "chunk_states and window_inputs must be tensors, one row for each chunk and each "
            f"prefill token, got {tensors!r}"
        )
    states = [(layers.names[name], tensor) for name, tensor in chunk_states.items()]
    windows = [(layers.names[name], tensor) for name, tensor in window_inputs.items()]
    nothing = (None, None)
    return [(*a, *b) for a, b in zip_longest(states, windows, fillvalue=nothing)]


def _slot_allocator(
    config: CacheConfig,
    fields: SimpleNamespace,
    state_spec: StateSpec,
    policy: SlotEvictionPolicy | None,
) -> MambaSlotAllocator:
    """Make the slots.

    Raises:
        BudgetError: The budget does not hold one slot.
        InvalidArgumentError: Slots are to be quantised and the states are not of the kind for it.
    """
    return MambaSlotAllocator.from_spec(
        cast(SlotContext, fields),
        _num_slots(config, _slot_spec(config, state_spec)),
        state_spec,
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
    """Return how slots keep states in int8, or None if they keep them as they are."""
    if config.slot_quantization is None:
        return None
    return SlotQuantization(
        config.slot_rounding, config.slot_rounding_seed, config.quantized_tensors
    )


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
