"""Brings rows from the host to a GPU, call after call, without waiting and without allocating."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["RowRing"]

_DEPTH = 16


class RowRing:
    """Pinned host buffers and their device twins, used in turn.

    Only a host that is more than ``_DEPTH`` calls ahead of the device waits for it.

    Args:
        capacity: The most rows of each list.
        device: A CUDA device.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        shape = _DEPTH, 2, capacity
        pinned = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=True)
        # Taking tensors apart anew in each call would cost as much as sending them.
        self._pinned = pinned.unbind()
        self._host = [tuple(lists) for lists in pinned.numpy()]
        self._rows = torch.empty(shape, dtype=torch.int32, device=device).unbind()
        self._lists = [rows.unbind() for rows in self._rows]
        self._used = [torch.Event(device) for _ in range(_DEPTH)]
        self._turn = 0

    def send(
        self, source_rows: Sequence[int], destination_rows: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """Enqueues the copy of two equally long lists on the current stream.

        Returns:
            Two tensors, each [capacity] int32 on the device, that begin with the lists. They hold
            until ``mark_used``, and as long as the work that is enqueued before it reads them.
        """
        turn, count = self._turn, len(source_rows)
        # Waits for nothing if the event is past, or was never recorded.
        self._used[turn].synchronize()
        sources, destinations = self._host[turn]
        sources[:count], destinations[:count] = source_rows, destination_rows
        self._rows[turn].copy_(self._pinned[turn], non_blocking=True)
        return self._lists[turn]

    def mark_used(self) -> None:
        """Says that the work which reads the rows last sent is enqueued on the current stream."""
        self._used[self._turn].record()
        self._turn = (self._turn + 1) % _DEPTH
