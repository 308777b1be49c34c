"""Restores on a side stream: which earlier step each must follow, to run beside the later ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch

from mamba_cache.config import CacheConfig
from mamba_cache.metadata import StepPlan
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import RowIndices

__all__ = [
    "STEPS_REMEMBERED",
    "CudaRestoreStreams",
    "RestoreOrder",
    "RestoreStreams",
    "SideStream",
]

STEPS_REMEMBERED = 8
"""Steps whose ends a restore can wait for; earlier ones count as the oldest of them."""


class RestoreOrder:
    """The last step that used each slot and each request's row.

    Steps are numbered from 1 in the order in which they end; 0 is what was before them.

    Args:
        max_slots: Slots.
        max_requests: Rows.
    """

    def __init__(self, max_slots: int, max_requests: int) -> None:
        self._slots = np.zeros(max_slots, dtype=np.int64)
        self._rows = np.zeros(max_requests, dtype=np.int64)
        self.last_step = 0

    def end_step(self, rows: Iterable[int], slots: Iterable[int]) -> None:
        """Record that a step is enqueued.

        Args:
            rows: The rows whose states it read or wrote.
            slots: The slots that it wrote.
        """
        self.last_step += 1
        self._rows[list(rows)] = self.last_step
        self._slots[list(slots)] = self.last_step

    def end_all(self) -> None:
        """Record that something was enqueued which may have used any slot and row."""
        self.last_step += 1
        self._rows[:] = self._slots[:] = self.last_step

    def newest(self, sources: Iterable[int], rows: Iterable[int]) -> int:
        """Return the last step that used one of the slots or rows.

        Args:
            sources: Slots; negative ones are none.
            rows: Rows.
        """
        slots = [slot for slot in sources if slot >= 0]
        return int(max(self._slots[slots].max(initial=0), self._rows[list(rows)].max(initial=0)))


class SideStream:
    """A stream of its own for restores, in the order that ``RestoreOrder`` demands.

    The current stream waits for the restores before it goes on; the restores wait for the last step
    that used their slots or rows, and not for later ones.

    Args:
        slots: Where states are restored from.
        config: Settings.
        streams: The streams and events of the device.
    """

    def __init__(
        self, slots: MambaSlotAllocator, config: CacheConfig, streams: RestoreStreams
    ) -> None:
        self._slots = slots
        self._live_rows = config.live_rows_per_request
        self._order = RestoreOrder(slots.max_slots, config.max_requests)
        self._streams = streams
        self._plan = StepPlan()
        self._num_transfers = -1

    def restore(self, plan: StepPlan) -> None:
        """Enqueue a step's restores beside what is enqueued on the current stream.

        Args:
            plan: What the step does, which is remembered until it ends.
        """
        self._plan = plan
        if not plan.restores:
            return
        if self._slots.transfers.num_calls != self._num_transfers:
            self.end_all()  # the embedder has moved states itself, on the current stream
        sources, rows = (list(column) for column in zip(*plan.restores, strict=True))
        # A step that is no longer remembered ended before the oldest one that is.
        oldest = self._order.last_step - STEPS_REMEMBERED + 1
        step = max(self._order.newest(sources, rows), oldest)
        with self._streams.after(step % STEPS_REMEMBERED):
            restore = self._slots.transfers.slots_to_live
            restore(sources, [row * self._live_rows for row in rows])
        self._num_transfers = self._slots.transfers.num_calls

    def live_to_slots(self, rows: RowIndices, slots: RowIndices) -> None:
        """Enqueue the copies that end the step, on the current stream.

        Args:
            rows: [n] live-state rows.
            slots: [n] the slots that its plan names.
        """
        before = self._slots.transfers.num_calls
        self._slots.transfers.live_to_slots(rows, slots)
        self._num_transfers += self._slots.transfers.num_calls - before

    def end_step(self) -> None:
        """Record that the step, or what there is of it, is enqueued on the current stream."""
        plan, self._plan = self._plan, StepPlan()
        if self._slots.transfers.num_calls != self._num_transfers:
            self.end_all()  # beside the step's own copies there were the embedder's
            return
        rows = [*plan.decodes.rows.tolist(), *(piece.row for piece in plan.prefills)]
        slots = [entry.slot for entry in plan.checkpoints]
        self._order.end_step(rows, slots + [entry.slot for entry in plan.boundaries])
        self._record()

    def use_rows(self, rows: Sequence[int]) -> None:
        """Remember that something is enqueued on the current stream which uses these rows."""
        if self._slots.transfers.num_calls != self._num_transfers:
            self.end_all()  # the embedder has moved states itself
            return
        self._order.end_step(rows, ())
        self._record()

    def end_all(self) -> None:
        """Record that something is enqueued which may have used any slot and row."""
        self._order.end_all()
        self._record()

    def _record(self) -> None:
        self._streams.record(self._order.last_step % STEPS_REMEMBERED)
        self._num_transfers = self._slots.transfers.num_calls


class RestoreStreams(Protocol):
    """The streams and events that a ``SideStream`` needs of a device."""

    def record(self, index: int) -> None:
        """Mark what is enqueued on the current stream by now as the ``index``-th event."""

    def after(self, index: int) -> AbstractContextManager[None]:
        """Enqueue on the side stream, after the ``index``-th event.

        What the current stream is given from then on waits for what was enqueued within.
        """


class CudaRestoreStreams:  # pragma: no cover - tests/gpu run it
    """One side stream of a GPU, and an event for each of the last steps.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._events = [torch.Event(device) for _ in range(STEPS_REMEMBERED)]
        self._restored = torch.Event(device)

    def record(self, index: int) -> None:
        """Mark what is enqueued on the current stream by now as the ``index``-th event."""
        self._events[index].record()

    @contextmanager
    def after(self, index: int) -> Iterator[None]:
        """Enqueue on the side stream, after the ``index``-th event."""
        self._stream.wait_event(self._events[index])
        with torch.cuda.stream(self._stream):
            yield
        self._restored.record(self._stream)
        torch.cuda.current_stream().wait_event(self._restored)
