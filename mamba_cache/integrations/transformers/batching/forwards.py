"""The forwards of a batch: decode steps, and rectangles of prompt chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mamba_cache._torch import outside_inference_mode, to_device
from mamba_cache.context import (
    CapturedExtractions,
    DynamicInferenceContext,
    ScheduledRequest,
    Step,
)
from mamba_cache.errors import ModelChangedError
from mamba_cache.integrations.transformers.batching.graphs import RectangleCosts, StepGraphs
from mamba_cache.integrations.transformers.batching.kernels import pieces_torch
from mamba_cache.integrations.transformers.batching.paged import PagedAttention
from mamba_cache.integrations.transformers.capture import ScanRun, StateCapture
from mamba_cache.integrations.transformers.layers import (
    PrefixLayout,
    SequenceMemory,
    read_layers,
)
from mamba_cache.integrations.transformers.replacement import intercepted, put_back
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.states import kernels_for

__all__ = ["BatchForwards", "ComputedChunks", "RectangleShape"]

_MAX_CAPTURED_CHECKPOINTS = 3
_KERNELS = "mamba_cache.integrations.transformers.batching.kernels.pieces"


@dataclass(frozen=True, slots=True)
class ComputedChunks:
    """The result of a forward over chunks of prompts."""

    requests: tuple[ScheduledRequest, ...]  # the chunks, in the order of the rows
    logits: torch.Tensor  # [rows, vocabulary] after the last token of each row
    num_padded: int  # tokens of padding


@dataclass(frozen=True, slots=True)
class RectangleShape:
    """The properties of a rectangle that a CUDA graph fixes; its other inputs are tensors."""

    num_rows: int
    num_tokens: int  # tokens per row, padding included
    # A layer scans a row in pieces that end at its checkpoints; the last piece ends at its last
    # token. These are the tokens of each piece, padded to the longest one of all rows.
    widths: tuple[int, ...]
    # Whether rows differ in their lengths or checkpoints.
    is_ragged: bool
    # Whether all rows begin at position 0: the model is given no states.
    is_fresh: bool = False
    # The live row of the first row, if the live rows are consecutive: states change in place.
    # -1: live rows are copied, and the copies are written back.
    first_live_row: int = -1

    @property
    def num_checkpoints(self) -> int:
        """The maximum number of checkpoints in a row."""
        return len(self.widths) - 1


@dataclass(frozen=True, slots=True)
class _Placed:
    """A chunk and its positions in the step's arrays."""

    request: ScheduledRequest
    place: int  # the request's index in the step
    first_token: int  # the index of the chunk's first token in the step
    live_row: int  # the request's row of the live states

    @property
    def cuts(self) -> tuple[int, ...]:
        """The chunk's checkpoints, in tokens from the chunk's first token."""
        return tuple(position - self.request.start for position, _ in self.request.checkpoints)


class BatchForwards:
    """Compute decode steps, and prompt chunks in padded rectangles [rows, longest chunk].

    Both read tensors at fixed addresses and do not wait for the device, so CUDA graphs can capture
    them.

    A rectangle reads the live states of its requests and overwrites them. It writes keys and values
    to KV blocks and checkpoints to slots. Padding changes no result: scans get zeros for it, conv
    windows end at each row's last token, and its keys and values go to the dummy block.

    Without ``capture`` scans cannot be given zeros, so all rows of a rectangle have one length.
    """

    @outside_inference_mode
    def __init__(
        self,
        runner: ModelRunner,
        context: DynamicInferenceContext,
        layout: PrefixLayout,
        *,
        graphs: StepGraphs,
        capture: StateCapture | None,
    ) -> None:
        assert context.kv_cache is not None
        self._runner = runner
        self._context = context
        self._layout = layout
        self._kv_spec = layout.kv_spec()
        self._attention = PagedAttention(runner.model, context.kv_cache)
        self._graphs = graphs
        self._decode_caches: dict[int, Any] = {}  # by number of rows
        self._inputs: dict[RectangleShape, torch.Tensor] = {}  # by shape that may be captured
        self.costs = RectangleCosts(context.device)
        self._has_all = True  # the last forward saved all states of its checkpoints
        self._capture = capture
        self._has_kernels = capture is not None and capture.has_kernels
        self._pieces = kernels_for("auto", context.device, kernels=_KERNELS, twins=pieces_torch)
        self._min_tokens = context.config.min_computed_tokens
        self._live = context.live_states.tensors
        self._saved = layout.views(context.slot_allocator.states.tensors).states
        self._metadata = context.step_buffers.tensors
        self._head = runner.model.get_output_embeddings()
        allocator = context.kv_block_allocator
        self._dummy_slot = allocator.dummy_block_id * context.config.block_size_tokens

    def decode(self, num_rows: int) -> torch.Tensor:
        """Compute a token of each decoding request of the step whose metadata is on the device.

        Row i of the batch is row i of the live states, which layers read and write in place. Rows
        without a decoding request are computed too: their keys and values go to the dummy block,
        and their live states change.

        Return [num_rows, vocabulary] logits, undefined for rows that do not decode.
        """
        if num_rows not in self._decode_caches:
            first = {name: tensor[:, :num_rows] for name, tensor in self._live.items()}
            self._decode_caches[num_rows] = self._make_cache(num_rows, first)
        cache, metadata = self._decode_caches[num_rows], self._metadata
        places, tokens, positions, slots = self._pieces.sort_by_row(
            metadata["decode_state_rows"][:, 0],
            metadata["token_ids"],
            metadata["positions"],
            metadata["kv_slot_mapping"],
            num_rows,
            self._dummy_slot,
        )
        is_known = (places >= 0).long()
        with self._attention.during(
            slots, metadata["block_tables"], places, positions, lengths=is_known
        ):
            logits = self._runner.forward_rows(tokens[:, None], positions[:, None], cache)
        return logits[:, -1]

    def clear_decodes(self) -> None:
        """Mark every row as idle until the next step's metadata arrive."""
        self._metadata["decode_state_rows"].fill_(-1)

    def prefill(self, step: Step, max_tokens: int) -> list[ComputedChunks]:
        """Compute all chunks of a step; write their keys, values, live states and checkpoints.

        A forward over several rows has at most ``max_tokens`` tokens, padding included.
        """
        computed, is_captured = [], True
        max_captured = 0 if self.why_eager else max_tokens
        for group in self._split(self._place(step), max_tokens, max_captured):
            shape = self._shape_of(group)
            size = self.costs.captured(shape.num_rows, shape.num_tokens, max_captured)
            if size is None or shape.num_checkpoints > _MAX_CAPTURED_CHECKPOINTS:
                inputs = self._inputs_of(shape, group)
                with self.costs.computing(shape.num_rows * shape.num_tokens):
                    logits = self._forward(shape, inputs)
            else:
                shape = _fit(shape, size)
                logits = self._run(shape, group)
            is_captured &= self._has_all
            requests = tuple(chunk.request for chunk in group)
            num_tokens = sum(request.num_tokens for request in requests)
            num_padded = shape.num_rows * shape.num_tokens - num_tokens
            computed.append(ComputedChunks(requests, logits[: len(group)], num_padded))
        metadata = step.metadata
        if metadata.num_checkpoints and is_captured:
            lengths = metadata.num_chunks, metadata.num_prefill_tokens
            layers = range(self._layout.num_state_layers)
            self._context.count_extractions(CapturedExtractions(dict.fromkeys(layers, lengths)))
        return computed

    def _run(self, shape: RectangleShape, group: Sequence[_Placed]) -> torch.Tensor:
        """Compute a rectangle of a size for CUDA graphs; missing rows repeat the first row."""
        # A repeated row writes the same values to the same places.
        rows = [*group, *[group[0]] * (shape.num_rows - len(group))]
        given = self._inputs_of(shape, rows)
        inputs = self._fixed_inputs(shape, given).copy_(given)
        self._has_all = True  # a ragged rectangle saves all states, or its forward raises
        compute = partial(self._forward, shape, inputs)
        self._graphs.use(shape, compute)
        with self.costs.computing(shape.num_rows * shape.num_tokens):
            logits = self._graphs.run(shape, compute)
        return logits.clone()  # the next rectangle may be replayed from the same graph

    @outside_inference_mode  # a call outside inference mode must be able to write to the tensor
    def _fixed_inputs(self, shape: RectangleShape, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor at a fixed address that a captured shape reads its inputs from."""
        if shape not in self._inputs:
            self._inputs[shape] = torch.empty_like(like)
        return self._inputs[shape]

    def _forward(self, shape: RectangleShape, inputs: torch.Tensor) -> torch.Tensor:
        is_usual = shape.is_ragged and shape.num_checkpoints > 0
        with self.costs.launching(shape.num_rows * shape.num_tokens, is_usual=is_usual):
            logits, self._has_all = self.forward(shape, inputs)
        return logits

    @property
    def why_eager(self) -> str:
        """Why no rectangles are captured; empty if they are."""
        if self._capture is None:
            return "the model's states are not what functions return: no padding would be neutral"
        return self._graphs.why_eager("prefill")

    def put_back(self) -> None:
        """Undo the replacements of a forward that raised."""
        put_back(self._attention)
        put_back(self)

    def _place(self, step: Step) -> list[_Placed]:
        metadata, first = step.metadata, step.metadata.num_decode_tokens
        live_rows = self._context.step_buffers.host_arrays["state_rows"]
        placed = []
        for place, request in enumerate(step.prefills, metadata.num_decodes):
            placed.append(_Placed(request, place, first, live_rows.item(place)))
            first += request.num_tokens
        return placed

    def _split(
        self, chunks: Sequence[_Placed], max_tokens: int, max_captured: int
    ) -> Iterator[Sequence[_Placed]]:
        """Group chunks into rectangles, each in the order of its live rows."""
        alike: dict[object, list[_Placed]] = {}
        for chunk in chunks:
            size = chunk.request.num_tokens
            key = None if self._capture is not None else (size, chunk.request.start == 0)
            alike.setdefault(key, []).append(chunk)
        for group in alike.values():
            group.sort(key=lambda chunk: -chunk.request.num_tokens)
            lengths = [chunk.request.num_tokens for chunk in group]
            for begin, end in self.costs.split(lengths, max_tokens, max_captured):
                yield sorted(group[begin:end], key=lambda chunk: chunk.live_row)

    def _shape_of(self, group: Sequence[_Placed]) -> RectangleShape:
        lengths = [chunk.request.num_tokens for chunk in group]
        bounds = _bounds_of(group, max(len(chunk.cuts) for chunk in group))
        widths = tuple(
            max(end - begin for begin, end in zip(*pair, strict=True))
            for pair in pairwise(zip(*bounds, strict=True))
        )
        size = max(lengths)
        # The model computes a single token by its decode path, which is not exact for every model.
        min_tokens = self._min_tokens if self._capture is not None else 1
        is_alike = all(own == bounds[0] for own in bounds)
        is_ragged = not is_alike or size < min_tokens
        first = group[0].live_row
        is_in_order = group[-1].live_row - first == len(group) - 1
        return RectangleShape(
            len(group),
            max(size, min_tokens),
            widths if size >= min_tokens else (min_tokens,),
            is_ragged=is_ragged,
            is_fresh=not is_ragged and not any(chunk.request.start for chunk in group),
            first_live_row=first if is_in_order else -1,
        )

    def _inputs_of(self, shape: RectangleShape, group: Sequence[_Placed]) -> torch.Tensor:
        """Return the inputs of a rectangle in one tensor on the device: see ``forward``."""
        rows = len(group)
        bounds = np.array(_bounds_of(group, shape.num_checkpoints))
        first, lengths = np.array([chunk.first_token for chunk in group]), bounds[:, -1]
        by_row = [
            np.array([chunk.place for chunk in group]),
            np.array([chunk.request.start for chunk in group]),
            lengths,
            np.array([chunk.live_row for chunk in group]),
            np.arange(rows) * shape.num_tokens + lengths - 1,
        ]
        for number in range(shape.num_checkpoints):
            # Rows without this checkpoint repeat the write of another row.
            having = [row for row, chunk in enumerate(group) if len(chunk.cuts) > number]
            owners = [row if row in having else having[0] for row in range(rows)]
            by_row += [owners, [group[row].request.checkpoints[number][1] for row in owners]]
        columns = np.arange(shape.num_tokens)
        # Padding repeats a row's last token and position, so all ids and positions are valid.
        at = first[:, None] + np.minimum(columns, lengths[:, None] - 1)
        by_token = self._context.step_buffers.host_arrays["tokens"].T[:, at]
        slots = by_token[2]
        slots[(slots < 0) | (columns >= lengths[:, None])] = self._dummy_slot
        numbers = np.concatenate([*by_row, bounds.ravel(), by_token.ravel()])
        return to_device(torch.from_numpy(numbers), self._context.device)

    def forward(self, shape: RectangleShape, inputs: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Compute a rectangle; its step's block tables must be on the device.

        ``inputs`` are int64 arrays, concatenated. [rows] each: indices in the step, first
        positions, lengths, live rows, indices of last tokens in the flat rectangle, and for each
        checkpoint the rows whose states are saved and their slots. [rows, checkpoints + 2]: starts
        of pieces, and the end of the last. [rows, tokens] each: ids, positions, KV slots.

        Return [rows, vocabulary] logits after each row's last token, and whether all states of all
        checkpoints were saved.
        """
        rows, size, count = shape.num_rows, shape.num_tokens, shape.num_checkpoints
        sizes = [(5 + 2 * count) * rows, (count + 2) * rows, 3 * rows * size]
        of_rows, of_pieces, of_tokens = torch.split(inputs, sizes)
        places, starts, lengths, live_rows, last, *slots_by_owner = of_rows.view(-1, rows).unbind()
        ids, positions, slots = of_tokens.view(3, rows, size).unbind()
        bounds = of_pieces.view(rows, -1) if shape.is_ragged else None
        in_place = slice(shape.first_live_row, shape.first_live_row + rows)
        states = {
            name: self._copied(tensor, live_rows) if in_place.start < 0 else tensor[:, in_place]
            for name, tensor in self._live.items()
        }
        run = ScanRun(
            rows,
            size,
            shape.widths,
            inputs.device,
            bounds,
            saved=[*zip(slots_by_owner[::2], slots_by_owner[1::2], strict=True)],
            states=[iter(self._saved) for _ in range(count)],
            is_kernel=self._has_kernels,
        )
        # Made here, before ``during`` replaces the model's configuration.
        cache = self._make_cache(rows, None if shape.is_fresh else states)
        tables = self._metadata["block_tables"]
        with ExitStack() as during:
            during.enter_context(
                self._attention.during(slots.flatten(), tables, places, starts, lengths)
            )
            if self._capture is not None and size > 1:
                during.enter_context(self._capture.scanning(run, cache))
            if shape.is_ragged and self._head is not None:
                at_last = partial(_at_last_tokens, last, (rows, size))
                during.enter_context(intercepted(self, self._head, "forward", at_last))
            needed = 0 if shape.is_ragged else 1
            logits = self._runner.forward_rows(ids, positions, cache, logits_to_keep=needed)
        # A model that does not call its head computes the logits of all tokens.
        has_others = shape.is_ragged and logits.shape[1] > 1
        logits = logits.flatten(0, 1)[last] if has_others else logits[:, -1]
        has_all = self._capture is not None and run.num_written == self._capture.num_tensors
        if shape.is_ragged and not has_all:
            raise ModelChangedError(
                "the model's layers no longer hand over their states as when the prefix cache was "
                "made: make a new prefix cache"
            )
        self._copy_replaced(cache, states)
        for name, tensor in self._live.items() if in_place.start < 0 else ():
            self._pieces.copy_rows(states[name], tensor, to=live_rows)
        return logits, has_all or not count

    def _copied(self, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return copies of rows of a live tensor."""
        copies = tensor.new_empty(len(tensor), len(rows), *tensor.shape[2:])
        self._pieces.copy_rows(tensor, copies, rows)
        return copies

    def _make_cache(self, num_rows: int, states: dict[str, torch.Tensor] | None) -> Any:
        """Return a cache of the model that reads KV blocks and starts with ``states``, if given."""
        spec, cache = self._kv_spec, self._runner.new_cache()
        nothing = torch.empty(
            (spec.num_layers, 2, num_rows, spec.num_kv_heads, 0, spec.head_dim),
            dtype=spec.dtype,
            device=self._context.device,
        )
        if states is not None:
            views, tokens = self._layout.views(states).states, [*nothing.flatten(0, 1).unbind()]
            self._layout.fill(cache, SequenceMemory(1, views, [], tokens))
        number = 0
        for layer, parts in zip(cache.layers, self._layout.layers, strict=True):
            if parts.has_tokens:
                layer.keys, layer.values = nothing[number]
                layer.update = partial(self._attention.update, number)
                number += 1
        return cache

    def _copy_replaced(self, cache: Any, states: dict[str, torch.Tensor]) -> None:
        """Copy states into ``states`` from layers that replaced their tensors."""
        left = read_layers(cache, self._layout.layers, 1)
        for view, now in zip(self._layout.views(states).states, left.states, strict=True):
            if now.data_ptr() != view.data_ptr():
                view.copy_(now)


def _fit(shape: RectangleShape, size: tuple[int, int]) -> RectangleShape:
    """Return the shape for a CUDA graph in which a rectangle fits; ``size`` is rows and tokens."""
    rows, tokens = size
    # The first piece of a row may be the whole row.
    widths = [min(max(64, 1 << (width - 1).bit_length()), tokens) for width in shape.widths]
    return RectangleShape(rows, tokens, (tokens, *widths[1:]), is_ragged=True)


def _bounds_of(group: Sequence[_Placed], count: int) -> list[list[int]]:
    """Return the starts of each row's pieces, and the last end, for ``count`` checkpoints."""
    # A row with fewer checkpoints has empty pieces at its end.
    return [
        [0, *chunk.cuts, *[chunk.request.num_tokens] * (count + 1 - len(chunk.cuts))]
        for chunk in group
    ]


def _at_last_tokens(
    last: torch.Tensor,
    size: tuple[int, int],
    forward: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    """Stand in for a model's head: compute the logits of each row's last token only."""
    if hidden.dim() == 3 and hidden.shape[:2] == size:
        hidden = hidden.flatten(0, 1)[last][:, None]
    return forward(hidden, *args, **options)
