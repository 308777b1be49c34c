"""The step's tensors: filled on the host, brought to the device in one copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mamba_cache._indices import PAD_SLOT_ID
from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.metadata.chunks import cut_into_chunks
from mamba_cache.metadata.step import StepMetadata

__all__ = [
    "NO_DECODES",
    "CheckpointEntry",
    "DecodeBatch",
    "SequenceSlice",
    "StepBuffers",
    "StepPlan",
]

_IntArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_ALIGNMENT_BYTES = 64
_PINNED_BUFFERS = 4
_PER_TOKEN = ("token_ids", "positions", "kv_slot_mapping")
_PER_REQUEST = (
    "num_computed_tokens", "seq_lens", "request_rows", "state_rows", "last_chunk_indices",
    "restore_sources", "restore_rows",
    "boundary_rows", "boundary_slots", "boundary_entries", "boundary_positions",
)  # fmt: skip
_PADDING_PER_TOKEN = {"token_ids": 0, "positions": 0, "kv_slot_mapping": PAD_SLOT_ID}
_PADDING_PER_REQUEST = {
    "num_computed_tokens": 0,
    "seq_lens": 0,
    "request_rows": PAD_SLOT_ID,
    "state_rows": PAD_SLOT_ID,
}
_PER_CHECKPOINT = (
    "checkpoint_chunks", "checkpoint_conv_ends", "checkpoint_seq_starts",
    "checkpoint_rows", "checkpoint_slots",
)  # fmt: skip
_SIDE_BY_SIDE = {
    "checkpoints": _PER_CHECKPOINT,
    "restores": ("restore_sources", "restore_rows"),
    "boundaries": ("boundary_rows", "boundary_slots"),
    "boundaries_by_request": ("boundary_entries", "boundary_positions"),
}
"""Tensors of equally many entries, one behind the other, that are written together. Padding: -1."""


@dataclass(slots=True, eq=False)
class SequenceSlice:
    """The tokens of one prompt that a step computes.

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


class DecodeBatch(NamedTuple):
    """The decoding requests of a step, as arrays.

    Attributes:
        rows: [n] int64. Their rows in the block table and in the live states. The same array in
            two steps says that the requests are the same.
        starts: [n] int64. Tokens of each sequence before the step.
        ends: [n] int64. Tokens of each sequence after the step.
        longest: The largest of ``ends``; 0 if there is none.
        token_ids: [total] integer tokens: of each the last sampled one and its drafts, packed.
        width: Tokens of each, where ``query_start_loc`` is None.
        query_start_loc: [n + 1] int64. Where those of each begin, then their number; None: all
            have equally many.
        place_shifts: [n] int64. What to add to the position of a token to have where its key and
            value go; None: that is read off the block tables.
        crossing: Which of them have tokens in more than one block, so that their shifts do not hold
            for all of these.
    """

    rows: _IntArray
    starts: _IntArray
    ends: _IntArray
    longest: int
    token_ids: _IntArray
    width: int = 1
    query_start_loc: _IntArray | None = None
    place_shifts: _IntArray | None = None
    crossing: Sequence[int] | _IntArray = ()


_NO_ROWS: _IntArray = np.zeros(0, dtype=np.int64)

NO_DECODES = DecodeBatch(_NO_ROWS, _NO_ROWS, _NO_ROWS, 0, _NO_ROWS)
"""What stands in a plan of prefills alone."""


@dataclass(slots=True)
class CheckpointEntry:
    """A state that a step saves: inside a prefill chunk, or from a live state at commit.

    Attributes:
        index: Inside a chunk: which prefill slice of the plan, from 0. At commit: which slice of
            all, decodes first.
        position: The checkpoint, in tokens from the sequence's start.
        slot: The reserved slot.
    """

    index: int
    position: int
    slot: int


class StepPlan(NamedTuple):
    """All that a step does, as plain values.

    Attributes:
        decodes: The decoding requests.
        prefills: Slices of prompts.
        checkpoints: States saved while the prefills are computed.
        restores: Pairs (slot or ``ZERO_SOURCE``, the request's row) done before the forward.
        boundaries: States saved when the step is committed.
    """

    decodes: DecodeBatch = NO_DECODES
    prefills: Sequence[SequenceSlice] = ()
    checkpoints: Sequence[CheckpointEntry] = ()
    restores: Sequence[tuple[int, int]] = ()
    boundaries: Sequence[CheckpointEntry] = ()


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
        table_stamps: [max_requests] int64, owned by the caller: a number >= 0 for each row of
            ``block_tables``, another one whenever it is written and never that of another row, so
            that a table need not be copied again. None: every table is, in each step.
    """

    @outside_inference_mode
    def __init__(
        self,
        block_tables: np.ndarray[Any, np.dtype[np.int32]],
        *,
        table_stamps: _IntArray | None = None,
        block_size_tokens: int,
        chunk_size: int,
        max_tokens: int,
        max_checkpoints: int,
        max_decode_tokens: int = 1,
        live_rows_per_request: int = 1,
        device: torch.device,
    ) -> None:
        self._block_tables = block_tables
        self._table_stamps = table_stamps
        self._block_size = block_size_tokens
        self._chunk_size = chunk_size
        self._live_rows = live_rows_per_request
        max_requests, max_blocks = block_tables.shape
        self._numbers = np.arange(max_blocks * block_size_tokens)
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
        names = StepMetadata.__dataclass_fields__
        self._in_order = [self._tensors[name] for name in names if name in self._tensors]
        kind, count = (_PinnedBuffer, _PINNED_BUFFERS) if device.type == "cuda" else (_HostSide, 1)
        self._num_host_buffers = count
        hosts = [kind(self._layout, self._device_buffer) for _ in range(count)]
        self._host_buffers = itertools.cycle(hosts)
        self._cpu_arrays = hosts[0].arrays if device.type == "cpu" else None

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of every step's metadata, by name: what a CUDA graph may read."""
        return self._tensors

    def checkpoint_fields(self, num_checkpoints: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors that say where states are saved inside prefill chunks, by name.

        Args:
            num_checkpoints: Of the step, to leave the padding out; None: all that there is room
                for.
        """
        return {name: self._tensors[name][:num_checkpoints] for name in _PER_CHECKPOINT}

    def first_entries(self, name: str, count: int) -> torch.Tensor | list[int]:
        """Return the first entries of a tensor of the last step.

        Args:
            name: A tensor of [max_requests].
            count: How many.

        Returns:
            A view on the device; on the CPU a list, which costs less to make and to read.
        """
        if self._cpu_arrays is not None:
            entries: list[int] = self._cpu_arrays[name][:count].tolist()
            return entries
        return self._tensors[name][:count]  # pragma: no cover - tests/gpu run it

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
        decodes = plan.decodes
        num_decodes, num_prefills = len(decodes.rows), len(plan.prefills)
        num_decode_tokens = len(decodes.token_ids)
        max_decode_len = decodes.width if num_decodes else 0
        if decodes.query_start_loc is not None and num_decodes:
            max_decode_len = int(np.maximum.reduce(decodes.ends - decodes.starts))
        max_seq_len, bounds = decodes.longest, [0]
        host.arrays["query_start_loc"][0] = 0
        if num_decodes:
            self._fill_decodes(host, decodes)
        host.rows = decodes.rows
        host.pad_after("decode_state_rows", num_decodes, PAD_SLOT_ID)
        if num_prefills:
            bounds, longest = self._fill_prefills(host, plan)
            max_seq_len = max(max_seq_len, longest)
        num_tokens, num_chunks = num_decode_tokens + bounds[-1], 0
        if num_prefills or host.has_chunks:
            num_chunks = self._fill_chunks(host, plan, bounds)
        host.pad(num_tokens, num_decodes + num_prefills)
        if plan.restores or host.has_restores:
            self._fill_restores(host, plan)
        if plan.boundaries or host.has_boundaries:
            self._fill_boundaries(host, plan)
        host.send(self._layout.used_bytes(num_decodes + num_prefills))
        return StepMetadata(  # by position: in a third of the time
            num_decodes,
            num_prefills,
            num_tokens,
            num_decode_tokens,
            max_decode_len,
            num_chunks,
            self._chunk_size,
            len(plan.checkpoints),
            max_seq_len,
            *self._in_order,
        )

    def _fill_decodes(self, host: _HostSide, decodes: DecodeBatch) -> None:
        """Write what decoding requests compute, how long they are, and where their states are."""
        arrays, count, total = host.arrays, len(decodes.rows), len(decodes.token_ids)
        is_same = host.rows is decodes.rows
        if not is_same:
            live_rows = decodes.rows * self._live_rows
            arrays["request_rows"][:count] = decodes.rows
            arrays["state_rows"][:count] = live_rows
            arrays["decode_state_rows"][:count] = live_rows[:, None]
        self._fill_tables(host, decodes.rows)
        rows, bounds, width = decodes.rows, decodes.query_start_loc, decodes.width
        lengths: _IntArray | int = width
        if bounds is None:
            if not is_same or host.width != width:
                arrays["query_start_loc"][: count + 1] = np.arange(0, total + 1, width)
            host.width = width
            first = np.arange(0, total, width)
        else:
            arrays["query_start_loc"][: count + 1] = bounds
            host.width = -1
            first, lengths = bounds[:-1], np.diff(bounds)
        positions, shifts, which = decodes.starts, decodes.place_shifts, decodes.crossing
        if total > count:
            # Several times as fast as to add [n, 1] and [width]: numpy's inner loops are long.
            positions = (positions - first).repeat(lengths)
            positions += np.arange(total)
            rows = rows if shifts is not None and not len(which) else rows.repeat(lengths)
            shifts = None if shifts is None else shifts.repeat(lengths)
        if shifts is None:
            places = self._places(rows, positions)
        else:
            places = positions + shifts
            if len(which):
                is_crossing = np.zeros(count, dtype=bool)
                is_crossing[which] = True
                tokens = is_crossing.repeat(lengths).nonzero()[0]
                places[tokens] = self._places(rows[tokens], positions[tokens])
        arrays["token_ids"][:total] = decodes.token_ids
        arrays["positions"][:total] = positions
        arrays["kv_slot_mapping"][:total] = places
        arrays["num_computed_tokens"][:count] = decodes.starts
        arrays["seq_lens"][:count] = decodes.ends

    def _places(self, rows: _IntArray | int, positions: _IntArray) -> _IntArray:
        """Return where keys and values of tokens go, in 64 bits."""
        blocks = positions // self._block_size
        # The block's first place and the offset in it, in one.
        places: _IntArray = self._block_tables[rows, blocks] - blocks
        places *= self._block_size
        places += positions
        return places

    def _fill_prefills(self, host: _HostSide, plan: StepPlan) -> tuple[list[int], int]:
        """Write the same of prompts; return where each begins and all end, and the longest end."""
        arrays, size, numbers = host.arrays, self._block_size, self._numbers
        index, before = len(plan.decodes.rows), len(plan.decodes.token_ids)
        end, bounds, longest = before, [0], 0
        for piece in plan.prefills:
            start, length = piece.start, len(piece.token_ids)
            first, end = end, end + length
            arrays["token_ids"][first:end] = piece.token_ids
            arrays["positions"][first:end] = numbers[start : start + length]
            # As in ``_places``, but of consecutive tokens: each block is looked at once.
            block, offset = divmod(start, size)
            until = offset + length
            shifts = self._block_tables[piece.row, block : block - (-until // size)]
            shifts = (shifts - numbers[: len(shifts)]) * size
            places = arrays["kv_slot_mapping"][first:end]
            np.add(numbers[offset:until], shifts.repeat(size)[offset:until], out=places)
            if piece.first_writable > start:
                places[: piece.first_writable - start] = PAD_SLOT_ID
            arrays["num_computed_tokens"][index] = start
            arrays["seq_lens"][index] = start + length
            arrays["request_rows"][index] = piece.row
            arrays["state_rows"][index] = piece.row * self._live_rows
            arrays["block_tables"][index] = self._block_tables[piece.row]
            host.table_stamps[index] = -1  # it grows with each chunk, so nobody asks whether it did
            index += 1
            arrays["query_start_loc"][index] = end
            bounds.append(end - before)
            longest = max(longest, start + length)
        return bounds, longest

    def _fill_tables(self, host: _HostSide, rows: _IntArray) -> None:
        """Copy the block tables of decoding requests that are not there yet."""
        count, tables = len(rows), host.arrays["block_tables"]
        if self._table_stamps is None:
            tables[:count] = self._block_tables[rows]
            return
        stamps = self._table_stamps[rows]
        changed = (host.table_stamps[:count] != stamps).nonzero()[0]
        if len(changed):
            tables[changed] = self._block_tables[rows[changed]]
            host.table_stamps[:count] = stamps

    def _fill_chunks(self, host: _HostSide, plan: StepPlan, bounds: list[int]) -> int:
        """Write the chunks of prompts, and where states are saved inside them; return how many."""
        size, pieces, arrays = self._chunk_size, plan.prefills, host.arrays
        phases = [piece.start % size for piece in pieces]
        last = arrays["last_chunk_indices"]
        out = arrays["cu_chunk_seqlens"], arrays["chunk_seq_idx"], last
        num_chunks = cut_into_chunks(bounds, phases, size, out)
        host.pad_after("cu_chunk_seqlens", num_chunks + 1, bounds[-1], pads_all=True)
        host.pad_after("chunk_seq_idx", num_chunks, -1)
        host.pad_after("last_chunk_indices", len(pieces), -1)
        host.has_chunks = bool(pieces)
        entries = plan.checkpoints
        if not entries and not host.has_checkpoints:
            return num_chunks
        host.has_checkpoints = bool(entries)

        written = []
        for entry in entries:
            piece, first = pieces[entry.index], bounds[entry.index]
            end = piece.start + len(piece.token_ids)
            chunk = last.item(entry.index) - (-(-end // size) - entry.position // size)
            conv_end, row = first + entry.position - piece.start, piece.row * self._live_rows
            written.append((chunk, conv_end, first, row, entry.slot))
        host.fill("checkpoints", written)
        return num_chunks

    def _fill_restores(self, host: _HostSide, plan: StepPlan) -> None:
        host.fill("restores", [(source, row * self._live_rows) for source, row in plan.restores])
        host.has_restores = bool(plan.restores)

    def _fill_boundaries(self, host: _HostSide, plan: StepPlan) -> None:
        arrays, saved = host.arrays, plan.boundaries
        rows, by_request = arrays["request_rows"], arrays["boundaries_by_request"]
        host.fill("boundaries", [(rows.item(e.index) * self._live_rows, e.slot) for e in saved])
        by_request.fill(-1)
        for number, entry in enumerate(saved):
            by_request[entry.index] = number, entry.position
        host.has_boundaries = bool(saved)


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
        """Return each tensor of a ``buffer`` on the host as a numpy view.

        Likewise those that are written together, [entries, tensors].
        """
        arrays = {name: tensor.numpy() for name, tensor in self.views(buffer).items()}
        for name, members in _SIDE_BY_SIDE.items():
            (start, (count,), dtype), (second, *_) = (self._fields[each] for each in members[:2])
            rows = buffer[start : start + len(members) * (second - start)].view(dtype)
            width = (second - start) // dtype.itemsize
            arrays[name] = rows.view(len(members), width)[:, :count].numpy().T
        return arrays

    def used_bytes(self, num_requests: int) -> int:
        """Return the bytes to copy for a batch of ``num_requests`` requests."""
        return self._table_offset + num_requests * self._table_width * torch.int32.itemsize

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._fields[name] = (self.num_bytes, shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        self.num_bytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _HostSide:
    """The host side of the tensors, and how much of it is not padding since the last step.

    On a CPU the kernels read the same memory.
    """

    def __init__(self, layout: _Layout, buffer: torch.Tensor) -> None:
        self.arrays = layout.arrays(buffer)
        self.clear()

    def clear(self) -> None:
        """Hold zeros, and no padding."""
        for array in self.arrays.values():
            array.fill(0)
        self._used = {name: len(array) for name, array in self.arrays.items()}
        self.rows: _IntArray | None = None
        self._size = -1, -1
        self.table_stamps = np.full(self._used["block_tables"], -1, dtype=np.int64)
        # Of decodes: tokens of each, if all have equally many.
        self.width = -1
        self.has_chunks = self.has_checkpoints = self.has_restores = self.has_boundaries = True

    def fill(self, name: str, entries: Sequence[tuple[int, ...]]) -> None:
        """Write the entries of tensors that are written together, and padding behind them."""
        count = len(entries)
        if count:
            self.arrays[name][:count] = entries
        self.pad_after(name, count, PAD_SLOT_ID)

    def pad_after(self, name: str, count: int, padding: int, *, pads_all: bool = False) -> None:
        """Write padding over what was there before."""
        array = self.arrays[name]
        used = len(array) if pads_all else self._used[name]
        is_less = used > count
        if is_less:
            array[count:used] = padding
        self._used[name] = count

    def pad(self, num_tokens: int, num_requests: int) -> None:
        """Write padding over what the last step had beyond this one."""
        used = self._used["token_ids"]
        is_less = used > num_tokens
        if is_less:
            for name, padding in _PADDING_PER_TOKEN.items():
                self.arrays[name][num_tokens:used] = padding
        self._used["token_ids"] = num_tokens
        used = self._used["request_rows"]
        is_less = used > num_requests
        if is_less:
            for name, padding in _PADDING_PER_REQUEST.items():
                self.arrays[name][num_requests:used] = padding
        self._used["request_rows"] = num_requests
        if self._size != (num_tokens, num_requests):
            self.arrays["query_start_loc"][num_requests + 1 :] = num_tokens
            self._size = num_tokens, num_requests

    def wait(self) -> None:
        """There is nothing to wait for."""

    def send(self, num_bytes: int) -> None:
        """There is nothing to copy."""


class _PinnedBuffer(_HostSide):  # pragma: no cover - tests/gpu run it
    """One host side on a GPU: pinned memory, and the event of its last copy."""

    def __init__(self, layout: _Layout, device_buffer: torch.Tensor) -> None:
        self._device_buffer = device_buffer
        self._buffer = torch.zeros(
            layout.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
        )
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        super().__init__(layout, self._buffer)

    def wait(self) -> None:
        """Wait until the last copy from here is done; it is unless the host runs far ahead."""
        self._copied.synchronize()

    def send(self, num_bytes: int) -> None:
        """Enqueue the copy of the first ``num_bytes`` bytes to the device."""
        self._device_buffer[:num_bytes].copy_(self._buffer[:num_bytes], non_blocking=True)
        self._copied.record()
