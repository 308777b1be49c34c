"""Copies between a GPU and pinned host memory, by its copy engines, on streams of their own.

What is spilled runs beside a model's forward. So copy engines move it, from where it lies to its
row, and only its checksums take multiprocessors, a few of them.

What is loaded a forward waits for. One kernel reads it from the row, across the link, compares it
as it comes, and writes it where it belongs: there is one call however many parts an entry has,
nothing is read twice, and all is verified when it has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.states.checksums import EntryChecksums
from mamba_cache.tiers.dma import MOST_PITCH, Rectangles, cuda_rectangles
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.memory import Pinner, RowMemory
from mamba_cache.tiers.transfers import CopyJob, Mark, RowLayout, Ticket

__all__ = ["CudaTransfers", "pinner_for"]

_PORTABLE, _MAPPED = 1, 2


def pinner_for(device: torch.device) -> Pinner:  # pragma: no cover - tests/gpu run it
    """Return what pins memory for copies from and to a GPU."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def pin(address: int, num_bytes: int) -> None:
        with torch.cuda.device(device):
            result = runtime.cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)
            torch.cuda.check_error(result)

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


class _Entries:
    """The entries of one kind: where they lie on both sides, and what measures them.

    Args:
        layout: How they lie in rows.
        memory: The rows.
        **programs: How many a launch has: options of ``EntryChecksums``.
    """

    def __init__(self, layout: RowLayout, memory: RowMemory, **programs: Any) -> None:
        self.memory = memory
        starts = [part.start for part in layout.parts]
        sums_start = layout.checksums.start
        self.checksums = EntryChecksums(layout.tensors, starts, sums_start, **programs)
        self._rectangles = list(_rectangles(layout))

    def copy(self, copy: Rectangles, jobs: Sequence[CopyJob], stream: torch.cuda.Stream) -> None:
        """Enqueue the copies of entries, without their checksums."""
        for _, place, row in jobs:
            start = self.memory.address(row)
            for offset, address, step, pitch, num_bytes, num_lines in self._rectangles:
                on_device = address + place * step
                copy(start + offset, num_bytes, on_device, pitch, num_bytes, num_lines, stream)


def _rectangles(layout: RowLayout) -> Iterator[_Rectangle]:
    """Cut an entry into as few copies as may be."""
    for tensor, part in zip(layout.tensors, layout.parts, strict=True):
        num_layers, size = tensor.shape[0], tensor.element_size()
        pitch, step = tensor.stride(0) * size, tensor.stride(1) * size
        line = (part.stop - part.start) // max(num_layers, 1)
        together = num_layers if pitch <= MOST_PITCH else 1
        for layer in range(0, num_layers if line else 0, together):
            yield _Rectangle(
                offset=part.start + layer * line,
                address=tensor.data_ptr() + layer * pitch,
                step=step,
                pitch=pitch,
                num_bytes=line,
                num_lines=together,
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


class _Group(NamedTuple):
    """Jobs of one kind.

    Attributes:
        entries: Their kind's.
        which: Where they stand in what a launch is given.
        order: Which of all jobs they are.
    """

    entries: _Entries
    which: slice
    order: list[int]


class CudaTransfers:
    """Copies between a GPU and rows of pinned host memory.

    Args:
        layouts: How the entries of each kind lie in rows.
        memory: The rows of each kind.
        device: The GPU.
        **programs: How many a launch has: options of ``EntryChecksums``.
    """

    @outside_inference_mode
    def __init__(
        self,
        layouts: Mapping[EntryKind, RowLayout],
        memory: Mapping[EntryKind, RowMemory],
        device: torch.device,
        **programs: Any,
    ) -> None:
        self._device = device
        self._entries = {
            kind: _Entries(layouts[kind], rows, **programs)
            for kind, rows in memory.items()
            if rows.num_rows
        }
        self._to_host = cuda_rectangles(to_device=False)
        # The copies of each direction, and the launches beside those to the host.
        self._sending, self._summing = _stream(device), _stream(device)
        self._receiving = _stream(device)
        self._now, self._summed = _event(), _event()

    def spill(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries to their rows, and their checksums with them."""
        begun, ended = _event(timed=True), _event(timed=True)
        self._now.record(torch.cuda.current_stream(self._device))
        self._sending.wait_event(self._now)
        begun.record(self._sending)
        groups = self._by_kind(jobs)
        for entries, _, order in groups:
            entries.copy(self._to_host, [jobs[index] for index in order], self._sending)
        # The link is busy from here on; what else there is to enqueue takes less.
        self._summing.wait_event(self._now)
        with torch.cuda.stream(self._summing):
            table = self._table(groups, jobs)
            for entries, which, _ in groups:
                entries.checksums.write(table, which)
        self._summed.record(self._summing)
        self._sending.wait_event(self._summed)
        ended.record(self._sending)
        return _CudaTicket(self._bytes_of(jobs), (begun, ended), ended)

    def load(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries from their rows, and compare them with their checksums."""
        begun, received, ended = _event(timed=True), _event(timed=True), _event(timed=True)
        current = torch.cuda.current_stream(self._device)
        # What is overwritten may still be in use.
        self._now.record(current)
        self._receiving.wait_event(self._now)
        groups = self._by_kind(jobs)
        with torch.cuda.stream(self._receiving):
            begun.record(self._receiving)
            table = self._table(groups, jobs)
            changed = torch.zeros(len(jobs), dtype=torch.int32, device=self._device)
            try:
                for entries, which, _ in groups:
                    entries.checksums.bring(table, changed, which)
            finally:
                received.record(self._receiving)
                current.wait_event(received)  # whatever came of it, it is over by then
            verdicts = _pinned((len(jobs),), torch.int32)
            verdicts.copy_(changed, non_blocking=True)
            ended.record(self._receiving)
        order = [index for _, _, each in groups for index in each]
        return _CudaTicket(self._bytes_of(jobs), (begun, received), ended, verdicts, order)

    def wait(self) -> None:
        """Wait until all copies are over."""
        for stream in (self._sending, self._summing, self._receiving):
            stream.synchronize()

    def mark(self) -> Mark:
        """Mark the present moment in the order of what is enqueued on the current stream."""
        event = _event(timed=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, begun: Mark, ended: Mark) -> float | None:
        """Return the time between two moments; None if the second one is still to come."""
        return float(begun.elapsed_time(ended)) / 1e3 if ended.query() else None

    def _by_kind(self, jobs: Sequence[CopyJob]) -> list[_Group]:
        """Put jobs of a kind together."""
        groups: list[_Group] = []
        first = 0
        for kind, entries in self._entries.items():
            order = [index for index, job in enumerate(jobs) if job.kind is kind]
            if order:
                groups.append(_Group(entries, slice(first, first + len(order)), order))
                first += len(order)
        return groups

    def _table(self, groups: Sequence[_Group], jobs: Sequence[CopyJob]) -> torch.Tensor:
        """Send places and rows to the GPU on the current stream, without waiting."""
        values = [
            (jobs[index].place, entries.memory.address(jobs[index].row))
            for entries, _, order in groups
            for index in order
        ]
        sent = _pinned((len(values), 2), torch.int64)
        sent.numpy()[:] = values
        return sent.to(self._device, non_blocking=True)

    def _bytes_of(self, jobs: Sequence[CopyJob]) -> int:
        return sum(self._entries[job.kind].memory.row_bytes for job in jobs)


def _pinned(  # pragma: no cover - tests/gpu run it
    shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return memory of the host, which nobody else is given before copies of it are over."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True, device="cpu")


def _event(*, timed: bool = False) -> Any:  # pragma: no cover - tests/gpu run it
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:  # pragma: no cover - tests/gpu run it
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
