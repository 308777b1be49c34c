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
        shape = _DEPTH, 2 * capacity
        self._pinned = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        self._host = self._pinned.numpy()
        self._rows = torch.empty(shape, dtype=torch.int32, device=device)
        self._used = [torch.cuda.Event() for _ in range(_DEPTH)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(
        self, source_rows: Sequence[int], destination_rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueues the copy of two equally long lists on the current stream.

        Returns:
            Both lists, [n] int32 on the device. They hold until ``mark_used``, and as long as the
            work that is enqueued before it reads them.
        """
        turn, count = self._turn, len(source_rows)
        # Waits for nothing if the event is past, or was never recorded.
        self._used[turn].synchronize()
        self._host[turn, :count] = source_rows
        self._host[turn, count : 2 * count] = destination_rows
        rows = self._rows[turn, : 2 * count]
        rows.copy_(self._pinned[turn, : 2 * count], non_blocking=True)
        return rows[:count], rows[count:]

    def mark_used(self) -> None:
        """Says that the work which reads the rows last sent is enqueued on the current stream."""
        self._used[self._turn].record()
        self._turn = (self._turn + 1) % _DEPTH
