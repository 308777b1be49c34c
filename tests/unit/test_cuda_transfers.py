"""What goes where between a GPU and host memory, with a device that is done at once.

Whether streams wait for each other only a GPU shows: tests/gpu/test_tiers_gpu.py.
"""

import ctypes
from contextlib import nullcontext

import pytest
import torch

from mamba_cache.tiers import (
    CopyJob,
    CudaTransfers,
    EntryKind,
    HostTier,
    RowFormat,
    RowLayout,
    cuda,
)

KV, STATE = EntryKind.KV, EntryKind.STATE


class Done:
    """A stream and an event on which nothing is ever left to do."""

    def record(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait_event(self, event):
        pass

    def elapsed_time(self, later):
        return 2.0


def copies_of(*, to_device):
    """Copies by the processor where the driver would."""

    def copy(on_host, host_pitch, on_device, device_pitch, num_bytes, num_lines, stream):
        assert num_lines == 1 or device_pitch <= cuda.MOST_PITCH
        for line in range(num_lines):
            both = on_device + line * device_pitch, on_host + line * host_pitch
            ctypes.memmove(*(both if to_device else reversed(both)), num_bytes)

    return copy


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(cuda, "_event", lambda timed=False: Done())
    monkeypatch.setattr(cuda, "_stream", lambda device: Done())
    monkeypatch.setattr(cuda, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(cuda, "cuda_rectangles", copies_of)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Done())
    return torch.device("cpu")


class Rig:
    def __init__(self, device):
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            KV: [torch.randn(4, 11, 3, 96, generator=generator)],
            STATE: [
                torch.randn(3, 5, 7, generator=generator).bfloat16(),
                torch.randn(2, 5, 9001, generator=generator),
                torch.randn(1, 5, 40_001, generator=generator),
            ],
        }
        self.layouts = {kind: RowLayout(t, sums_chunks=True) for kind, t in self.tensors.items()}
        formats = [
            RowFormat(self.layouts[kind].row_bytes, self.layouts[kind].checksums, count)
            for kind, count in ((KV, 11), (STATE, 5))
        ]
        self.host = HostTier(*formats)
        self.transfers = CudaTransfers(self.layouts, self.host.memory, device)
        self.jobs = [CopyJob(KV, place, 10 - place) for place in range(11)]
        self.jobs += [CopyJob(STATE, place, 2 * place % 5) for place in range(5)]


@pytest.mark.parametrize("most_pitch", [cuda.MOST_PITCH, 1000])
def test_entries_come_back_to_the_bit(device, monkeypatch, most_pitch):
    """Of lines that one copy may take, and may not."""
    monkeypatch.setattr(cuda, "MOST_PITCH", most_pitch)
    rig = Rig(device)
    before = {kind: [t.clone() for t in each] for kind, each in rig.tensors.items()}
    spilled = rig.transfers.spill(rig.jobs)
    assert spilled.is_done()
    assert spilled.damaged() == []
    for tensors in rig.tensors.values():
        for tensor in tensors:
            tensor.zero_()
    ticket = rig.transfers.load(rig.jobs)
    ticket.wait()
    assert ticket.damaged() == []
    assert ticket.seconds() == 0.002
    assert ticket.num_bytes == sum(rig.layouts[job.kind].row_bytes for job in rig.jobs)
    for kind, tensors in rig.tensors.items():
        for tensor, old in zip(tensors, before[kind], strict=True):
            assert torch.equal(tensor, old)
    rig.transfers.wait()
    mark = rig.transfers.mark()
    assert rig.transfers.seconds_between(mark, rig.transfers.mark()) == 0.002


def test_a_turned_bit_is_found_where_it_is(device):
    rig = Rig(device)
    rig.transfers.spill(rig.jobs)
    for index, job in enumerate(rig.jobs):
        layout, row = rig.layouts[job.kind], rig.host.memory[job.kind].row(job.row)
        for byte in (
            0,
            layout.parts[0].stop - 1,
            layout.parts[-1].start,
            layout.parts[-1].stop - 1,
            layout.checksums.start,
            layout.checksums.stop - 1,
        ):
            row[byte] ^= 128
            assert rig.transfers.load(rig.jobs).damaged() == [index], byte
            row[byte] ^= 128
    assert rig.transfers.load(rig.jobs).damaged() == []


def test_swapped_checksums_are_found(device):
    rig = Rig(device)
    rig.transfers.spill(rig.jobs)
    checksums, memory = rig.layouts[STATE].checksums, rig.host.memory[STATE]
    first, second = memory.row(0)[checksums], memory.row(2)[checksums]
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    assert rig.transfers.load(rig.jobs).damaged() == [11, 12]


def test_few_copies_and_launches(device, monkeypatch):
    """One copy an entry and tensor where a forward runs beside; no copy where it waits."""
    copies, launches = [], []

    def counted(*, to_device):
        copy = copies_of(to_device=to_device)
        return lambda *arguments: (copies.append(arguments), copy(*arguments))

    monkeypatch.setattr(cuda, "cuda_rectangles", counted)
    rig = Rig(device)
    for entries in rig.transfers._entries.values():
        measure = entries.checksums._measure
        entries.checksums._measure = lambda *a, m=measure: (launches.append(a), m(*a))
    rig.transfers.spill(rig.jobs)
    assert len(copies) == 11 * 1 + 5 * 3
    assert len(launches) == 2
    copies.clear(), launches.clear()
    assert rig.transfers.load(rig.jobs).damaged() == []
    assert not copies
    assert len(launches) == 2
