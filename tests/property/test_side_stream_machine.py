"""Restores on a side stream under every order of calls: none runs beside what it depends on."""

from contextlib import contextmanager

import torch
from speculation_machine import SpeculationMachine

from mamba_cache.context.restore_order import SideStream


class Streams:
    """Notes when the current stream last used each slot and row, and who waits for what of it."""

    def __init__(self):
        self.clock = 0
        self.events = {}
        self.slots, self.rows = {}, {}
        self.waits_for = None

    def record(self, index):
        self.events[index] = self.clock

    @contextmanager
    def after(self, index):
        self.waits_for = self.events[index]
        yield
        self.waits_for = None

    def use(self, slots, rows):
        self.clock += 1
        self.slots |= dict.fromkeys(slots, self.clock)
        self.rows |= dict.fromkeys(rows, self.clock)

    def check_restore(self, sources, rows):
        for slot in sources:
            assert self.slots.get(slot, 0) <= self.waits_for, f"slot {slot} is being written"
        for row in rows:
            assert self.rows.get(row, 0) <= self.waits_for, f"row {row} is being used"


class SideStreamMachine(SpeculationMachine):
    """The machine of steps with drafts, whose restores go to a stream that is watched."""

    streams = None

    def watch(self):
        self.streams = Streams()
        slots, ring = self.context.slot_allocator, self.context.config.live_rows_per_request
        side_stream = SideStream(slots, self.context.config, self.streams)
        self.context._runner._side_stream = side_stream
        save, restore = slots.transfers.live_to_slots, slots.transfers.slots_to_live

        def watched_save(rows, targets):
            used = [slot for slot in torch.as_tensor(targets).tolist() if slot >= 0]
            own = [row // ring for row in torch.as_tensor(rows).tolist() if row >= 0]
            self.streams.use(used, own)
            save(rows, targets)

        def watched_restore(sources, rows):
            self.streams.check_restore(sources, [row // ring for row in rows])
            restore(sources, rows)

        copy_states, _ = self.context._forker._make_copiers()
        copy = copy_states.copy

        def watched_copy(sources, rows):
            used = [*torch.as_tensor(sources).tolist(), *torch.as_tensor(rows).tolist()]
            self.streams.use([], {row // ring for row in used})
            copy(sources, rows)

        copy_states.copy = watched_copy
        slots.transfers.live_to_slots = watched_save
        slots.transfers.slots_to_live = watched_restore

    def begin(self, decode_ids=None, **drafts):
        if self.streams is None:
            self.watch()
        step = super().begin(decode_ids, **drafts)
        if step is not None:
            metadata = step.metadata
            written = metadata.checkpoint_slots[: metadata.num_checkpoints].tolist()
            self.streams.use(written, [request.row for request in step.requests])
        return step


TestSideStreamMachine = SideStreamMachine.TestCase
