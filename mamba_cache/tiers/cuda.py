"""Copies between a GPU and pinned host memory: gathered, summed and moved on streams of their own.

An entry's tensors are gathered into one staging row by the kernel that copies states anywhere else,
its checksums are computed beside it, and the row crosses the link in one copy; a load goes the same
way back. With two groups of staging rows in each direction one is filled while the other is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.states import StateCopier
from mamba_cache.states.checksums import RowChecksums
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.memory import Pinner, RowMemory
from mamba_cache.tiers.transfers import CopyJob, Mark, RowLayout, Ticket

__all__ = ["CudaTransfers", "pinner_for"]

_GROUPS = 2
_GROUP_BYTES = 2**25
_MOST_ROWS = 16
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


class _Staging:
    """Rows on the GPU through which entries of one kind pass in one direction.

    Args:
        layout: How entries lie in rows.
        device: The GPU.
    """

    def __init__(self, layout: RowLayout, device: torch.device) -> None:
        self.layout = layout
        self.rows_per_group = max(1, min(_MOST_ROWS, _GROUP_BYTES // layout.row_bytes))
        shape = _GROUPS * self.rows_per_group, layout.row_bytes
        self.rows = torch.zeros(shape, dtype=torch.uint8, device=device)
        views = layout.views(self.rows)
        self.gather = StateCopier(layout.tensors, views)
        self.scatter = StateCopier(views, layout.tensors)
        self.sums = RowChecksums(
            [row[: layout.payload_bytes] for row in self.rows],
            [row[layout.checksums].view(torch.int64) for row in self.rows],
        )
        numbers = torch.arange(len(self.rows), dtype=torch.int32, device=device)
        self.row_numbers = torch.split(numbers, self.rows_per_group)
        # When the rows of each group may be filled again.
        self.is_free = [_event() for _ in range(_GROUPS)]
        self.is_full = [_event() for _ in range(_GROUPS)]
        self._turn = 0

    def next_group(self) -> int:
        """Return the group whose turn it is."""
        self._turn = (self._turn + 1) % _GROUPS
        return self._turn

    def rows_of(self, group: int, count: int) -> list[int]:
        """Return the first rows of a group."""
        first = group * self.rows_per_group
        return list(range(first, first + count))


class _CudaTicket:
    """Copies that end with an event.

    Args:
        num_bytes: Of all of them.
        crossing: When they began to cross the link, and when the last one had.
        ended: When nothing of them is left to do.
        verdicts: [n] int32, pinned: 1 for each that brought other bytes than were written.
    """

    def __init__(
        self, num_bytes: int, crossing: tuple[Any, Any], ended: Any, verdicts: torch.Tensor
    ) -> None:
        self.num_bytes = num_bytes
        self._crossing, self._ended, self._verdicts = crossing, ended, verdicts

    def is_done(self) -> bool:
        """Say whether they are over; waits for nothing."""
        done: bool = self._ended.query()
        return done

    def wait(self) -> None:
        """Wait until they are over."""
        self._ended.synchronize()

    def damaged(self) -> list[int]:
        """Once they are over: which brought other bytes than were written."""
        damaged: list[int] = self._verdicts.nonzero().flatten().tolist()
        return damaged

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
    """

    @outside_inference_mode
    def __init__(
        self,
        layouts: Mapping[EntryKind, RowLayout],
        memory: Mapping[EntryKind, RowMemory],
        device: torch.device,
    ) -> None:
        self._memory, self._device = memory, device
        used = {kind: layout for kind, layout in layouts.items() if memory[kind].num_rows}
        self._spills = {kind: _Staging(layout, device) for kind, layout in used.items()}
        self._loads = {kind: _Staging(layout, device) for kind, layout in used.items()}
        # Kernels and copies of each direction, so that one row's kernels run beside the next copy.
        self._gathering, self._sending = _stream(device), _stream(device)
        self._receiving, self._scattering = _stream(device), _stream(device)
        self._now = _event()

    def spill(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries to their rows, and their checksums with them."""
        self._now.record(torch.cuda.current_stream(self._device))
        self._gathering.wait_event(self._now)
        begun, ended = _event(timed=True), _event(timed=True)
        begun.record(self._sending)
        num_bytes = 0
        for staging, memory, part in self._parts(self._spills, jobs):
            group = staging.next_group()
            rows = staging.rows_of(group, len(part))
            with torch.cuda.stream(self._gathering):
                places = self._places(part)
                self._gathering.wait_event(staging.is_free[group])
                staging.gather.copy(places, staging.row_numbers[group][: len(part)])
                for row in rows:
                    staging.sums.write(row)
                staging.is_full[group].record(self._gathering)
            with torch.cuda.stream(self._sending):
                self._sending.wait_event(staging.is_full[group])
                for row, (_, job) in zip(rows, part, strict=True):
                    memory.row(job.row).copy_(staging.rows[row], non_blocking=True)
                staging.is_free[group].record(self._sending)
            num_bytes += len(part) * memory.row_bytes
        ended.record(self._sending)
        return _CudaTicket(num_bytes, (begun, ended), ended, torch.zeros(0, dtype=torch.int32))

    def load(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries from their rows, and compare them with their checksums."""
        current = torch.cuda.current_stream(self._device)
        self._now.record(current)
        # What is overwritten may still be in use; host rows are nobody's but the copies'.
        self._scattering.wait_event(self._now)
        begun, received, ended = _event(timed=True), _event(timed=True), _event()
        begun.record(self._receiving)
        num_bytes = 0
        try:
            with torch.cuda.stream(self._scattering):
                changed = torch.zeros(len(jobs), dtype=torch.int32, device=self._device)
                verdicts = _pinned(len(jobs))
            for staging, memory, part in self._parts(self._loads, jobs):
                group = staging.next_group()
                rows = staging.rows_of(group, len(part))
                with torch.cuda.stream(self._receiving):
                    self._receiving.wait_event(staging.is_free[group])
                    for row, (_, job) in zip(rows, part, strict=True):
                        staging.rows[row].copy_(memory.row(job.row), non_blocking=True)
                    staging.is_full[group].record(self._receiving)
                    received.record(self._receiving)
                with torch.cuda.stream(self._scattering):
                    places = self._places(part)
                    self._scattering.wait_event(staging.is_full[group])
                    for row, (index, _) in zip(rows, part, strict=True):
                        staging.sums.compare(row, changed[index : index + 1])
                    staging.scatter.copy(staging.row_numbers[group][: len(part)], places)
                    staging.is_free[group].record(self._scattering)
                num_bytes += len(part) * memory.row_bytes
            with torch.cuda.stream(self._scattering):
                verdicts.copy_(changed, non_blocking=True)
        finally:
            ended.record(self._scattering)
            current.wait_event(ended)  # whatever came of it, what is there is over by then
        return _CudaTicket(num_bytes, (begun, received), ended, verdicts)

    def wait(self) -> None:
        """Wait until all copies are over."""
        for stream in (self._gathering, self._sending, self._receiving, self._scattering):
            stream.synchronize()

    def scrub(self) -> None:
        """Zero the staging rows; the copies are over."""
        for staging in (*self._spills.values(), *self._loads.values()):
            staging.rows.zero_()
        self._now.record(torch.cuda.current_stream(self._device))
        self._gathering.wait_event(self._now)
        self._receiving.wait_event(self._now)

    def mark(self) -> Mark:
        """Mark the present moment in the order of what is enqueued on the current stream."""
        event = _event(timed=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, begun: Mark, ended: Mark) -> float | None:
        """Return the time between two moments; None if the second one is still to come."""
        return float(begun.elapsed_time(ended)) / 1e3 if ended.query() else None

    def _places(self, part: Sequence[tuple[int, CopyJob]]) -> torch.Tensor:
        """Send slots or blocks to the GPU on the current stream, without waiting."""
        sent = _pinned(len(part))
        sent.numpy()[:] = [job.place for _, job in part]
        return sent.to(self._device, non_blocking=True)

    def _parts(
        self, stagings: Mapping[EntryKind, _Staging], jobs: Sequence[CopyJob]
    ) -> Iterator[tuple[_Staging, RowMemory, list[tuple[int, CopyJob]]]]:
        """Divide jobs into what fits into a group of staging rows; with their numbers."""
        for kind, staging in stagings.items():
            mine = [(index, job) for index, job in enumerate(jobs) if job.kind is kind]
            for first in range(0, len(mine), staging.rows_per_group):
                part = mine[first : first + staging.rows_per_group]
                yield staging, self._memory[kind], part


def _pinned(count: int) -> torch.Tensor:  # pragma: no cover - tests/gpu run it
    """Return [count] int32 on the host, which nobody else is given before copies of it are over."""
    return torch.empty(count, dtype=torch.int32, pin_memory=True, device="cpu")


def _event(*, timed: bool = False) -> Any:  # pragma: no cover - tests/gpu run it
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:  # pragma: no cover - tests/gpu run it
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
