"""Extractions: which layers have handed over their states at a step's checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from mamba_cache._checks import INT32_MAX, check_int
from mamba_cache.context.step_buffers import StepBuffers
from mamba_cache.errors import InvalidArgumentError, StepOrderError
from mamba_cache.metadata import StepMetadata

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
        if not _are_lengths(self.lengths):
            raise InvalidArgumentError(
                "lengths must map each layer to a pair of ints >= 0, its chunks and its tokens, "
                f"got {self.lengths!r}"
            )


class StepExtractions:
    """Which layers have handed over in the step in flight, counted on the host.

    A slot keeps its last state, perhaps another salt's, until it is written. So a state at a
    checkpoint inside a chunk is published only if every layer has written its part of it.
    """

    def __init__(self, labels: Sequence[int | str], buffers: StepBuffers) -> None:
        self.captured: CapturedExtractions | None = None
        self._fields: tuple[torch.Tensor, ...] = ()
        self._labels = labels
        self._num_layers = len(labels)
        self._buffers = buffers
        self._metadata: StepMetadata | None = None
        self._missing: set[int] = set()

    def begin(self, metadata: StepMetadata) -> None:
        """Begin a step: no layer has handed over yet."""
        self._metadata = metadata
        if metadata.num_checkpoints:
            self._missing = set(range(self._num_layers))

    def end(self) -> None:
        """End the step in flight, if there is one."""
        self._metadata = None
        self._missing = set()
        self._fields = ()

    @property
    def fields(self) -> tuple[torch.Tensor, ...]:
        """The checkpoints to write, as ``states.plan_extraction`` takes them.

        Those of the step in flight, none if it has none; in a capture all that there can be.
        """
        if self.captured is not None:
            return self._buffers.checkpoint_fields(None)
        if not self._fields and self._metadata is not None and self._metadata.num_checkpoints:
            # Once a step: in each layer the slices would cost more than all checks together.
            self._fields = self._buffers.checkpoint_fields(self._metadata.num_checkpoints)
        return self._fields

    @property
    def missing_layers(self) -> list[int | str]:
        """Layers that have not handed over; none in a step without checkpoints inside chunks."""
        return [self._labels[layer] for layer in sorted(self._missing)]

    def check(
        self,
        layer: int,
        chunk_states: Iterable[torch.Tensor],
        window_inputs: Iterable[torch.Tensor],
        metadata: StepMetadata,
    ) -> None:
        """Check the tensors of a layer against the step that asks for them."""
        needed = metadata.num_chunks, metadata.num_prefill_tokens
        given = [(len(states), needed[1]) for states in chunk_states]
        for lengths in given + [(needed[0], len(inputs)) for inputs in window_inputs]:
            if lengths != needed:
                raise InvalidArgumentError(
                    f"layer {self._labels[layer]} handed over {lengths[0]} chunk_states and "
                    f"{lengths[1]} tokens of conv_input, but the step has {needed[0]} chunks and "
                    f"{needed[1]} prefill tokens: hand over just these, without those of decoding "
                    "requests and without padding"
                )

    def are_asked_for(self, metadata: StepMetadata) -> bool:
        """Say whether the step in flight has checkpoints inside its chunks."""
        if metadata is self._metadata:
            return metadata.num_checkpoints > 0
        if self._metadata is None:
            raise StepOrderError(_NO_STEP)
        another = " of another step" if isinstance(metadata, StepMetadata) else ""
        raise InvalidArgumentError(
            "metadata must be Step.metadata of the step in flight, "
            f"got {type(metadata).__name__}{another}"
        )

    def record(
        self,
        layer: int,
        chunk_states: Iterable[torch.Tensor],
        window_inputs: Iterable[torch.Tensor],
    ) -> None:
        """Count a layer, whose part of the checkpoints is enqueued, or captured.

        Of several tensors the shortest limit what can be replayed.
        """
        if self.captured is None:
            self._missing.discard(layer)
            return
        lengths = [map(len, tensors) for tensors in (chunk_states, window_inputs)]
        num_chunks, num_tokens = (min(each, default=INT32_MAX) for each in lengths)
        self.captured.lengths[layer] = num_chunks, num_tokens

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
            check_int("layer", layer, minimum=0, maximum=self._num_layers - 1)
            if self._missing and (num_chunks < needed[0] or num_tokens < needed[1]):
                raise InvalidArgumentError(
                    f"layer {self._labels[layer]} was captured with {num_chunks} chunk_states and "
                    f"{num_tokens} tokens of conv_input, but the step has {needed[0]} chunks and "
                    f"{needed[1]} prefill tokens: capture with tensors for the longest step"
                )
        self._missing.difference_update(captured.lengths)


def _are_lengths(lengths: object) -> bool:
    return isinstance(lengths, dict) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
        for pair in lengths.values()
    )
