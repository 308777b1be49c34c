"""Fills the tensors of a step on the host and brings them to the device in one copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mamba_cache._indices import PAD_SLOT_ID
from mamba_cache.metadata.chunks import compute_chunk_metadata
from mamba_cache.metadata.step import StepMetadata

__all__ = ["CheckpointEntry", "SequenceSlice", "StepBuffers", "StepPlan"]

_ALIGNMENT_BYTES = 64
_PINNED_BUFFERS = 4


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
class StepPlan:
    """All that a step does, as plain values.

    Attributes:
        decodes: Slices of one token each.
        prefills: Slices of prompts.
        checkpoints: States saved while the prefills are computed.
        restores: Pairs (slot or ``ZERO_SOURCE``, live-state row) done before the forward.
        boundaries: Pairs (live-state row, reserved slot) copied when the step is committed.
    """

    decodes: Sequence[SequenceSlice] = ()
    prefills: Sequence[SequenceSlice] = ()
    checkpoints: Sequence[CheckpointEntry] = ()
    restores: Sequence[tuple[int, int]] = ()
    boundaries: Sequence[tuple[int, int]] = ()


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
        device: Where the kernels read.
    """

    def __init__(
        self,
        block_tables: np.ndarray[Any, np.dtype[np.int32]],
        *,
        block_size_tokens: int,
        chunk_size: int,
        max_tokens: int,
        max_checkpoints: int,
        device: torch.device,
    ) -> None:
        self._block_tables = block_tables
        self._block_size = block_size_tokens
        self._chunk_size = chunk_size
        max_requests, max_blocks = block_tables.shape
        max_chunks = min(max_tokens, max_tokens // chunk_size + 2 * max_requests)
        self._layout = _Layout(max_requests, max_tokens, max_chunks, max_checkpoints, max_blocks)
        self._device_buffer = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        self._tensors = self._layout.views(self._device_buffer)
        kind, count = (
            (_PinnedBuffer, _PINNED_BUFFERS) if device.type == "cuda" else (_SharedBuffer, 1)
        )
        self._host_buffers = itertools.cycle(
            [kind(self._layout, self._device_buffer) for _ in range(count)]
        )

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
        _fill_pairs(host.arrays, "restore_sources", "restore_rows", plan.restores)
        _fill_pairs(host.arrays, "boundary_rows", "boundary_slots", plan.boundaries)
        host.send(self._layout.used_bytes(len(slices)))
        return StepMetadata(
            num_decodes=len(plan.decodes),
            num_prefills=len(plan.prefills),
            num_tokens=tokens,
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
        _fill(arrays["checkpoint_rows"], rows[which], PAD_SLOT_ID)
        _fill(arrays["checkpoint_slots"], [entry.slot for entry in entries], PAD_SLOT_ID)
        return len(seq_idx)


class _Layout:
    """Where each tensor lies in the one buffer.

    The block tables come last, because only the rows in use are copied.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, max_chunks: int, max_checkpoints: int, blocks: int
    ) -> None:
        per_token = dict.fromkeys(("token_ids", "positions", "kv_slot_mapping"), max_tokens)
        per_request = dict.fromkeys(
            (
                "num_computed_tokens", "seq_lens", "state_rows", "last_chunk_indices",
                "restore_sources", "restore_rows", "boundary_rows", "boundary_slots",
            ),
            max_requests,
        )  # fmt: skip
        per_checkpoint = dict.fromkeys(
            (
                "checkpoint_chunks", "checkpoint_conv_ends", "checkpoint_seq_starts",
                "checkpoint_rows", "checkpoint_slots",
            ),
            max_checkpoints,
        )  # fmt: skip
        others = {
            "query_start_loc": max_requests + 1,
            "cu_chunk_seqlens": max_chunks + 1,
            "chunk_seq_idx": max_chunks,
        }
        self._fields: dict[str, tuple[int, int, torch.dtype]] = {}
        self.num_bytes = 0
        for name, count in per_token.items():
            self._add(name, count, torch.int64)
        for name, count in (per_request | per_checkpoint | others).items():
            self._add(name, count, torch.int32)
        self._table_offset = self.num_bytes
        self._table_shape = (max_requests, blocks)
        self._add("block_tables", max_requests * blocks, torch.int32)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each tensor as a view of ``buffer`` ([num_bytes] uint8)."""
        tensors = {
            name: buffer[offset : offset + count * dtype.itemsize].view(dtype)
            for name, (offset, count, dtype) in self._fields.items()
        }
        tensors["block_tables"] = tensors["block_tables"].view(self._table_shape)
        return tensors

    def arrays(self, buffer: torch.Tensor) -> dict[str, Any]:
        """Return each tensor of a ``buffer`` on the host as a numpy view."""
        return {name: tensor.numpy() for name, tensor in self.views(buffer).items()}

    def used_bytes(self, num_requests: int) -> int:
        """Return the bytes to copy for a batch of ``num_requests`` requests."""
        return self._table_offset + num_requests * self._table_shape[1] * torch.int32.itemsize

    def _add(self, name: str, count: int, dtype: torch.dtype) -> None:
        self._fields[name] = (self.num_bytes, count, dtype)
        size = count * dtype.itemsize
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
        self._buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=True)
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
    _fill(arrays["state_rows"], rows, PAD_SLOT_ID)
    arrays["block_tables"][: len(slices)] = block_tables[rows]
    return total


def _fill_pairs(
    arrays: dict[str, Any], first: str, second: str, pairs: Sequence[tuple[int, int]]
) -> None:
    _fill(arrays[first], [pair[0] for pair in pairs], PAD_SLOT_ID)
    _fill(arrays[second], [pair[1] for pair in pairs], PAD_SLOT_ID)


def _fill(array: Any, values: Any, padding: int) -> None:
    array[: len(values)] = values
    array[len(values) :] = padding
