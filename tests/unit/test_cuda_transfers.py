"""Transfers between a GPU and host memory, on a fake device that completes immediately.

Waits between streams need a GPU: tests/gpu/test_tiers_gpu.py.
"""

import ctypes
from contextlib import nullcontext

import pytest
import torch

from mamba_cache.tiers import cuda
from mamba_cache.tiers.cuda import CudaTransfers
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.memory import RowMemory
from mamba_cache.tiers.transfers import CopyJob, RowLayout

KV, STATE = EntryKind.KV, EntryKind.STATE


class Done:
    """A stream and an event that are always complete."""

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
    """Return a copy by the CPU in place of the driver's."""

    def copy(on_host, host_pitch, on_device, device_pitch, num_bytes, num_lines, stream):
        assert num_lines == 1 or device_pitch <= cuda._MAX_PITCH
        for line in range(num_lines):
            both = on_device + line * device_pitch, on_host + line * host_pitch
            ctypes.memmove(*(both if to_device else reversed(both)), num_bytes)

    return copy


def keep_for(tensor, stream):
    """Stand for the GPU allocator's record of the other streams that use memory."""
    assert tensor.numel()
    assert isinstance(stream, Done)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(cuda, "_event", lambda timed=False: Done())
    monkeypatch.setattr(cuda, "_stream", lambda device: Done())
    monkeypatch.setattr(cuda, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(cuda, "_keep_for", keep_for)
    monkeypatch.setattr(cuda, "cuda_rectangles", copies_of)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Done())
    return torch.device("cpu")


class Rig:
    def __init__(self, device, piece_bytes=cuda.PIECE_BYTES):
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            KV: [torch.randn(4, 11, 3, 96, generator=generator)],
            STATE: [
                torch.randn(3, 5, 7, generator=generator).bfloat16(),
                torch.empty(2, 5, 0),
                torch.randn(2, 5, 9001, generator=generator),
                torch.randn(1, 5, 40_001, generator=generator),
            ],
        }
        self.layouts = {kind: RowLayout(t, sums_chunks=True) for kind, t in self.tensors.items()}
        memory = [
            RowMemory(self.layouts[kind].row_bytes, self.layouts[kind].checksums, count)
            for kind, count in ((KV, 11), (STATE, 5))
        ]
        self.host = HostTier(*memory)
        self.transfers = CudaTransfers(
            self.layouts, self.host.memory, device, piece_bytes=piece_bytes
        )
        self.jobs = [CopyJob(KV, place, 10 - place) for place in range(11)]
        self.jobs += [CopyJob(STATE, place, 2 * place % 5) for place in range(5)]


PIECES = pytest.mark.parametrize("piece_bytes", [2**12, 2**16, cuda.PIECE_BYTES])
"""Pieces of one line, of some lines or entries, and of the most that the tail allows."""


@PIECES
@pytest.mark.parametrize("most_pitch", [cuda._MAX_PITCH, 1000])
def test_entries_come_back_to_the_bit(device, monkeypatch, most_pitch, piece_bytes):
    """Lines fit the driver's maximum pitch for one copy, or exceed it."""
    monkeypatch.setattr(cuda, "_MAX_PITCH", most_pitch)
    rig = Rig(device, piece_bytes)
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


@PIECES
def test_a_flipped_bit_is_found_in_its_entry(device, piece_bytes):
    rig = Rig(device, piece_bytes)
    rig.transfers.spill(rig.jobs)
    for index in (0, 11, 15):  # a block, and the first and the last state
        job = rig.jobs[index]
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
    states = [job for job in rig.jobs if job.kind is STATE]
    assert rig.transfers.load(states).damaged() == []
    checksums, memory = rig.layouts[STATE].checksums, rig.host.memory[STATE]
    first, second = memory.row(0)[checksums], memory.row(2)[checksums]
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    assert rig.transfers.load(states).damaged() == [0, 1], "the checksums are swapped"


def test_no_piece_goes_beyond_its_kind(device):
    """Three states, two a piece; the blocks behind them could fill the second piece."""
    rig = Rig(device)
    jobs = [CopyJob(STATE, place, place) for place in range(3)] + 500 * [CopyJob(KV, 0, 0)]
    room = 2 * rig.transfers._entries[STATE].num_bytes
    pieces = list(cuda._pieces(rig.transfers._by_kind(jobs), room))
    assert [piece.which for piece in pieces][:2] == [slice(0, 2), slice(2, 3)]
    assert [index for piece in pieces for index in piece.order] == list(range(len(jobs)))
    assert all(piece.which.stop - piece.which.start == len(piece.order) for piece in pieces)
    just_one = next(cuda._pieces(rig.transfers._by_kind(jobs), room // 2))
    assert (just_one.order, just_one.lines) == ([0], None), "an entry of one piece is not cut"


class Journal:
    """A device that records its commands in order."""

    def __init__(self, monkeypatch, rig_of):
        self.entries = []
        streams = iter(("sending", "summing", "receiving", "comparing"))
        monkeypatch.setattr(cuda, "_stream", lambda device: self.Stream(self, next(streams)))
        monkeypatch.setattr(cuda, "_event", lambda timed=False: self.Event(self, timed))
        monkeypatch.setattr(cuda, "cuda_rectangles", self.copies_of)
        current = self.Stream(self, "current")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
        self.rig = rig_of()
        for entries in self.rig.transfers._entries.values():
            measure = entries.checksums.measure
            entries.checksums.measure = lambda *a, m=measure: (self.add("launch", *a), m(*a))
            fetch = entries.checksums.fetch
            entries.checksums.fetch = lambda *a, f=fetch: (self.add("fetch", *a), f(*a))

    def add(self, *entry):
        self.entries.append(entry)

    def copies_of(self, *, to_device):
        copy = copies_of(to_device=to_device)
        return lambda *arguments: (self.add("copy", *arguments), copy(*arguments))

    def of(self, what):
        return [entry for entry in self.entries if entry[0] == what]

    class Stream(Done):
        def __init__(self, journal, name):
            self.journal, self.name = journal, name

        def wait_event(self, event):
            self.journal.add("wait", self.name, event, event.copies)

    class Event(Done):
        def __init__(self, journal, timed):
            self.journal, self.timed = journal, timed

        def record(self, stream=None):
            self.copies, self.stream = len(self.journal.of("copy")), stream

        def elapsed_time(self, later):
            assert (self.timed, later.timed) == (True, True), "CUDA refuses"
            assert self.stream is later.stream, "both events must be of one stream"
            return later.copies - self.copies


@pytest.fixture
def journal(device, monkeypatch):
    """Return the journal of a spill in pieces of 64 KiB."""
    made = Journal(monkeypatch, lambda: Rig(device, 2**16))
    made.rig.transfers.spill(made.rig.jobs)
    return made


def chunks_seen(launches):
    return [
        (entry, chunk)
        for _, _, which, chunks, *_ in launches
        for entry in range(16)[which]
        for chunk in range(99)[chunks]
    ]


def test_copies_and_their_events_are_of_the_ways_stream(journal):
    """Otherwise the launch that sums a piece would not wait for its copies."""
    for transfer, copying, measuring in (
        (journal.rig.transfers.spill, "sending", "summing"),
        (journal.rig.transfers.load, "receiving", "comparing"),
    ):
        journal.entries.clear()
        transfer(journal.rig.jobs)
        assert {entry[-1].name for entry in journal.of("copy")} == {copying}
        waits = [event for _, name, event, _ in journal.of("wait") if name == measuring]
        assert waits
        assert {event.stream.name for event in waits} <= {copying, "current"}
        assert copying in {event.stream.name for event in waits}


def test_transfers_are_timed_from_the_first_copy_to_the_last(journal):
    transfers, jobs = journal.rig.transfers, journal.rig.jobs
    for transfer in (transfers.spill, transfers.load):
        before = len(journal.of("copy"))
        ticket = transfer(jobs)
        assert ticket.seconds() == (len(journal.of("copy")) - before) / 1e3 > 0
    begun = transfers.mark()
    transfers.spill(jobs)
    assert transfers.seconds_between(begun, transfers.mark()) > 0


def test_few_copies_and_launches(journal):
    """At most one copy per entry, tensor and piece, and one launch per piece."""
    pieces = list(cuda._pieces(journal.rig.transfers._by_kind(journal.rig.jobs), 2**16))
    for copy in (journal.rig.transfers.spill, journal.rig.transfers.load):
        journal.entries.clear()
        assert copy(journal.rig.jobs).damaged() == []
        assert len(journal.of("launch")) == len(pieces)
        assert 11 + 5 * 3 < len(journal.of("copy")) < 11 + 5 * 3 + len(pieces)


def test_each_piece_is_measured_beside_its_own_copies(journal):
    """Sums of all pieces at once would delay the forward."""
    journal.entries.clear()
    transfers, jobs = journal.rig.transfers, journal.rig.jobs
    transfers.spill(jobs)
    kinds = [entry[0] for entry in journal.entries]
    # The link is given all its work before anything else is enqueued.
    assert "launch" not in kinds[: len(kinds) - kinds[::-1].index("copy")]
    waits = [entry for entry in journal.of("wait") if entry[1] == "summing"]
    before = [copies for *_, copies in waits]
    assert before == sorted(set(before))
    assert before[0] == 0
    assert before[-1] < len(journal.of("copy"))
    at = [journal.entries.index(wait) for wait in waits]
    assert [kinds[index + 1] for index in at] == ["launch"] * len(waits)
    assert len(waits) == len(journal.of("launch"))
    assert len({entry[2] for entry in waits}) == len(waits)
    # Each checksum of each entry is written once.
    state, kv = (transfers._entries[kind].checksums.num_sums for kind in (STATE, KV))
    seen = chunks_seen(journal.of("launch"))
    assert len(seen) == len(set(seen)) == 5 * state + 11 * kv


def test_each_piece_is_compared_behind_its_copies_and_the_forward_waits_only_for_copies(journal):
    journal.entries.clear()
    transfers, jobs = journal.rig.transfers, journal.rig.jobs
    transfers.load(jobs)
    kinds = [entry[0] for entry in journal.entries]
    # The link is given all its work before anything else is enqueued.
    assert "launch" not in kinds[: len(kinds) - kinds[::-1].index("copy")]
    copies = len(journal.of("copy"))
    [forward] = [entry for entry in journal.of("wait") if entry[1] == "current"]
    assert forward[3] == copies
    assert kinds.index("launch") > journal.entries.index(forward)
    # All checksums arrive together, after the table of their locations.
    fetches = journal.of("fetch")
    assert [which for *_, which in fetches] == [slice(0, 5), slice(5, 16)]
    at = journal.entries.index(fetches[0])
    assert kinds[at - 1 : at + 3] == ["wait", "fetch", "fetch", "launch"]
    compared = [
        entry
        for entry in journal.entries[journal.entries.index(forward) + 1 :]
        if entry[0] != "fetch"
    ]
    waits, launches = compared[::2], compared[1::2]
    assert {(kind, name) for kind, name, *_ in waits} == {("wait", "comparing")}
    assert {kind for kind, *_ in launches} == {"launch"}
    arrived = [copies for *_, copies in waits]
    assert arrived == sorted(set(arrived))
    assert arrived[-1] == copies
    # Each checksum of each entry is compared once.
    seen = chunks_seen(launches)
    state, kv = (transfers._entries[kind].checksums.num_sums for kind in (STATE, KV))
    assert len(seen) == len(set(seen)) == 5 * state + 11 * kv


def test_little_is_compared_behind_the_last_copy(journal):
    """Pieces become smaller towards the end, if a line is shorter than a piece."""
    transfers, jobs = journal.rig.transfers, journal.rig.jobs
    pieces = list(cuda._pieces(transfers._by_kind(jobs), 2**16))
    sizes = [
        len(piece.order)
        * (piece.entries.num_bytes if piece.lines is None else piece.entries.bytes_of(piece.lines))
        for piece in pieces
    ]
    assert sum(sizes) == sum(transfers._entries[job.kind].num_bytes for job in jobs)
    assert sizes[-1] <= 2**13
    left = sum(sizes)
    for piece, size in zip(pieces, sizes, strict=True):
        one_line = piece.lines is not None and piece.lines.stop - piece.lines.start == 1
        assert one_line or size <= max(2**13, min(2**16, left // 2))
        left -= size


def test_one_copy_takes_lines_up_to_the_pitch_that_the_driver_takes():
    tensor = cuda._Tensor(0, 0, 64, cuda._MAX_PITCH, 8, range(3))
    assert [len(each.lines) for each in tensor.cut(slice(0, 3))] == [3]
    wider = tensor._replace(pitch=cuda._MAX_PITCH + 1)
    assert [len(each.lines) for each in wider.cut(slice(0, 3))] == [1, 1, 1]
