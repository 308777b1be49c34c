"""Copies between a GPU and pinned host memory, by its copy engines, on streams of their own.

An entry's tensors cross the link from where they lie to where they belong, without a kernel and
without memory between. So a byte costs the GPU's memory one access for the copy and one for its
checksum, and only this takes multiprocessors, a few of them. A load is cut into pieces: one is
compared while the next one crosses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.states.checksums import EntryChecksums
from mamba_cache.states.kernels.checksum_plan import CHUNK_BYTES, ENTRY_PROGRAMS
from mamba_cache.tiers.dma import MOST_PITCH, Rectangles, cuda_rectangles
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.memory import Pinner, RowMemory
from mamba_cache.tiers.transfers import CopyJob, Mark, RowLayout, Ticket

__all__ = ["PIECE_BYTES", "CudaTransfers", "pinner_for"]

PIECE_BYTES = 2**24
"""What is compared at once: 0.3 ms of a PCIe 5 link, beside 20 us of host time for each piece."""

_PORTABLE = 1


def pinner_for(device: torch.device) -> Pinner:  # pragma: no cover - tests/gpu run it
    """Return what pins memory for copies from and to a GPU."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def pin(address: int, num_bytes: int) -> None:
        with torch.cuda.device(device):
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))

    def unpin(address: int) -> None:
        torch.cuda.synchronize(device)  # a copy may still be under way
        runtime.cudaHostUnregister(address)

    return Pinner(pin, unpin)


class _Rectangle(NamedTuple):
    """Bytes of an entry that cross the link in one copy.

    Attributes:
        offset: Where they begin in a row of host memory.
        address: Where they begin in place 0 on the GPU.
        step: Bytes from place to place there.
        pitch: Bytes from line to line there; in a row the lines lie behind each other.
        num_bytes: Of a line.
        num_lines: Lines.
    """

    offset: int
    address: int
    step: int
    pitch: int
    num_bytes: int
    num_lines: int


class _Piece(NamedTuple):
    """A part of an entry that is compared at once.

    Attributes:
        rectangles: Where it lies.
        chunks: Which of the entry's checksums are of it.
    """

    rectangles: list[_Rectangle]
    chunks: slice


class _Entries:
    """The entries of one kind: where they lie on both sides, and what measures them.

    Args:
        layout: How they lie in rows.
        memory: The rows.
        piece_bytes: At most so much is a piece; a multiple of a checksum's chunk.
        programs: Of a launch that measures.
    """

    def __init__(
        self, layout: RowLayout, memory: RowMemory, *, piece_bytes: int, programs: int
    ) -> None:
        self.layout, self.memory = layout, memory
        self.checksums = EntryChecksums(layout.tensors, programs=programs)
        self.pieces = list(_pieces(layout, piece_bytes))
        self._at_once = max(1, piece_bytes // layout.payload_bytes)

    def portions(self, count: int) -> Iterator[tuple[slice, _Piece]]:
        """Divide ``count`` entries into what is compared at once: a piece of some of them."""
        for first in range(0, count, self._at_once):
            for piece in self.pieces:
                yield slice(first, min(count, first + self._at_once)), piece

    def copy(
        self, copy: Rectangles, jobs: Sequence[CopyJob], piece: _Piece, stream: torch.cuda.Stream
    ) -> None:
        """Enqueue the copies of a piece of some entries."""
        for _, place, row in jobs:
            start = self.memory.address(row)
            for offset, address, step, pitch, num_bytes, num_lines in piece.rectangles:
                on_device = address + place * step
                copy(start + offset, num_bytes, on_device, pitch, num_bytes, num_lines, stream)

    def copy_sums(
        self,
        copy: Rectangles,
        jobs: Sequence[CopyJob],
        sums: torch.Tensor,
        stream: torch.cuda.Stream,
    ) -> None:
        """Enqueue the copies of the checksums of entries: at once where their rows follow.

        Args:
            copy: The direction.
            jobs: The entries, by row.
            sums: [n, num_sums] int64 on the GPU.
            stream: The stream.
        """
        size = 8 * self.checksums.num_sums
        for first, end in _runs(jobs, self.memory.rows_per_slab):
            on_host = self.memory.address(jobs[first].row) + self.layout.checksums.start
            on_device = sums.data_ptr() + first * size
            copy(on_host, self.memory.row_bytes, on_device, size, size, end - first, stream)


def _runs(jobs: Sequence[CopyJob], rows_per_slab: int) -> Iterator[tuple[int, int]]:
    """Find jobs whose rows lie behind each other in one slab: from the first one to the end."""
    first = 0
    for end in range(1, len(jobs) + 1):
        row = jobs[end - 1].row + 1
        if end == len(jobs) or jobs[end].row != row or row % rows_per_slab == 0:
            yield first, end
            first = end


def _pieces(layout: RowLayout, piece_bytes: int) -> Iterator[_Piece]:
    """Cut an entry into pieces, in the order of its checksums."""
    rectangles: list[_Rectangle] = []
    size = first = end = 0
    for rectangle in _rectangles(layout, piece_bytes):
        num_bytes = rectangle.num_bytes * rectangle.num_lines
        if rectangles and size + num_bytes > piece_bytes:
            yield _Piece(rectangles, slice(first, end))
            rectangles, size, first = [], 0, end
        rectangles.append(rectangle)
        size += num_bytes
        end += rectangle.num_lines * -(-rectangle.num_bytes // CHUNK_BYTES)
    yield _Piece(rectangles, slice(first, end))


def _rectangles(layout: RowLayout, piece_bytes: int) -> Iterator[_Rectangle]:
    """Cut an entry into as few copies as may be, none of which is longer than a piece."""
    for tensor, part in zip(layout.tensors, layout.parts, strict=True):
        num_layers, size = tensor.shape[0], tensor.element_size()
        pitch, step = tensor.stride(0) * size, tensor.stride(1) * size
        line = (part.stop - part.start) // max(num_layers, 1)
        together = max(1, piece_bytes // line) if line and pitch <= MOST_PITCH else 1
        for layer in range(0, num_layers, together):
            num_lines = min(together, num_layers - layer)
            for start in range(0, line, piece_bytes):
                yield _Rectangle(
                    offset=part.start + layer * line + start,
                    address=tensor.data_ptr() + layer * pitch + start,
                    step=step,
                    pitch=pitch,
                    num_bytes=min(piece_bytes, line - start),
                    num_lines=num_lines,
                )


class _CudaTicket:
    """Copies that end with an event.

    Args:
        num_bytes: Of all of them.
        crossing: When they began to cross the link, and when the last one had.
        ended: When nothing of them is left to do.
        verdicts: [n] int32, pinned: not 0 for each that brought other bytes than were written.
        order: Which copy each of these is of.
    """

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
        """Say whether they are over; waits for nothing."""
        done: bool = self._ended.query()
        return done

    def wait(self) -> None:
        """Wait until they are over."""
        self._ended.synchronize()

    def damaged(self) -> list[int]:
        """Once they are over: which brought other bytes than were written."""
        if self._verdicts is None:
            return []
        verdicts = self._verdicts.tolist()
        pairs = zip(self._order, verdicts, strict=True)
        return sorted(index for index, is_damaged in pairs if is_damaged)

    def seconds(self) -> float:
        """Once they are over: how long they took to cross the link."""
        begun, ended = self._crossing
        return float(begun.elapsed_time(ended)) / 1e3


class CudaTransfers:
    """Copies between a GPU and rows of pinned host memory.

    Args:
        layouts: How the entries of each kind lie in rows.
        memory: The rows of each kind.
        device: The GPU.
        piece_bytes: What of a load is compared at once; a multiple of 64 KiB.
        programs: Of a launch that computes checksums.
    """

    @outside_inference_mode
    def __init__(
        self,
        layouts: Mapping[EntryKind, RowLayout],
        memory: Mapping[EntryKind, RowMemory],
        device: torch.device,
        *,
        piece_bytes: int = PIECE_BYTES,
        programs: int = ENTRY_PROGRAMS,
    ) -> None:
        self._device = device
        # States first: what is compared last, when all has crossed, should be little.
        self._entries = {
            kind: _Entries(layouts[kind], rows, piece_bytes=piece_bytes, programs=programs)
            for kind, rows in sorted(memory.items(), key=lambda each: each[0] is EntryKind.KV)
            if rows.num_rows
        }
        self._to_host = cuda_rectangles(to_device=False)
        self._to_device = cuda_rectangles(to_device=True)
        # The copies of each direction, and the launches beside them.
        self._sending, self._summing = _stream(device), _stream(device)
        self._receiving, self._comparing = _stream(device), _stream(device)
        self._now, self._handed = _event(), _event()

    def spill(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries to their rows, and their checksums with them."""
        begun, ended = _event(timed=True), _event(timed=True)
        self._now.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._summing):
            self._sending.wait_event(self._now)
            begun.record(self._sending)
            sorted_jobs = list(self._by_kind(jobs))
            for entries, numbered in sorted_jobs:
                mine = [job for _, job in numbered]
                for piece in entries.pieces:
                    entries.copy(self._to_host, mine, piece, self._sending)
            self._summing.wait_event(self._now)
            for entries, numbered in sorted_jobs:
                mine = [job for _, job in numbered]
                sums = self._empty_sums(entries, mine)
                entries.checksums.write(self._places(mine), sums)
                self._handed.record(self._summing)
                self._sending.wait_event(self._handed)
                entries.copy_sums(self._to_host, mine, sums, self._sending)
                _keep_for(sums, self._sending)
            ended.record(self._sending)
        return _CudaTicket(self._bytes_of(jobs), (begun, ended), ended)

    def load(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries from their rows, and compare them with their checksums."""
        begun, received, ended = _event(timed=True), _event(timed=True), _event(timed=True)
        current = torch.cuda.current_stream(self._device)
        # What is overwritten may still be in use.
        self._now.record(current)
        order: list[int] = []
        changed = []
        try:
            with torch.cuda.stream(self._receiving):
                self._receiving.wait_event(self._now)
                begun.record(self._receiving)
                for entries, numbered in self._by_kind(jobs):
                    order += [index for index, _ in numbered]
                    changed.append(self._load(entries, [job for _, job in numbered]))
            with torch.cuda.stream(self._comparing):
                verdicts = _pinned(len(order))
                verdicts.copy_(torch.cat(changed), non_blocking=True)
        finally:
            received.record(self._receiving)
            ended.record(self._comparing)
            current.wait_event(received)  # whatever came of it, what is there is over by then
        return _CudaTicket(self._bytes_of(jobs), (begun, received), ended, verdicts, order)

    def _load(self, entries: _Entries, jobs: Sequence[CopyJob]) -> torch.Tensor:
        """Enqueue the loads of one kind, on the stream that receives; return what is changed."""
        (which, piece), *others = entries.portions(len(jobs))
        entries.copy(self._to_device, jobs[which], piece, self._receiving)
        # Behind the first copies, which cross the link while the host sees to all else.
        places, sums = self._places(jobs), self._empty_sums(entries, jobs)
        entries.copy_sums(self._to_device, jobs, sums, self._receiving)
        with torch.cuda.stream(self._comparing):
            changed = torch.zeros(len(jobs), dtype=torch.int32, device=self._device)
        compare = partial(self._compare, entries.checksums, places, sums, changed)
        compare(which, piece.chunks)
        for which, piece in others:
            entries.copy(self._to_device, jobs[which], piece, self._receiving)
            compare(which, piece.chunks)
        _keep_for(places, self._comparing)
        _keep_for(sums, self._comparing)
        return changed

    def _compare(self, checksums: EntryChecksums, *arguments: Any) -> None:
        """Enqueue a comparison of what has been received."""
        self._handed.record(self._receiving)
        self._comparing.wait_event(self._handed)
        with torch.cuda.stream(self._comparing):
            checksums.compare(*arguments)

    def wait(self) -> None:
        """Wait until all copies are over."""
        for stream in (self._sending, self._summing, self._receiving, self._comparing):
            stream.synchronize()

    def mark(self) -> Mark:
        """Mark the present moment in the order of what is enqueued on the current stream."""
        event = _event(timed=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, begun: Mark, ended: Mark) -> float | None:
        """Return the time between two moments; None if the second one is still to come."""
        return float(begun.elapsed_time(ended)) / 1e3 if ended.query() else None

    def _by_kind(
        self, jobs: Sequence[CopyJob]
    ) -> Iterator[tuple[_Entries, list[tuple[int, CopyJob]]]]:
        """Yield the jobs of each kind with their numbers, by row: rows that follow share copies."""
        for kind, entries in self._entries.items():
            mine = [(index, job) for index, job in enumerate(jobs) if job.kind is kind]
            if mine:
                yield entries, sorted(mine, key=lambda each: each[1].row)

    def _places(self, jobs: Sequence[CopyJob]) -> torch.Tensor:
        """Send slots or blocks to the GPU on the current stream, without waiting."""
        sent = _pinned(len(jobs))
        sent.numpy()[:] = [job.place for job in jobs]
        return sent.to(self._device, non_blocking=True)

    def _empty_sums(self, entries: _Entries, jobs: Sequence[CopyJob]) -> torch.Tensor:
        shape = len(jobs), entries.checksums.num_sums
        return torch.empty(shape, dtype=torch.int64, device=self._device)

    def _bytes_of(self, jobs: Sequence[CopyJob]) -> int:
        return sum(self._entries[job.kind].memory.row_bytes for job in jobs)


def _keep_for(tensor: torch.Tensor, stream: Any) -> None:  # pragma: no cover - tests/gpu run it
    """Have the memory of a tensor given to nobody else before a stream's present work is over."""
    tensor.record_stream(stream)


def _pinned(count: int) -> torch.Tensor:  # pragma: no cover - tests/gpu run it
    """Return [count] int32 on the host, which nobody else is given before copies of it are over."""
    return torch.empty(count, dtype=torch.int32, pin_memory=True, device="cpu")


def _event(*, timed: bool = False) -> Any:  # pragma: no cover - tests/gpu run it
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:  # pragma: no cover - tests/gpu run it
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
