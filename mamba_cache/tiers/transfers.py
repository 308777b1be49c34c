"""Copies between the GPU's memory and rows of host memory, with checksums to verify them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from mamba_cache.states.checksums import EntryChecksums
from mamba_cache.tiers.entry import EntryKind, payload_digest
from mamba_cache.tiers.memory import ROW_ALIGNMENT, RowMemory

__all__ = ["CopyJob", "Mark", "PlainTicket", "PlainTransfers", "RowLayout"]

Mark: TypeAlias = Any
"""A point in the order of enqueued work, made by ``mark`` of the transfers."""

_PART_ALIGNMENT = 256
_DIGEST_BYTES = 16


class CopyJob(NamedTuple):
    """One entry to copy."""

    kind: EntryKind
    place: int  # the entry's slot or KV block
    row: int


class RowLayout:
    """Layout of the tensors of one slot or one KV block in a row of bytes.

    The tensors follow one another, each whole; then come the checksums of all tensors, then padding
    up to a multiple of ``ROW_ALIGNMENT``.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, sums_chunks: bool = False) -> None:
        self.tensors = list(tensors)  # each [num_layers, places, *inner], inner axes contiguous
        self.parts: list[slice] = []
        end = 0
        for tensor in self.tensors:
            num_elements = tensor.shape[0] * math.prod(tensor.shape[2:])
            size = num_elements * tensor.element_size()
            self.parts.append(slice(end, end + size))
            end += -(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT
        self.payload_bytes = end
        size = 8 * EntryChecksums.count(self.tensors) if sums_chunks else _DIGEST_BYTES
        self.checksums = slice(end, end + size)
        self.row_bytes = -(-self.checksums.stop // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return rows, [n, row_bytes] uint8, as tensors like those of the layout."""
        views = []
        for tensor, part in zip(self.tensors, self.parts, strict=True):
            shape = tensor.shape[0], *tensor.shape[2:]
            values = rows[:, part].view(tensor.dtype)
            views.append(torch.unflatten(values, 1, shape).transpose(0, 1))
        return views


class PlainTicket:
    """Copies that were done when their call returned."""

    def __init__(self, num_bytes: int, seconds: float, damaged: Sequence[int] = ()) -> None:
        self.num_bytes = num_bytes
        self._seconds, self._damaged = seconds, list(damaged)

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Do nothing."""

    def damaged(self) -> list[int]:
        """Return the indices of the jobs that were damaged."""
        return self._damaged

    def seconds(self) -> float:
        """Return the duration of the copies."""
        return self._seconds


class PlainTransfers:
    """Copies for tensors that are in host memory themselves: done when a call returns."""

    def __init__(
        self, layouts: Mapping[EntryKind, RowLayout], memory: Mapping[EntryKind, RowMemory]
    ) -> None:
        self._layouts, self._memory = layouts, memory

    def spill(self, jobs: Sequence[CopyJob]) -> PlainTicket:
        """Copy entries to their rows, with a digest of each."""
        begun = time.perf_counter()
        for kind, place, row in jobs:
            layout, data = self._layouts[kind], self._memory[kind].row(row)
            for tensor, view in zip(layout.tensors, layout.views(data[None]), strict=True):
                view[:, 0].copy_(tensor[:, place])
            digest = payload_digest(data.numpy()[: layout.payload_bytes])
            data[layout.checksums] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        return PlainTicket(self._bytes_of(jobs), time.perf_counter() - begun)

    def load(self, jobs: Sequence[CopyJob]) -> PlainTicket:
        """Copy entries from their rows, and compare them with their digests."""
        begun = time.perf_counter()
        damaged = []
        for index, (kind, place, row) in enumerate(jobs):
            layout, data = self._layouts[kind], self._memory[kind].row(row)
            for tensor, view in zip(layout.tensors, layout.views(data[None]), strict=True):
                tensor[:, place].copy_(view[:, 0])
            digest = payload_digest(data.numpy()[: layout.payload_bytes])
            if digest != data.numpy()[layout.checksums].tobytes():
                damaged.append(index)
        return PlainTicket(self._bytes_of(jobs), time.perf_counter() - begun, damaged)

    def wait(self) -> None:
        """Do nothing: copies are done when their call returns."""

    def mark(self) -> Mark:
        """Read the clock."""
        return time.perf_counter()

    def seconds_between(self, begun: Mark, ended: Mark) -> float | None:
        """Return the time between two marks."""
        seconds: float = ended - begun
        return seconds

    def _bytes_of(self, jobs: Sequence[CopyJob]) -> int:
        return sum(self._layouts[job.kind].row_bytes for job in jobs)
