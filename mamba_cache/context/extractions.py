"""Extractions: the layers' states at a step's checkpoints, and which layers handed them over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn

import torch

from mamba_cache._checks import INT32_MAX, check_int
from mamba_cache.context.step_buffers import StepBuffers
from mamba_cache.errors import InvalidArgumentError, StepOrderError
from mamba_cache.metadata import StepMetadata
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import StatePool, plan_extraction

__all__ = ["CapturedExtractions", "StepExtractions"]

_NO_STEP = "no step is in flight: states are handed over between begin_step and commit_step"


@dataclass(frozen=True, slots=True)
class CapturedExtractions:
    """What a CUDA graph extracts at each of its replays.

    Made by ``DynamicInferenceContext.capture_extractions``. An embedder whose own kernels write
    checkpoint states into their slots makes it itself.

    Attributes:
        lengths: For each layer with a state, how many chunks and how many prefill tokens the
            captured tensors hold: no step with more can be replayed. With several kinds of layers
            they are numbered through, kind after kind in the spec's order.

    Raises:
        InvalidArgumentError: ``lengths`` does not map layers to two ints >= 0.
    """

    lengths: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_mapping = isinstance(self.lengths, dict)
        if not is_mapping or not all(map(_is_pair_of_counts, self.lengths.values())):
            raise InvalidArgumentError(
                "lengths must map each layer to a pair of ints >= 0, its chunks and its tokens, "
                f"got {self.lengths!r}"
            )


class StepExtractions:
    """Writes what layers hand over into slots, and counts on the host which layers have.

    A slot keeps its last state, perhaps another salt's, until it is written. So a state at a
    checkpoint inside a chunk is published only if every layer has written its part of it.
    """

    def __init__(
        self, buffers: StepBuffers, slots: MambaSlotAllocator, live_states: StatePool
    ) -> None:
        self.captured: CapturedExtractions | None = None
        self._buffers = buffers
        self._slots = slots
        self._live_states = live_states
        # The layers of all kinds are numbered through; a tensor has a name in its layer, and one in
        # the pools.
        self._layers: dict[str, tuple[range, dict[str, str]]] = {}
        self._labels: list[int | str] = []  # what messages call each layer
        for kind in live_states.spec.kinds:
            first, layers = len(self._labels), range(kind.num_layers)
            self._labels += [f"{kind.name} {each}" if kind.name else each for each in layers]
            names = {name: kind.name_in_pool(name) for name in kind.names}
            self._layers[kind.name] = range(first, len(self._labels)), names
        self._fields: tuple[torch.Tensor, ...] = ()
        self._metadata: StepMetadata | None = None
        self.missing: set[int] = set()
        """Layers that have not handed over; none in a step without checkpoints inside chunks."""

    def begin(self, metadata: StepMetadata | None) -> None:
        """Begin a step: no layer has handed over yet. With None there is no step in flight."""
        self._metadata, self._fields = metadata, ()
        asked = 0 if metadata is None or not metadata.num_checkpoints else len(self._labels)
        self.missing = set(range(asked))

    @property
    def missing_layers(self) -> list[int | str]:
        """What messages call the layers that have not handed over."""
        return [self._labels[layer] for layer in sorted(self.missing)]

    def extract(
        self,
        kind: str,
        layer: int,
        chunk_states: Mapping[str, torch.Tensor],
        window_inputs: Mapping[str, torch.Tensor],
        metadata: StepMetadata,
    ) -> None:
        """Write a layer's states at the step's checkpoints; in a capture, at all there can be."""
        if self.captured is None:
            if metadata is not self._metadata:
                self._refuse(metadata)
            if not metadata.num_checkpoints:
                return
        if not isinstance(kind, str) or kind not in self._layers:
            raise InvalidArgumentError(f"kind must be one of {[*self._layers]}, got {kind!r}")
        numbers, names = self._layers[kind]
        layer = check_int("layer", layer, minimum=0, maximum=len(numbers) - 1)
        _check_names(names, chunk_states, window_inputs)
        num_chunks = [*map(len, chunk_states.values())]
        num_tokens = [*map(len, window_inputs.values())]
        if self.captured is None:
            needed = metadata.num_chunks, metadata.num_prefill_tokens
            if {*num_chunks} - {needed[0]} or {*num_tokens} - {needed[1]}:
                raise InvalidArgumentError(
                    f"layer {self._labels[numbers[layer]]} handed over {num_chunks} chunk_states "
                    f"and {num_tokens} tokens of conv_input, but the step has {needed[0]} chunks "
                    f"and {needed[1]} prefill tokens: hand over just these, without those of "
                    "decoding requests and without padding"
                )
            if self._live_states.device.type == "cuda":  # pragma: no cover - tests/gpu run it
                _check_not_capturing()
        launches = self._plan(layer, names, chunk_states, window_inputs, metadata)
        for launch in launches:  # all are checked before the first is written
            launch()
        if self.captured is None:
            self.missing.discard(numbers[layer])
        else:  # of several tensors the shortest limit what can be replayed
            shortest = min(num_chunks, default=INT32_MAX), min(num_tokens, default=INT32_MAX)
            self.captured.lengths[numbers[layer]] = shortest

    def _plan(
        self,
        layer: int,
        names: Mapping[str, str],
        chunk_states: Mapping[str, torch.Tensor],
        window_inputs: Mapping[str, torch.Tensor],
        metadata: StepMetadata,
    ) -> list[Callable[[], None]]:
        """Return what extracts one layer's tensors, a state and a window in one launch."""
        fields = self._fields
        if self.captured is not None:
            fields = self._buffers.checkpoint_fields(None)
        elif not fields:
            # Once a step: in each layer the slices would cost more than all checks together.
            fields = self._fields = self._buffers.checkpoint_fields(metadata.num_checkpoints)
        saved, live = self._slots.states.tensors, self._live_states.tensors
        quantization = self._slots.quantization
        launches = []
        for state, window in zip_longest(chunk_states, window_inputs):
            scales = quantization.scales_of(names[state]) if quantization and state else None
            launches.append(
                plan_extraction(
                    None if window is None else saved[names[window]][layer],
                    None if state is None else saved[names[state]][layer],
                    None if window is None else live[names[window]][layer],
                    None if state is None else chunk_states[state],
                    None if window is None else window_inputs[window],
                    fields=fields,
                    slot_scales=None if scales is None else saved[scales][layer],
                )
            )
        return launches

    def _refuse(self, metadata: object) -> NoReturn:
        """Refuse what is handed over for another step than the one in flight."""
        if self._metadata is None:
            raise StepOrderError(_NO_STEP)
        another = " of another step" if isinstance(metadata, StepMetadata) else ""
        raise InvalidArgumentError(
            "metadata must be Step.metadata of the step in flight, "
            f"got {type(metadata).__name__}{another}"
        )

    @contextmanager
    def capture(self) -> Iterator[CapturedExtractions]:
        """Have what is called within recorded as captured, not as handed over in a step."""
        if self.captured is not None:
            raise StepOrderError("capture_extractions was called within capture_extractions")
        self.captured = CapturedExtractions()
        try:
            yield self.captured
        finally:
            self.captured = None

    def count(self, captured: CapturedExtractions) -> None:
        """Count the layers of a replayed graph."""
        metadata = self._metadata
        if metadata is None:
            raise StepOrderError(_NO_STEP)
        if not isinstance(captured, CapturedExtractions):
            raise InvalidArgumentError(
                f"give what capture_extractions gave, got {type(captured).__name__}"
            )
        needed = metadata.num_chunks, metadata.num_prefill_tokens
        for layer, (num_chunks, num_tokens) in captured.lengths.items():
            check_int("layer", layer, minimum=0, maximum=len(self._labels) - 1)
            if self.missing and (num_chunks < needed[0] or num_tokens < needed[1]):
                raise InvalidArgumentError(
                    f"layer {self._labels[layer]} was captured with {num_chunks} chunk_states and "
                    f"{num_tokens} tokens of conv_input, but the step has {needed[0]} chunks and "
                    f"{needed[1]} prefill tokens: capture with tensors for the longest step"
                )
        self.missing.difference_update(captured.lengths)


def _is_pair_of_counts(pair: Any) -> bool:
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    return is_pair and all(type(number) is int and number >= 0 for number in pair)


def _check_names(
    names: Mapping[str, str],
    chunk_states: Mapping[str, torch.Tensor],
    window_inputs: Mapping[str, torch.Tensor],
) -> None:
    """Check that a layer hands over each of its tensors once."""
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


def _check_not_capturing() -> None:  # pragma: no cover - tests/gpu run it
    if torch.cuda.is_current_stream_capturing():
        raise StepOrderError(
            "states were handed over while a CUDA graph was captured: capture it within "
            "context.capture_extractions(), and call context.count_extractions() with what "
            "that gave wherever the graph is replayed"
        )
