"""Fills the tensors of a step on the host and brings them to the device in one copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mamba_cache._indices import PAD_SLOT_ID
from mamba_cache._lasting import lasting
from mamba_cache.metadata.chunks import compute_chunk_metadata
from mamba_cache.metadata.step import StepMetadata

__all__ = ["BoundaryEntry", "CheckpointEntry", "SequenceSlice", "StepBuffers", "StepPlan"]

_ALIGNMENT_BYTES = 64
_PINNED_BUFFERS = 4
_PER_TOKEN = ("token_ids", "positions", "kv_slot_mapping")
_PER_REQUEST = (
    "num_computed_tokens", "seq_lens", "request_rows", "state_rows", "last_chunk_indices",
    "restore_sources", "restore_rows",
    "boundary_rows", "boundary_slots", "boundary_entries", "boundary_positions",
)  # fmt: skip
_PER_CHECKPOINT = (
    "checkpoint_chunks", "checkpoint_conv_ends", "checkpoint_seq_starts",
    "checkpoint_rows", "checkpoint_slots",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that a step computes.

    Attributes:
        row: The request's row in the block table and in the live states.
        start: Tokens of the sequence before the slice.
        token_ids: [n] integer tokens of the slice, on the CPU.
        first_writable: First position whose key and value are written; those before it lie in
            blocks that are shared and filled already.
    """

    row: int
    start: int
    token_ids: np.ndarray[Any, np.dtype[Any]]
    first_writable: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A state to save inside a prefill chunk.

    Attributes:
        prefill_index: Which prefill slice of the plan, from 0.
        position: The checkpoint, in tokens from the sequence's start.
        slot: The reserved slot.
    """

    prefill_index: int
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class BoundaryEntry:
    """A live state to save when the step is committed.

    Attributes:
        index: Which slice of the plan, decodes first.
        position: The boundary, in tokens from the sequence's start.
        slot: The reserved slot.
    """

    index: int
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that a step does, as plain values.

    Attributes:
        decodes: Slices of decoding requests: the last sampled token, and its drafts.
        prefills: Slices of prompts.
        checkpoints: States saved while the prefills are computed.
        restores: Pairs (slot or ``ZERO_SOURCE``, the request's row) done before the forward.
        boundaries: States saved when the step is committed.
    """

    decodes: Sequence[SequenceSlice] = ()
    prefills: Sequence[SequenceSlice] = ()
    checkpoints: Sequence[CheckpointEntry] = ()
    restores: Sequence[tuple[int, int]] = ()
    boundaries: Sequence[BoundaryEntry] = ()


class StepBuffers:
    """Step tensors at fixed addresses, written on the host and copied to the device at once.

    All tensors of a ``StepMetadata`` are views of one device allocation. On a GPU the host side is
    a small ring of pinned buffers, so that a step can be written while the copy of the one before
    is still under way; on the CPU both sides are the same memory.

    Args:
        block_tables: [max_requests, max_blocks] int32 on the CPU, owned by the caller: KV block
            ids by request row. Read anew in each step.
        block_size_tokens: Tokens of a KV block.
        chunk_size: Tokens of an SSM chunk.
        max_tokens: Tokens of one step.
        max_checkpoints: Checkpoints inside the prefill chunks of one step.
        max_decode_tokens: Tokens of one decoding request.
        live_rows_per_request: Rows of the live states for each row of ``block_tables``.
        device: Where the kernels read.
    """

    @lasting
    def __init__(
        self,
        block_tables: np.ndarray[Any, np.dtype[np.int32]],
        *,
        block_size_tokens: int,
        chunk_size: int,
        max_tokens: int,
        max_checkpoints: int,
        max_decode_tokens: int = 1,
        live_rows_per_request: int = 1,
        device: torch.device,
    ) -> None:
        self._block_tables = block_tables
        self._block_size = block_size_tokens
        self._chunk_size = chunk_size
        self._live_rows = live_rows_per_request
        max_requests, max_blocks = block_tables.shape
        max_chunks = min(max_tokens, max_tokens // chunk_size + 2 * max_requests)
        self._layout = _Layout(
            requests=max_requests,
            tokens=max_tokens,
            chunks=max_chunks,
            checkpoints=max_checkpoints,
            decode_columns=1 + max_decode_tokens,
            blocks=max_blocks,
        )
        self._device_buffer = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        self._tensors = self._layout.views(self._device_buffer)
        kind, count = (
            (_PinnedBuffer, _PINNED_BUFFERS) if device.type == "cuda" else (_SharedBuffer, 1)
        )
        self._num_host_buffers = count
        self._host_buffers = itertools.cycle(
            [kind(self._layout, self._device_buffer) for _ in range(count)]
        )

    def checkpoint_fields(self, num_checkpoints: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors that say where states are saved inside prefill chunks, by name.

        Args:
            num_checkpoints: Of the step, to leave the padding out; None: all that there is room
                for.
        """
        return {name: self._tensors[name][:num_checkpoints] for name in _PER_CHECKPOINT}

    def zero_(self) -> None:
        """Clear the tensors of all steps so far, on the host and on the device."""
        self._device_buffer.zero_()
        for _ in range(self._num_host_buffers):
            host = next(self._host_buffers)
            host.wait()
            for array in host.arrays.values():
                array.fill(0)

    def fill(self, plan: StepPlan) -> StepMetadata:
        """Write the plan's tensors and enqueue their copy to the device.

        The caller has checked that the plan fits the buffers.

        Args:
            plan: What the step does.

        Returns:
            The step's metadata, whose tensors are valid on the current stream until the next call.
        """
        host = next(self._host_buffers)
        host.wait()
        slices = [*plan.decodes, *plan.prefills]
        tokens = _fill_tokens(host.arrays, slices, self._block_tables, self._block_size)
        num_chunks = self._fill_chunks(host.arrays, plan)
        self._fill_states(host.arrays, plan, slices)
        decode_lengths = [len(s.token_ids) for s in plan.decodes]
        host.send(self._layout.used_bytes(len(slices)))
        return StepMetadata(
            num_decodes=len(plan.decodes),
            num_prefills=len(plan.prefills),
            num_tokens=tokens,
            num_decode_tokens=sum(decode_lengths),
            max_decode_len=max(decode_lengths, default=0),
            num_chunks=num_chunks,
            chunk_size=self._chunk_size,
            num_checkpoints=len(plan.checkpoints),
            max_seq_len=max((s.start + len(s.token_ids) for s in slices), default=0),
            **self._tensors,
        )

    def _fill_chunks(self, arrays: dict[str, Any], plan: StepPlan) -> int:
        lengths = np.array([len(s.token_ids) for s in plan.prefills], dtype=np.int64)
        starts = np.array([s.start for s in plan.prefills], dtype=np.int64)
        query_start_loc = np.concatenate(([0], np.cumsum(lengths)))
        cu_chunks, seq_idx, last = compute_chunk_metadata(query_start_loc, starts, self._chunk_size)
        _fill(arrays["cu_chunk_seqlens"], cu_chunks, int(query_start_loc[-1]))
        _fill(arrays["chunk_seq_idx"], seq_idx, -1)
        _fill(arrays["last_chunk_indices"], last, -1)

        first_grid_chunk = starts // self._chunk_size
        num_chunks = -(-(starts + lengths) // self._chunk_size) - first_grid_chunk
        first_chunk = np.cumsum(num_chunks) - num_chunks
        entries = plan.checkpoints
        which = np.array([entry.prefill_index for entry in entries], dtype=np.int64)
        positions = np.array([entry.position for entry in entries], dtype=np.int64)
        rows = np.array([s.row for s in plan.prefills], dtype=np.int64)
        chunks = first_chunk[which] + positions // self._chunk_size - 1 - first_grid_chunk[which]
        seq_starts = query_start_loc[which]
        _fill(arrays["checkpoint_chunks"], chunks, -1)
        _fill(arrays["checkpoint_conv_ends"], seq_starts + positions - starts[which], -1)
        _fill(arrays["checkpoint_seq_starts"], seq_starts, -1)
        _fill(arrays["checkpoint_rows"], rows[which] * self._live_rows, PAD_SLOT_ID)
        _fill(arrays["checkpoint_slots"], [entry.slot for entry in entries], PAD_SLOT_ID)
        return len(seq_idx)

    def _fill_states(
        self, arrays: dict[str, Any], plan: StepPlan, slices: Sequence[SequenceSlice]
    ) -> None:
        """Write which live states and slots are read and written."""
        rows = np.array([s.row for s in slices], dtype=np.int64)
        live_rows = rows * self._live_rows
        _fill(arrays["request_rows"], rows, PAD_SLOT_ID)
        _fill(arrays["state_rows"], live_rows, PAD_SLOT_ID)
        _fill(arrays["decode_state_rows"], live_rows[: len(plan.decodes), None], PAD_SLOT_ID)
        _fill(arrays["restore_sources"], [source for source, _ in plan.restores], PAD_SLOT_ID)
        restored = [row * self._live_rows for _, row in plan.restores]
        _fill(arrays["restore_rows"], restored, PAD_SLOT_ID)
        saved = [entry.index for entry in plan.boundaries]
        _fill(arrays["boundary_rows"], live_rows[saved], PAD_SLOT_ID)
        _fill(arrays["boundary_slots"], [entry.slot for entry in plan.boundaries], PAD_SLOT_ID)
        arrays["boundary_entries"][:] = arrays["boundary_positions"][:] = -1
        arrays["boundary_entries"][saved] = range(len(saved))
        arrays["boundary_positions"][saved] = [entry.position for entry in plan.boundaries]


class _Layout:
    """Where each tensor lies in the one buffer.

    The block tables come last, because only the rows in use are copied.
    """

    def __init__(
        self,
        *,
        requests: int,
        tokens: int,
        chunks: int,
        checkpoints: int,
        decode_columns: int,
        blocks: int,
    ) -> None:
        counts = (
            dict.fromkeys(_PER_REQUEST, requests)
            | dict.fromkeys(_PER_CHECKPOINT, checkpoints)
            | {
                "query_start_loc": requests + 1,
                "cu_chunk_seqlens": chunks + 1,
                "chunk_seq_idx": chunks,
            }
        )
        self._fields: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self.num_bytes = 0
        for name in _PER_TOKEN:
            self._add(name, (tokens,), torch.int64)
        for name, count in counts.items():
            self._add(name, (count,), torch.int32)
        self._add("decode_state_rows", (requests, decode_columns), torch.int32)
        self._table_offset, self._table_width = self.num_bytes, blocks
        self._add("block_tables", (requests, blocks), torch.int32)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each tensor as a view of ``buffer`` ([num_bytes] uint8)."""
        return {
            name: buffer[offset : offset + math.prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for name, (offset, shape, dtype) in self._fields.items()
        }

    def arrays(self, buffer: torch.Tensor) -> dict[str, Any]:
        """Return each tensor of a ``buffer`` on the host as a numpy view."""
        return {name: tensor.numpy() for name, tensor in self.views(buffer).items()}

    def used_bytes(self, num_requests: int) -> int:
        """Return the bytes to copy for a batch of ``num_requests`` requests."""
        return self._table_offset + num_requests * self._table_width * torch.int32.itemsize

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._fields[name] = (self.num_bytes, shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        self.num_bytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _SharedBuffer:
    """The host side on a CPU: the kernels read the same memory."""

    def __init__(self, layout: _Layout, device_buffer: torch.Tensor) -> None:
        self.arrays = layout.arrays(device_buffer)

    def wait(self) -> None:
        """There is nothing to wait for."""

    def send(self, num_bytes: int) -> None:
        """There is nothing to copy."""


class _PinnedBuffer:  # pragma: no cover - tests/gpu run it
    """One host side on a GPU: pinned memory, and the event of its last copy."""

    def __init__(self, layout: _Layout, device_buffer: torch.Tensor) -> None:
        self._device_buffer = device_buffer
        self._buffer = torch.zeros(
            layout.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
        )
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.arrays = layout.arrays(self._buffer)

    def wait(self) -> None:
        """Wait until the last copy from here is done; it is unless the host runs far ahead."""
        self._copied.synchronize()

    def send(self, num_bytes: int) -> None:
        """Enqueue the copy of the first ``num_bytes`` bytes to the device."""
        self._device_buffer[:num_bytes].copy_(self._buffer[:num_bytes], non_blocking=True)
        self._copied.record()


def _fill_tokens(
    arrays: dict[str, Any],
    slices: Sequence[SequenceSlice],
    block_tables: np.ndarray[Any, np.dtype[np.int32]],
    block_size: int,
) -> int:
    lengths = np.array([len(s.token_ids) for s in slices], dtype=np.int64)
    starts = np.array([s.start for s in slices], dtype=np.int64)
    rows = np.array([s.row for s in slices], dtype=np.int64)
    writable = np.array([s.first_writable for s in slices], dtype=np.int64)
    query_start_loc = np.concatenate(([0], np.cumsum(lengths)))
    total = int(query_start_loc[-1])
    positions = np.arange(total) - np.repeat(query_start_loc[:-1] - starts, lengths)
    blocks = block_tables[np.repeat(rows, lengths), positions // block_size].astype(np.int64)
    mapping = blocks * block_size + positions % block_size
    mapping[positions < np.repeat(writable, lengths)] = PAD_SLOT_ID

    tokens = np.concatenate([s.token_ids for s in slices]) if slices else ()
    _fill(arrays["token_ids"], tokens, 0)
    _fill(arrays["positions"], positions, 0)
    _fill(arrays["kv_slot_mapping"], mapping, PAD_SLOT_ID)
    _fill(arrays["query_start_loc"], query_start_loc, total)
    _fill(arrays["num_computed_tokens"], starts, 0)
    _fill(arrays["seq_lens"], starts + lengths, 0)
    arrays["block_tables"][: len(slices)] = block_tables[rows]
    return total


def _fill(array: Any, values: Any, padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding
