"""The step's tensors: filled on the host, sent to the device in one copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from mamba_cache._torch import PAD_SLOT_ID, check_device_room, outside_inference_mode
from mamba_cache.cache.sequence import Checkpoint
from mamba_cache.config import CacheConfig
from mamba_cache.context.request_table import RequestTable
from mamba_cache.context.requests import Chunk
from mamba_cache.context.step import DecodeWork
from mamba_cache.metadata import StepMetadata, cut_into_chunks
from mamba_cache.states import CHECKPOINT_FIELDS

__all__ = ["StepBuffers"]

_IntArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_ALIGNMENT_BYTES = 64
_PINNED_BUFFERS = 4
_FEW = 8  # maximum number of rows for which a loop is faster than one array operation
_Fields: TypeAlias = dict[str, tuple[int, tuple[int, ...], torch.dtype]]
"""Of each tensor: its offset in the buffer in bytes, its shape and its dtype."""

_SIDE_BY_SIDE = {
    "tokens": ("token_ids", "positions", "kv_slot_mapping"),
    "requests": ("num_computed_tokens", "seq_lens", "request_rows", "state_rows"),
    "checkpoints": CHECKPOINT_FIELDS,
    "restores": ("restore_sources", "restore_rows"),
    "boundaries": ("boundary_rows", "boundary_slots"),
    "boundaries_by_request": ("boundary_entries", "boundary_positions"),
}
"""Groups of adjacent tensors with equally many entries, which are written or padded together."""

_PADDED = (
    *("tokens", "requests", "decode_state_rows", "chunk_seq_idx", "last_chunk_indices"),
    *("checkpoints", "restores", "boundaries"),
)
"""Groups and tensors that are padded after their entries."""

_PADDINGS = {"tokens": (0, 0, PAD_SLOT_ID), "requests": (0, 0, -1, PAD_SLOT_ID)}
"""Padding values of the tensors of a group; all others are padded with -1."""


class StepBuffers:
    """Step tensors at fixed addresses, written on the host and copied to the device at once.

    All tensors of a ``StepMetadata`` are views of one device allocation. On a GPU the host side is
    a small ring of pinned buffers, so that a step can be written while the previous copy is still
    under way. On the CPU both sides are the same memory.
    """

    @outside_inference_mode
    def __init__(self, table: RequestTable, config: CacheConfig, device: torch.device) -> None:
        self._table = table
        self._block_size = config.block_size_tokens
        self._chunk_size = config.ssm_chunk_size
        self._live_rows = config.live_rows_per_request
        requests, blocks = table.block_tables.shape
        self._numbers = np.arange(blocks * self._block_size)
        chunks = min(config.max_tokens, config.max_tokens // self._chunk_size + 2 * requests)
        counts = {"tokens": config.max_tokens, "checkpoints": config.checkpoints_per_step}
        shapes: dict[str, tuple[int, ...]] = {
            name: (counts.get(group, requests),)
            for group, members in _SIDE_BY_SIDE.items()
            for name in members
        }
        shapes |= {
            "last_chunk_indices": (requests,),
            "query_start_loc": (requests + 1,),
            "cu_chunk_seqlens": (chunks + 1,),
            "chunk_seq_idx": (chunks,),
            "decode_state_rows": (requests, 1 + config.max_decode_tokens),
            # At the buffer's end, because only the rows in use are copied.
            "block_tables": (requests, blocks),
        }
        self._fields: _Fields = {}
        num_bytes = 0
        for name, shape in shapes.items():
            dtype = torch.int64 if name in _SIDE_BY_SIDE["tokens"] else torch.int32
            self._fields[name] = (num_bytes, shape, dtype)
            size = math.prod(shape) * dtype.itemsize
            num_bytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._table_offset, self._row_bytes = self._fields["block_tables"][0], 4 * blocks
        sizes = "max_tokens", "max_requests", "max_sequence_length", "max_checkpoints_per_step"
        check_device_room(num_bytes, {name: getattr(config, name) for name in sizes}, device)
        self._device_buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # By name: the tensors of every step's metadata, which CUDA graphs may read.
        self.tensors = _views(self._fields, self._device_buffer)
        names = StepMetadata.__dataclass_fields__
        self._in_order = [self.tensors[name] for name in names if name in self.tensors]
        hosts = [
            _HostSide(self._fields, self._device_buffer)
            for _ in range(_PINNED_BUFFERS if device.type == "cuda" else 1)
        ]
        self._host_buffers = itertools.cycle(hosts)
        self._cpu_arrays = hosts[0].arrays if device.type == "cpu" else None
        self._last = hosts[0]

    def checkpoint_fields(self, num_checkpoints: int | None) -> tuple[torch.Tensor, ...]:
        """Return the fields of the first checkpoints inside prefill chunks; None: all entries."""
        return tuple([self.tensors[name][:num_checkpoints] for name in CHECKPOINT_FIELDS])

    @property
    def host_arrays(self) -> dict[str, _IntArray]:
        """Tensors of the last step on the host, by name and group; read only before the next."""
        return self._last.arrays

    def entries(self, name: str) -> list[Any]:
        """Return sources and destinations of the last step's "restores" or "boundaries", or [].

        These are views on the device, or on the CPU lists, which are faster to make and read.
        """
        count = self._last.used[_PADDED.index(name)]
        if not count:
            return []
        if self._cpu_arrays is not None:
            return [self._cpu_arrays[each][:count].tolist() for each in _SIDE_BY_SIDE[name]]
        return [  # pragma: no cover - tests/gpu run it
            self.tensors[each][:count] for each in _SIDE_BY_SIDE[name]
        ]

    def fill(
        self, work: DecodeWork, chunks: Sequence[Chunk], saved: Sequence[tuple[int, Checkpoint]]
    ) -> StepMetadata:
        """Write a step's tensors and enqueue their copy to the device.

        The caller has checked that the step fits. ``saved`` has the checkpoints of decoding
        requests, each with the request's place in the batch. The tensors are valid on the current
        stream until the next call.
        """
        host = self._last = next(self._host_buffers)
        if host.copied is not None:
            host.copied.synchronize()  # waits only if the host is several steps ahead
        num_decodes, num_prefills = len(work.group.ids), len(chunks)
        num_decode_tokens = work.num_tokens
        max_decode_len = work.width if num_decodes else 0
        if work.lengths is not None:
            max_decode_len = int(np.maximum.reduce(work.lengths))
        num_requests, bounds = num_decodes + num_prefills, [0]
        max_seq_len = work.longest if num_decodes else 0
        host.arrays["query_start_loc"][0] = 0
        if num_decodes:
            self._fill_decodes(host, work)
        host.rows = work.group.rows
        num_chunks = num_checkpoints = num_restores = num_saved = 0
        if num_prefills:
            bounds, longest = self._fill_prefills(host, chunks, num_decodes, num_decode_tokens)
            max_seq_len = max(max_seq_len, longest)
            num_chunks, num_checkpoints = self._fill_chunks(host, chunks, bounds)
        elif host.used[_PADDED.index("chunk_seq_idx")]:
            host.arrays["cu_chunk_seqlens"].fill(0)
        num_tokens = num_decode_tokens + bounds[-1]
        if num_prefills or saved or host.with_boundaries:
            num_restores, num_saved = self._fill_copies(host, chunks, saved, num_decodes)
        used = [num_tokens, num_requests, num_decodes, num_chunks, num_prefills]  # order of _PADDED
        used += num_checkpoints, num_restores, num_saved
        if used != host.used:
            host.arrays["query_start_loc"][num_requests + 1 :] = num_tokens
            # Entries of the last step after the present ones become padding.
            for name, before, count in zip(_PADDED, host.used, used, strict=True):
                if before > count:
                    host.arrays[name][count:before] = _PADDINGS.get(name, PAD_SLOT_ID)
            host.used = used
        if host.copied is not None:
            num_bytes = self._table_offset + num_requests * self._row_bytes
            self._device_buffer[:num_bytes].copy_(host.buffer[:num_bytes], non_blocking=True)
            host.copied.record()
        return StepMetadata(  # positional arguments take a third of the time
            num_decodes,
            num_prefills,
            num_tokens,
            num_decode_tokens,
            max_decode_len,
            num_chunks,
            self._chunk_size,
            num_checkpoints,
            max_seq_len,
            *self._in_order,
        )

    def _fill_decodes(self, host: _HostSide, work: DecodeWork) -> None:
        """Write tokens, positions, lengths and state rows of decoding requests."""
        arrays, table, rows = host.arrays, self._table, work.group.rows
        count, total, width = len(rows), work.num_tokens, work.width
        is_same = host.rows is rows
        if not is_same:
            live_rows = rows * self._live_rows
            arrays["request_rows"][:count] = rows
            arrays["state_rows"][:count] = live_rows
            arrays["decode_state_rows"][:count] = live_rows[:, None]
        if not is_same or host.stamp != table.stamp:
            self._fill_tables(host, rows)
        lengths: _IntArray | int = width
        if work.lengths is None:
            if not is_same or host.width != width:
                arrays["query_start_loc"][: count + 1] = np.arange(0, total + 1, width)
            host.width = width
        else:
            lengths = work.lengths
            arrays["query_start_loc"][1 : count + 1] = np.cumsum(lengths)
            host.width = -1
        positions, shifts = work.max_starts, table.place_shifts[rows]
        first = arrays["query_start_loc"][:count]
        if total > count:
            # Several times as fast as adding [n, 1] and [width]: numpy's inner loop is longer.
            positions = (positions - first).repeat(lengths)
            positions += np.arange(total)
            shifts = shifts.repeat(lengths)
        places = positions + shifts
        if work.crossing:
            is_crossing = np.zeros(count, dtype=bool)
            is_crossing[work.crossing] = True
            tokens = is_crossing.repeat(lengths).nonzero()[0]
            at = positions[tokens]
            blocks = at // self._block_size
            # (block id - block index) * size + position, in 64 bits: the KV place.
            shifts = table.block_tables[rows.repeat(lengths)[tokens], blocks] - blocks
            places[tokens] = shifts * self._block_size + at
        token_ids = arrays["token_ids"][:total]
        if work.drafts is not None:
            given = np.empty((count, width), dtype=np.int64)
            given[:, 0], given[:, 1:] = table.last_tokens[rows], work.drafts
            token_ids[:] = given.ravel() if work.lengths is None else given[given >= 0]
        elif total > count:  # drafts are on the device, which writes them later
            token_ids[:] = 0
            token_ids[first] = table.last_tokens[rows]
        else:
            token_ids[:] = table.last_tokens[rows]
        arrays["positions"][:total] = positions
        arrays["kv_slot_mapping"][:total] = places
        arrays["num_computed_tokens"][:count] = work.max_starts
        arrays["seq_lens"][:count] = work.ends

    def _fill_prefills(
        self, host: _HostSide, chunks: Sequence[Chunk], index: int, before: int
    ) -> tuple[list[int], int]:
        """Write the same of chunks; return each start and the total, and the longest sequence."""
        arrays, at, size, numbers = host.arrays, host.at, self._block_size, self._numbers
        tables = self._table.block_tables
        end, bounds, longest = before, [0], 0
        for piece in chunks:
            start, length = piece.start, len(piece.token_ids)
            first, end = end, end + length
            arrays["token_ids"][first:end] = piece.token_ids
            arrays["positions"][first:end] = numbers[start : start + length]
            # The tokens are consecutive, so each block is looked up once.
            block, offset = divmod(start, size)
            until = offset + length
            shifts = tables[piece.row, block : block - (-until // size)]
            shifts = (shifts - numbers[: len(shifts)]) * size
            places = arrays["kv_slot_mapping"][first:end]
            np.add(numbers[offset:until], shifts.repeat(size)[offset:until], out=places)
            if piece.first_writable > start:
                places[: piece.first_writable - start] = PAD_SLOT_ID
            at["num_computed_tokens"][index] = start
            at["seq_lens"][index] = start + length
            at["request_rows"][index] = piece.row
            at["state_rows"][index] = piece.row * self._live_rows
            arrays["block_tables"][index] = tables[piece.row]
            host.table_stamps[index] = -1  # written anew in each step: it grows with each chunk
            index += 1
            at["query_start_loc"][index] = end
            bounds.append(end - before)
            longest = max(longest, start + length)
        return bounds, longest

    def _fill_tables(self, host: _HostSide, rows: _IntArray) -> None:
        """Copy the block tables of decoding requests that have changed since this buffer's use."""
        count, tables = len(rows), host.arrays["block_tables"]
        stamps = self._table.table_stamps[rows]
        changed = (host.table_stamps[:count] != stamps).nonzero()[0]
        if len(changed) > _FEW:
            tables[changed] = self._table.block_tables[rows[changed]]
        else:
            for place in changed.tolist():
                tables[place] = self._table.block_tables[rows.item(place)]
        host.table_stamps[:count] = stamps
        host.stamp = self._table.stamp

    def _fill_chunks(
        self, host: _HostSide, pieces: Sequence[Chunk], bounds: list[int]
    ) -> tuple[int, int]:
        """Write SSM chunks and the checkpoints inside prefill chunks; return both numbers."""
        size, arrays = self._chunk_size, host.arrays
        phases = [piece.start % size for piece in pieces]
        last = arrays["last_chunk_indices"]
        out = arrays["cu_chunk_seqlens"], arrays["chunk_seq_idx"], last
        num_chunks = cut_into_chunks(bounds, phases, size, out)
        arrays["cu_chunk_seqlens"][num_chunks + 1 :] = bounds[-1]
        columns = [host.at[name] for name in CHECKPOINT_FIELDS]
        number = 0
        for index, piece in enumerate(pieces):
            first, row = bounds[index], piece.row * self._live_rows
            for position, slot, _ in piece.inside:
                chunk = last.item(index) - (-(-piece.end // size) - position // size)
                values = chunk, first + position - piece.start, first, row, slot
                for column, value in zip(columns, values, strict=True):
                    column[number] = value
                number += 1
        return num_chunks, number

    def _fill_copies(
        self,
        host: _HostSide,
        chunks: Sequence[Chunk],
        saved: Sequence[tuple[int, Checkpoint]],
        num_decodes: int,
    ) -> tuple[int, int]:
        """Write the step's restores, and saves at boundaries; return both numbers."""
        at, num_restores, entries = host.at, 0, [*saved]
        for index, chunk in enumerate(chunks, num_decodes):
            if chunk.is_first:
                at["restore_sources"][num_restores] = chunk.restore_source
                at["restore_rows"][num_restores] = chunk.row * self._live_rows
                num_restores += 1
            if chunk.boundary is not None:
                entries.append((index, chunk.boundary))
        for index in host.with_boundaries:
            at["boundary_entries"][index] = at["boundary_positions"][index] = PAD_SLOT_ID
        host.with_boundaries = [index for index, _ in entries]
        for number, (index, (position, slot, _)) in enumerate(entries):
            at["boundary_entries"][index] = number
            at["boundary_positions"][index] = position
            at["boundary_rows"][number] = at["request_rows"][index] * self._live_rows
            at["boundary_slots"][number] = slot
        return num_restores, len(entries)


def _views(fields: _Fields, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each tensor as a view of ``buffer`` ([num_bytes] uint8)."""
    return {
        name: buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for name, (offset, shape, dtype) in fields.items()
    }


class _HostSide:
    """The host side of the tensors, and the number of entries of its last step.

    On a CPU kernels read this memory. On a GPU the memory is pinned, and an event records the end
    of its last copy.
    """

    def __init__(self, fields: _Fields, device_buffer: torch.Tensor) -> None:
        self.buffer = device_buffer
        self.copied: torch.cuda.Event | None = None
        if device_buffer.is_cuda:  # pragma: no cover - tests/gpu run it
            self.buffer = torch.zeros(
                len(device_buffer), dtype=torch.uint8, device="cpu", pin_memory=True
            )
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        views = _views(fields, self.buffer)
        self.arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in views.items()}
        for name, members in _SIDE_BY_SIDE.items():  # groups as arrays [entries, tensors]
            (start, (count,), dtype), (second, *_) = (fields[each] for each in members[:2])
            rows = self.buffer[start : start + len(members) * (second - start)].view(dtype)
            self.arrays[name] = rows.view(len(members), -1)[:, :count].numpy().T
        # Single elements are written several times faster through memoryviews.
        self.at: dict[str, Any] = {name: self.arrays[name].data for name in views}
        self.with_boundaries: list[int] = []  # places of the last step's requests with boundaries
        self.arrays["boundaries_by_request"].fill(PAD_SLOT_ID)
        self.used = [len(self.arrays[name]) for name in _PADDED]  # numbers of entries
        self.rows: _IntArray | None = None
        self.table_stamps = np.full(len(self.arrays["block_tables"]), -1, dtype=np.int64)
        self.stamp = -1  # of the request table at the last _fill_tables
        self.width = -1  # tokens of each decoding request; -1 if they differ
