"""Prefills of a step: chunks of prompts, those that are alike as one rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from mamba_cache.context import (
    CapturedExtractions,
    DynamicInferenceContext,
    ScheduledRequest,
    Step,
)
from mamba_cache.integrations.transformers.batching.layout import BatchLayout
from mamba_cache.integrations.transformers.capture import StateCapture
from mamba_cache.integrations.transformers.layers import CacheFiller, SequenceMemory, read_layers
from mamba_cache.integrations.transformers.runner import ModelRunner
from mamba_cache.integrations.transformers.tensors import ints_to_device

__all__ = ["ComputedChunks", "PrefillStep"]


@dataclass(frozen=True, slots=True)
class ComputedChunks:
    """What a forward over chunks of prompts left."""

    requests: tuple[ScheduledRequest, ...]  # the chunks, in the order of the rows
    logits: torch.Tensor  # [rows, vocabulary] after the last token of each
    # Their live states by name, [num_layers, rows, *shape], to be put into their rows.
    states: dict[str, torch.Tensor]
    rows: torch.Tensor  # [rows] int64 on the device: these rows


@dataclass(frozen=True, slots=True)
class _Placed:
    """A chunk and where it lies in the step: its place among the requests, and its first token."""

    request: ScheduledRequest
    place: int
    first_token: int


class PrefillStep:
    """Computes the chunks of a step with the model's own attention.

    Each forward takes sequences that begin and end at the same positions, for which no padding is
    needed, and of no more than ``rectangle_tokens`` together, those before the chunks included. It
    goes on from copies of their live states, and of their keys and values.
    """

    def __init__(
        self,
        runner: ModelRunner,
        context: DynamicInferenceContext,
        layout: BatchLayout,
        filler: CacheFiller,
        capture: StateCapture | None,
        *,
        rectangle_tokens: int,
    ) -> None:
        self._runner = runner
        self._context = context
        self._layout = layout
        self._filler = filler
        self._capture = capture
        self._rectangle_tokens = rectangle_tokens
        self._kv_cache = context.kv_cache
        allocator = context.kv_block_allocator
        self._dummy_slot = allocator.dummy_block_id * context.config.block_size_tokens

    def compute(self, step: Step) -> list[ComputedChunks]:
        """Compute all chunks of a step: keys, values and checkpoints are written, not states."""
        chunks, is_captured = self._place(step), True
        computed = []
        for group in self._group(chunks):
            result, was_captured = self._forward(step, group)
            computed.append(result)
            is_captured &= was_captured
        metadata = step.metadata
        if metadata.num_checkpoints and is_captured:
            lengths = metadata.num_chunks, metadata.num_prefill_tokens
            layers = range(self._layout.num_state_layers)
            self._context.count_extractions(CapturedExtractions(dict.fromkeys(layers, lengths)))
        return computed

    def write_states(self, computed: Sequence[ComputedChunks]) -> None:
        """Put the states that forwards have left into the live rows of their requests."""
        for chunks in computed:
            for name, states in chunks.states.items():
                self._context.live_states[name].index_copy_(1, chunks.rows, states)

    def read_states(self, rows: Sequence[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return live rows, on the device, and copies of the states there by name."""
        at = ints_to_device(rows, self._context.device)
        live = self._context.live_states.tensors
        return at, {name: tensor.index_select(1, at) for name, tensor in live.items()}

    def _place(self, step: Step) -> list[_Placed]:
        metadata, first = step.metadata, step.metadata.num_decode_tokens
        placed = []
        for place in range(metadata.num_decodes, metadata.num_requests):
            request = step.prefills[place - metadata.num_decodes]
            placed.append(_Placed(request, place, first))
            first += request.num_tokens
        return placed

    def _group(self, chunks: Sequence[_Placed]) -> list[list[_Placed]]:
        """Put chunks together that begin, end and are saved at the same positions."""
        groups: dict[object, list[list[_Placed]]] = {}
        for chunk in chunks:
            request = chunk.request
            positions = tuple(position for position, _ in request.checkpoints)
            alike = groups.setdefault((request.start, request.num_tokens, positions), [[]])
            most = self._rectangle_tokens // (request.start + request.num_tokens)
            if len(alike[-1]) >= max(most, 1):
                alike.append([])
            alike[-1].append(chunk)
        return [group for alike in groups.values() for group in alike]

    def _forward(self, step: Step, group: Sequence[_Placed]) -> tuple[ComputedChunks, bool]:
        metadata, first = step.metadata, group[0].request
        start, size, count = first.start, first.num_tokens, len(group)
        rows, states = self._restored(step, group)
        cache = self._runner.new_cache()
        if start:
            kv = self._read_kv(metadata.block_tables, group, start)
            memory = self._layout.memory(self._layout.views(states), kv, start)
            self._filler.fill(cache, memory)
        spans = [slice(chunk.first_token, chunk.first_token + size) for chunk in group]
        ids = torch.stack([metadata.token_ids[span] for span in spans])
        positions = torch.arange(start, start + size, device=ids.device).expand(count, size)
        inside = [position for position, _ in first.checkpoints]
        saved = {p: self._layout.empty_states(count, self._context.device) for p in inside}
        rooms = {p: SequenceMemory(p, self._layout.views(room)) for p, room in saved.items()}
        during = (
            nullcontext(set[int]())
            if self._capture is None or not rooms
            else self._capture.during(cache, start, size, rooms, num_rows=count)
        )
        with during as captured:
            logits = self._runner.forward_rows(ids, positions, cache)
        self._save(group, {p: room for p, room in saved.items() if p in captured})
        left = read_layers(cache, self._layout.layout.layers, start + size)
        self._write_kv(left.tokens, start, [metadata.kv_slot_mapping[span] for span in spans])
        requests = tuple(chunk.request for chunk in group)
        computed = ComputedChunks(requests, logits[:, -1], self._layout.stack(left.states), rows)
        return computed, all(p in captured for p in inside)

    def _restored(
        self, step: Step, group: Sequence[_Placed]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the rows of requests, and copies of their live states."""
        first, count = group[0].place, len(group)
        if [chunk.place for chunk in group] == [*range(first, first + count)]:
            rows = step.metadata.state_rows[first : first + count].long()
        else:
            rows = torch.stack([step.metadata.state_rows[c.place] for c in group]).long()
        if not group[0].request.start:
            return rows, {}
        live = self._context.live_states.tensors
        return rows, {name: tensor.index_select(1, rows) for name, tensor in live.items()}

    def _read_kv(
        self, tables: torch.Tensor, group: Sequence[_Placed], num_tokens: int
    ) -> torch.Tensor:
        """Return copies of keys and values [num_layers, 2, rows, kv_heads, num_tokens, dim]."""
        assert self._kv_cache is not None
        num_blocks = -(-num_tokens // self._context.config.block_size_tokens)
        blocks = torch.stack([tables[chunk.place, :num_blocks] for chunk in group]).long()
        gathered = self._kv_cache[:, :, blocks]
        return gathered.flatten(3, 4)[:, :, :, :num_tokens].transpose(3, 4)

    def _write_kv(
        self, tokens: Sequence[torch.Tensor], start: int, slots: Sequence[torch.Tensor]
    ) -> None:
        """Write what a forward added to the keys and values of its sequences."""
        if not tokens:
            return
        assert self._kv_cache is not None
        to = torch.cat(list(slots))
        to = torch.where(to < 0, self._dummy_slot, to)  # of blocks that are shared, and filled
        pool = self._kv_cache.flatten(2, 3).flatten(0, 1)
        for layer, new in zip(pool, tokens, strict=True):
            added = new[:, :, start:].transpose(1, 2).flatten(0, 1)
            layer.index_copy_(0, to, added)

    def _save(self, group: Sequence[_Placed], saved: dict[int, dict[str, torch.Tensor]]) -> None:
        """Copy captured states into the slots that are reserved for them."""
        pools = self._context.slot_allocator.states.tensors
        for position, states in saved.items():
            slots = [dict(chunk.request.checkpoints)[position] for chunk in group]
            to = ints_to_device(slots, self._context.device)
            for name, state in states.items():
                pools[name].index_copy_(1, to, state)
