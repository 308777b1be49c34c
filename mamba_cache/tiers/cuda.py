"""Copies between a GPU and pinned host memory, by the GPU's copy engines, on separate streams.

Copies run beside a model's forward. So copy engines move the entries, with one copy for each
tensor, and only checksums use multiprocessors. They are computed piece by piece: in a spill while
the piece crosses the link, in a load after the piece has arrived, while the next one crosses.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from mamba_cache._torch import outside_inference_mode
from mamba_cache.states.checksums import CHUNK_BYTES, EntryChecksums
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.memory import Pinner, RowMemory
from mamba_cache.tiers.transfers import CopyJob, Mark, RowLayout

__all__ = ["PIECE_BYTES", "CudaTicket", "CudaTransfers", "cuda_rectangles", "pinner_for"]

PIECE_BYTES = 2**25
"""Maximum size of a piece, unless a single line is longer: 0.6 ms of a PCIe 5 link, and 20 us of a
forward beside it. Kernels that run all the time would slow the forward more. Each piece costs the
link about 4 us."""

_MIN_PIECE_DIVISOR = 8
"""The smallest pieces have 1/n of the bytes of the largest."""

_PORTABLE, _MAPPED = 1, 2  # mapped, because kernels read and write the checksums in rows


def pinner_for(device: torch.device) -> Pinner:  # pragma: no cover - tests/gpu run it
    """Return a pinner of host memory for copies from and to a GPU."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def pin(address: int, num_bytes: int) -> None:
        with torch.cuda.device(device):
            result = runtime.cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)
            torch.cuda.check_error(result)

    def unpin(address: int) -> None:
        torch.cuda.synchronize(device)  # a copy may still be under way
        runtime.cudaHostUnregister(address)

    return Pinner(pin, unpin)


_MAX_PITCH: Final = 2**31 - 1
"""Maximum bytes from line to line in one call of the driver."""

_HOST: Final = 1  # CU_MEMORYTYPE_HOST
_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE


_Rectangles: TypeAlias = Callable[[int, int, int, int, int, int, Any], None]
"""Enqueues a copy of lines in one direction. Arguments: host address and pitch, device address and
pitch, bytes of a line, number of lines, and a stream of the current device. A pitch is above
``_MAX_PITCH`` only if there is one line."""


class _Memcpy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the driver's interface."""

    _fields_ = (
        ("src_x_bytes", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_memory_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x_bytes", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_memory_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@cache
def cuda_rectangles(*, to_device: bool) -> _Rectangles:  # pragma: no cover - tests/gpu run it
    """Return a function that enqueues copies in one direction, by the CUDA driver.

    PyTorch would copy memory with gaps by a kernel and a temporary buffer. The driver's calls
    return at once and keep the GIL: after a release another thread could hold it for milliseconds.
    """
    driver = ctypes.PyDLL("libcuda.so.1")
    address = ctypes.c_uint64
    copy = driver.cuMemcpyHtoDAsync_v2 if to_device else driver.cuMemcpyDtoHAsync_v2
    copy.argtypes = (address, address, ctypes.c_size_t, ctypes.c_void_p)
    copy_lines = driver.cuMemcpy2DAsync_v2
    copy_lines.argtypes = (ctypes.POINTER(_Memcpy2D), ctypes.c_void_p)
    host, device = ("src", "dst") if to_device else ("dst", "src")
    types = {f"{host}_memory_type": _HOST, f"{device}_memory_type": _DEVICE}

    def enqueue(  # noqa: PLR0917
        on_host: int,
        host_pitch: int,
        on_device: int,
        device_pitch: int,
        num_bytes: int,
        num_lines: int,
        stream: Any,
    ) -> None:
        if num_lines == 1:
            both = (on_device, on_host) if to_device else (on_host, on_device)
            result = copy(*both, num_bytes, stream.cuda_stream)
        else:
            places: dict[str, Any] = {
                f"{host}_host": on_host,
                f"{host}_pitch": host_pitch,
                f"{device}_device": on_device,
                f"{device}_pitch": device_pitch,
            }
            lines = _Memcpy2D(width_bytes=num_bytes, height=num_lines, **types, **places)
            result = copy_lines(ctypes.byref(lines), stream.cuda_stream)
        if result:
            raise RuntimeError(
                f"the CUDA driver refuses a copy of {num_lines} x {num_bytes} bytes: error {result}"
            )

    return enqueue


class _Tensor(NamedTuple):
    """A tensor's part of an entry, or the share of it that one copy moves: one line a layer."""

    offset: int  # in a row of host memory, where lines follow each other
    address: int  # of place 0 on the GPU
    step: int  # bytes from place to place on the GPU
    pitch: int  # bytes from line to line on the GPU
    num_bytes: int  # of a line
    lines: range

    def cut(self, lines: slice) -> Iterator[_Tensor]:
        """Cut the tensor's share of the entry's ``lines`` into as few copies as possible."""
        first, stop = max(lines.start, self.lines.start), min(lines.stop, self.lines.stop)
        together = max(1, stop - first) if self.pitch <= _MAX_PITCH else 1
        for line in range(first, stop, together):
            layer = line - self.lines.start
            yield self._replace(
                offset=self.offset + layer * self.num_bytes,
                address=self.address + layer * self.pitch,
                lines=range(line, line + together),
            )


class _Entries:
    """The entries of one kind: their layout on both sides, and their checksum kernels."""

    def __init__(self, layout: RowLayout, memory: RowMemory, **programs: Any) -> None:
        self.memory, self.sums_start = memory, layout.checksums.start
        self.checksums = EntryChecksums(layout.tensors, layout.checksums.start, **programs)
        self._tensors: list[_Tensor] = []
        # Bytes and checksum chunks before each line, and of all lines.
        self._bytes, self._chunks = [0], [0]
        for tensor, part in zip(layout.tensors, layout.parts, strict=True):
            if part.start == part.stop:
                continue
            num_layers, size, first = tensor.shape[0], tensor.element_size(), len(self._bytes) - 1
            line = (part.stop - part.start) // num_layers
            pitch, step = tensor.stride(0) * size, tensor.stride(1) * size
            lines = range(first, first + num_layers)
            each = _Tensor(part.start, tensor.data_ptr(), step, pitch, line, lines)
            self._tensors.append(each)
            for _ in lines:
                self._bytes.append(self._bytes[-1] + line)
                self._chunks.append(self._chunks[-1] + -(-line // CHUNK_BYTES))
        self.num_lines, self.num_bytes = len(self._bytes) - 1, self._bytes[-1]
        self._whole = list(self._rectangles(slice(0, self.num_lines)))

    def copy(
        self,
        copy: _Rectangles,
        jobs: Sequence[CopyJob],
        stream: torch.cuda.Stream,
        lines: slice | None = None,
    ) -> None:
        """Enqueue the copies of entries, or of some lines of each, without their checksums."""
        rectangles = self._whole if lines is None else list(self._rectangles(lines))
        for _, place, row in jobs:
            start = self.memory.address(row)
            for offset, address, step, pitch, num_bytes, its_lines in rectangles:
                on_device = address + place * step
                copy(start + offset, num_bytes, on_device, pitch, num_bytes, len(its_lines), stream)

    def lines_within(self, first: int, num_bytes: int) -> slice:
        """Return the lines from ``first`` on that fit in ``num_bytes``; at least one line."""
        end = bisect_right(self._bytes, self._bytes[first] + num_bytes) - 1
        return slice(first, max(end, first + 1))

    def bytes_of(self, lines: slice) -> int:
        """Return the number of bytes of some lines of one entry."""
        num_bytes: int = self._bytes[lines.stop] - self._bytes[lines.start]
        return num_bytes

    def chunks_of(self, lines: slice) -> slice:
        """Return the checksums of some lines."""
        return slice(self._chunks[lines.start], self._chunks[lines.stop])

    def _rectangles(self, lines: slice) -> Iterator[_Tensor]:
        for tensor in self._tensors:
            yield from tensor.cut(lines)


class CudaTicket:
    """Enqueued copies, whose end an event marks."""

    def __init__(
        self,
        num_bytes: int,
        crossing: tuple[Any, Any],
        ended: Any,
        verdicts: torch.Tensor | None = None,
        order: Sequence[int] = (),
    ) -> None:
        self.num_bytes = num_bytes
        self._crossing, self._ended = crossing, ended
        self._verdicts, self._order = verdicts, order

    def is_done(self) -> bool:
        """Return whether the copies are done, without waiting."""
        done: bool = self._ended.query()
        return done

    def wait(self) -> None:
        """Wait until the copies are done."""
        self._ended.synchronize()

    def damaged(self) -> list[int]:
        """Return the indices of the jobs that were damaged, once the copies are done."""
        if self._verdicts is None:
            return []
        verdicts = self._verdicts.tolist()
        pairs = zip(self._order, verdicts, strict=True)
        return sorted(index for index, is_damaged in pairs if is_damaged)

    def seconds(self) -> float:
        """Return the copies' time on the link, once they are done."""
        begun, ended = self._crossing
        return float(begun.elapsed_time(ended)) / 1e3


class _Piece(NamedTuple):
    """Jobs of one kind; or a share of them with one checksum launch: whole entries, or lines."""

    entries: _Entries
    which: slice
    order: list[int]
    lines: slice | None = None  # None: all
    chunks: slice = slice(0)


def _pieces(groups: Sequence[_Piece], piece_bytes: int) -> Iterator[_Piece]:
    """Cut copies into pieces, smaller ones at the end: a load ends with its last comparison."""
    min_bytes = piece_bytes // _MIN_PIECE_DIVISOR
    left = sum(len(order) * entries.num_bytes for entries, _, order, *_ in groups)
    for entries, which, order, *_ in groups:
        index = line = 0
        while index < len(order):
            max_bytes = max(min_bytes, min(piece_bytes, left // 2))
            count, lines = 1, None
            if not line and entries.num_bytes <= max_bytes:
                count = min(max_bytes // max(entries.num_bytes, 1), len(order) - index)
                chunks, size = slice(0, entries.checksums.num_sums), count * entries.num_bytes
            else:
                lines = entries.lines_within(line, max_bytes)
                chunks, size = entries.chunks_of(lines), entries.bytes_of(lines)
            start, left = which.start + index, left - size
            yield _Piece(
                entries, slice(start, start + count), order[index : index + count], lines, chunks
            )
            line = 0 if lines is None or lines.stop == entries.num_lines else lines.stop
            index += 0 if line else count


class _Direction:
    """One direction of the link."""

    def __init__(self, copy: _Rectangles, device: torch.device) -> None:
        self._copy = copy
        self.copies, self.launches = _stream(device), _stream(device)
        self.events: list[Any] = []

    def copy(self, piece: _Piece, jobs: Sequence[CopyJob]) -> None:
        """Enqueue the copies of a piece."""
        mine = [jobs[index] for index in piece.order]
        piece.entries.copy(self._copy, mine, self.copies, piece.lines)

    def mark(self, index: int) -> None:
        """Record the event of a piece."""
        if index == len(self.events):
            self.events.append(_event())
        self.events[index].record(self.copies)


def _rows(groups: Sequence[_Piece], jobs: Sequence[CopyJob]) -> list[tuple[int, int]]:
    """Return the place of each entry, and the address of its row."""
    return [
        (jobs[index].place, entries.memory.address(jobs[index].row))
        for entries, _, order, *_ in groups
        for index in order
    ]


def _expected(
    groups: Sequence[_Piece], jobs: Sequence[CopyJob], sums: Sequence[torch.Tensor]
) -> list[tuple[int, int]]:
    """Return each entry's place, and the address of a row whose checksums would be in ``sums``."""
    return [
        (jobs[index].place, of_group.data_ptr() + number * of_group[0].nbytes - entries.sums_start)
        for (entries, _, order, *_), of_group in zip(groups, sums, strict=True)
        for number, index in enumerate(order)
    ]


class CudaTransfers:
    """Copies between a GPU and rows of pinned host memory."""

    @outside_inference_mode
    def __init__(
        self,
        layouts: Mapping[EntryKind, RowLayout],
        memory: Mapping[EntryKind, RowMemory],
        device: torch.device,
        *,
        piece_bytes: int = PIECE_BYTES,
        **programs: Any,
    ) -> None:
        self._device, self._piece_bytes = device, piece_bytes
        # States first: their lines are long, and the last comparison should be short.
        self._entries = {
            kind: _Entries(layouts[kind], rows, **programs)
            for kind, rows in sorted(memory.items(), key=lambda each: each[0] is EntryKind.KV)
            if rows.num_rows
        }
        self._spilling = _Direction(cuda_rectangles(to_device=False), device)
        self._loading = _Direction(cuda_rectangles(to_device=True), device)
        self._now, self._summed = _event(), _event()

    def spill(self, jobs: Sequence[CopyJob]) -> CudaTicket:
        """Copy entries to their rows, with their checksums.

        The copies follow the work on the current stream, which does not wait for the copies. When
        they are done, the caller must check that the entries were in their places all the time.
        """
        way, begun = self._spilling, _event(timed=True)
        self._now.record(torch.cuda.current_stream(self._device))
        way.copies.wait_event(self._now)
        begun.record(way.copies)
        groups = self._by_kind(jobs)
        pieces: list[_Piece] = []
        # Cut each piece while earlier ones are copied: the link does not wait for the host.
        for piece in _pieces(groups, self._piece_bytes):
            way.mark(len(pieces))
            way.copy(piece, jobs)
            pieces.append(piece)
        # The link is busy from here on, for longer than it takes to enqueue the kernels.
        with torch.cuda.stream(way.launches):
            table = self._send(_rows(groups, jobs))
            for (entries, which, _, _, chunks), begins in zip(pieces, way.events, strict=False):
                # Each kernel waits for its piece: all at once would stall the forward.
                way.launches.wait_event(begins)
                entries.checksums.measure(table, which, chunks)
        self._summed.record(way.launches)
        way.copies.wait_event(self._summed)
        ended = _event(timed=True)
        ended.record(way.copies)
        return CudaTicket(self._bytes_of(jobs), (begun, ended), ended)

    def load(self, jobs: Sequence[CopyJob]) -> CudaTicket:
        """Copy entries from their rows, and compare them with their checksums.

        The copies follow the work on the current stream. Its later work follows the copies, but not
        the comparison: until that is done, the places must not be written or published.
        """
        way, begun = self._loading, _event(timed=True)
        current = torch.cuda.current_stream(self._device)
        # Earlier work may still use the places that are overwritten.
        self._now.record(current)
        way.copies.wait_event(self._now)
        begun.record(way.copies)
        groups = self._by_kind(jobs)
        pieces: list[_Piece] = []
        table: Any = None
        expected: list[torch.Tensor] = []
        try:
            for piece in _pieces(groups, self._piece_bytes):
                way.copy(piece, jobs)
                if table is None:
                    with torch.cuda.stream(way.launches):
                        expected = [self._new_sums(group) for group in groups]
                    # After the first copies: before them the link would wait for the table, and
                    # after all copies the table would wait for the link.
                    with torch.cuda.stream(way.copies):
                        rows = _rows(groups, jobs)
                        table = self._send(rows + _expected(groups, jobs, expected))
                    _keep_for(table, way.launches)
                way.mark(len(pieces))
                pieces.append(piece)
        finally:
            received = _event(timed=True)
            received.record(way.copies)
            current.wait_event(received)  # after an error as well: some copies are enqueued
        with torch.cuda.stream(way.launches):
            changed = torch.zeros(len(jobs), dtype=torch.int32, device=self._device)
            for (entries, which, _, _, chunks), arrived in zip(pieces, way.events, strict=False):
                way.launches.wait_event(arrived)
                if arrived is way.events[0]:
                    for group, sums in zip(groups, expected, strict=True):
                        group.entries.checksums.fetch(table, sums, group.which)
                entries.checksums.measure(table[len(jobs) :], which, chunks, changed)
            verdicts = _pinned((len(jobs),), torch.int32)
            verdicts.copy_(changed, non_blocking=True)
            ended = _event()
            ended.record(way.launches)
        order = [index for group in groups for index in group.order]
        return CudaTicket(self._bytes_of(jobs), (begun, received), ended, verdicts, order)

    def wait(self) -> None:
        """Wait until all copies are done."""
        for way in (self._spilling, self._loading):
            way.copies.synchronize()
            way.launches.synchronize()

    def mark(self) -> Mark:
        """Mark the present point of the current stream."""
        event = _event(timed=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, begun: Mark, ended: Mark) -> float | None:
        """Return the time between two marks; None if the stream has not reached the second."""
        return float(begun.elapsed_time(ended)) / 1e3 if ended.query() else None

    def _by_kind(self, jobs: Sequence[CopyJob]) -> list[_Piece]:
        """Group jobs by kind."""
        groups: list[_Piece] = []
        first = 0
        for kind, entries in self._entries.items():
            order = [index for index, job in enumerate(jobs) if job.kind is kind]
            if order:
                groups.append(_Piece(entries, slice(first, first + len(order)), order))
                first += len(order)
        return groups

    def _new_sums(self, group: _Piece) -> torch.Tensor:
        shape = len(group.order), group.entries.checksums.num_sums
        return torch.empty(shape, dtype=torch.int64, device=self._device)

    def _send(self, table: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Send pairs of numbers to the GPU on the current stream, without waiting."""
        sent = _pinned((len(table), 2), torch.int64)
        sent.numpy()[:] = table
        return sent.to(self._device, non_blocking=True)

    def _bytes_of(self, jobs: Sequence[CopyJob]) -> int:
        return sum(self._entries[job.kind].memory.row_bytes for job in jobs)


def _keep_for(tensor: torch.Tensor, stream: Any) -> None:  # pragma: no cover - tests/gpu run it
    """Keep a tensor's memory from reuse until the present work of a stream is done."""
    tensor.record_stream(stream)


def _pinned(  # pragma: no cover - tests/gpu run it
    shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return pinned host memory, which is not reused before its copies are done."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True, device="cpu")


def _event(*, timed: bool = False) -> Any:  # pragma: no cover - tests/gpu run it
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:  # pragma: no cover - tests/gpu run it
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
