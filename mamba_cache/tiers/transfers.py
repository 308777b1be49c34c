"""Copies between the GPU's memory and rows of host memory, and the checksums that prove them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from mamba_cache.tiers.entry import EntryKind, payload_digest
from mamba_cache.tiers.memory import ROW_ALIGNMENT, RowMemory

__all__ = ["CopyJob", "PlainTransfers", "RowLayout", "Ticket", "Transfers"]

_PART_ALIGNMENT = 256
_DIGEST_BYTES = 16


class CopyJob(NamedTuple):
    """One entry to copy.

    Attributes:
        kind: What it is.
        place: Its slot, or its KV block.
        row: Its row of host memory.
    """

    kind: EntryKind
    place: int
    row: int


class RowLayout:
    """How the tensors of one slot or one KV block lie in a row of bytes.

    One after the other, each whole; then the checksums of all of them, then nothing up to a
    multiple of ``ROW_ALIGNMENT``.

    Args:
        tensors: Each [num_layers, places, *inner], inner axes contiguous.
        checksum_bytes: Bytes of the checksums, given the bytes before them. Default: one digest.

    Attributes:
        tensors: As given.
        payload_bytes: Bytes of the tensors, with what aligns them.
        checksums: Where the checksums stand in a row.
        row_bytes: Bytes of a row.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, num_checksum_words: int = 0) -> None:
        self.tensors = list(tensors)
        self._parts: list[slice] = []
        end = 0
        for tensor in self.tensors:
            size = tensor[:, 0].numel() * tensor.element_size()
            self._parts.append(slice(end, end + size))
            end += -(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT
        self.payload_bytes = end
        self.checksums = slice(end, end + (8 * num_checksum_words or _DIGEST_BYTES))
        self.row_bytes = -(-self.checksums.stop // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return rows, [n, row_bytes] uint8, as tensors like those of the layout.

        Returns:
            For each tensor [num_layers, n, *inner], of the same memory.
        """
        views = []
        for tensor, part in zip(self.tensors, self._parts, strict=True):
            shape = tensor.shape[0], *tensor.shape[2:]
            views.append(rows[:, part].view(tensor.dtype).unflatten(1, shape).transpose(0, 1))
        return views


class Ticket(Protocol):
    """Copies that were enqueued."""

    def is_done(self) -> bool:
        """Say whether they are over; waits for nothing."""
        ...

    def wait(self) -> None:
        """Wait until they are over."""
        ...

    def damaged(self) -> list[int]:
        """Once they are over: which of them, in order, brought other bytes than were written."""
        ...


class Transfers(Protocol):
    """Copies of entries between the GPU's memory and rows of host memory."""

    def spill(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries to their rows, and their checksums with them.

        It reads what is enqueued on the current stream by now, and the stream does not wait for it.
        Whoever calls it must know, when it is over, whether the entries were still there.
        """
        ...

    def load(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries from their rows, and compare them with their checksums.

        It follows what is enqueued on the current stream by now, and what the stream is given from
        then on follows it.
        """
        ...

    def wait(self) -> None:
        """Wait until all copies are over."""
        ...


class _Over:
    """Copies that were over when they returned."""

    def __init__(self, damaged: Sequence[int] = ()) -> None:
        self._damaged = list(damaged)

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Do nothing."""

    def damaged(self) -> list[int]:
        """Return which copies brought other bytes than were written."""
        return self._damaged


class PlainTransfers:
    """Copies where the tensors are in host memory themselves: done when a call returns.

    Args:
        layouts: How the entries of each kind lie in rows.
        memory: The rows of each kind.
    """

    def __init__(
        self, layouts: Mapping[EntryKind, RowLayout], memory: Mapping[EntryKind, RowMemory]
    ) -> None:
        self._layouts, self._memory = layouts, memory

    def spill(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries to their rows, with a digest of each."""
        for kind, place, row in jobs:
            layout, data = self._layouts[kind], self._memory[kind].row(row)
            for tensor, view in zip(layout.tensors, layout.views(data[None]), strict=True):
                view[:, 0].copy_(tensor[:, place])
            digest = payload_digest(data.numpy()[: layout.payload_bytes])
            data[layout.checksums] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        return _Over()

    def load(self, jobs: Sequence[CopyJob]) -> Ticket:
        """Copy entries from their rows, and compare them with their digests."""
        damaged = []
        for index, (kind, place, row) in enumerate(jobs):
            layout, data = self._layouts[kind], self._memory[kind].row(row)
            for tensor, view in zip(layout.tensors, layout.views(data[None]), strict=True):
                tensor[:, place].copy_(view[:, 0])
            digest = payload_digest(data.numpy()[: layout.payload_bytes])
            if digest != data.numpy()[layout.checksums].tobytes():
                damaged.append(index)
        return _Over(damaged)

    def wait(self) -> None:
        """Do nothing: no copy is under way when a call has returned."""
