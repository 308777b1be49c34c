"""Injected faults of the tiers, and their outcomes.

A rig has tensors in place of the GPU's, a host tier and a disk tier. ``store`` writes an entry
down to the disk; ``fetch`` loads it up to the tensors and compares every byte. For every fault
injected in between, ``fetch`` must load the right bytes or return the refusal's name.
"""

import errno
import mmap
import os
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from disk_rig import IDENTITY, SECRET, TENANT, Answer

from mamba_cache import CacheConfig, KVBlockAllocator
from mamba_cache.cache import SlotPool
from mamba_cache.context import PrefixMatch
from mamba_cache.context.prefetch import PrefetchState
from mamba_cache.context.tiering import Tiering
from mamba_cache.tiers import Refusal
from mamba_cache.tiers.directory import entry_name
from mamba_cache.tiers.disk import PAGE_BYTES, DiskStore, file_bytes
from mamba_cache.tiers.entry import EntryFacts, EntryKey, EntryKind, EntryMacs
from mamba_cache.tiers.lower import LowerTier
from mamba_cache.tiers.transfers import CopyJob

NUM_ENTRIES = 6
NUM_ROWS = 8
CONFIG = CacheConfig(
    num_kv_blocks=2,
    max_slots=2,
    block_size_tokens=1,
    ssm_chunk_size=1,
    num_host_blocks=NUM_ROWS,
    num_host_states=NUM_ROWS,
)
PATIENCE = 60.0
"""Seconds after which a call counts as hung."""

FROM, TO = 0, 1
PREFIX = [
    *((number, EntryKind.KV) for number in range(NUM_ENTRIES)),
    (NUM_ENTRIES - 1, EntryKind.STATE),
]
"""The entries that a prefetch of the whole prefix requests."""


class WrongRestore(Exception):
    """Restored bytes differ from the stored ones, without a refusal."""


class Hung(Exception):
    """A call was never answered."""


def content_of(number, kind, shape):
    rng = np.random.default_rng([number, kind is EntryKind.KV])
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


class Rig:
    """Tensors, a host tier and a disk tier below ``path``."""

    def __init__(self, path, rng):
        self.path, self.rng = Path(path), rng
        self.tensors = {
            EntryKind.KV: torch.zeros(2, 2, 7, 9),
            EntryKind.STATE: torch.zeros(3, 2, 30, 33),
        }
        kv_blocks = KVBlockAllocator(2)
        self.tiers = Tiering(
            CONFIG,
            {kind: [tensor] for kind, tensor in self.tensors.items()},
            torch.device("cpu"),
            kv_blocks,
            SlotPool(2, kv_blocks),
            identity=None,
        )
        self.host, self.transfers = self.tiers.host, self.tiers.transfers
        self.layouts = self.transfers._layouts
        self.open()

    def open(self):
        sizes = {kind: layout.row_bytes for kind, layout in self.layouts.items()}
        capacity = sum(map(file_bytes, sizes.values())) * NUM_ROWS
        self.files = DiskStore(
            self.path,
            IDENTITY,
            capacity,
            state_bytes=sizes[EntryKind.STATE],
            kv_bytes=sizes[EntryKind.KV],
            chunk_bytes=2 * PAGE_BYTES,
        )
        self.disk = self.tiers.disk = LowerTier(
            self.files, macs=EntryMacs(SECRET), write_on_use=1, num_threads=3, owns_store=True
        )

    def reopen(self):
        self.disk.close()
        self.open()

    def facts(self, number, kind):
        key = EntryKey(IDENTITY.digest, TENANT, kind, number.to_bytes(16, "little"), IDENTITY.rank)
        size = self.layouts[kind].row_bytes
        return EntryFacts(key, number + 1, size)

    def draw(self):
        """Draw an entry."""
        return int(self.rng.integers(NUM_ENTRIES)), list(EntryKind)[self.rng.integers(2)]

    def has(self, number, kind):
        return self.disk.has_many([self.facts(number, kind).key])[0]

    def fill_host(self, number, kind):
        """Copy an entry to the host tier if absent; return whether it is there then."""
        facts, tensor = self.facts(number, kind), self.tensors[kind]
        lease = self.host[kind].reserve(facts)
        if lease is not None:
            tensor[:, FROM] = content_of(number, kind, tensor[:, FROM].shape)
            self.transfers.spill([CopyJob(kind, FROM, lease.row)])
            lease.rows.complete(lease)
        return facts.key.digest in self.host[kind]

    def store(self, number, kind):
        """Write an entry to the disk if absent."""
        if not self.has(number, kind):
            self.host.clear()
            self.fill_host(number, kind)
            self.tiers.offer_below(self.facts(number, kind))
            self.end()
        self.host.clear()

    def store_all(self):
        for kind in EntryKind:
            for number in range(NUM_ENTRIES):
                self.store(number, kind)

    def end(self):
        """Wait until the disk tier is idle."""
        if not self.disk.flush(PATIENCE):
            raise Hung("the disk did not end what it was given")
        self.host.poll()

    def fetch(self, number, kind):
        """Load an entry from the disk and compare it; return "right" or the refusal."""
        facts, answer = self.facts(number, kind), Answer()
        self.host.clear()
        lease = self.host[kind].reserve(facts, for_lower=True)
        assert lease is not None
        lease.rows.buffer(lease)[:] = b"\xff" * facts.payload_bytes
        if not self.disk.load(facts, lease.rows.buffer(lease), answer):
            lease.rows.release(lease)
            return "not taken"
        self.end()
        self.host.end_later(lease, answer.get())
        self.host.poll()
        if answer.get() is not None:
            return answer.get().value
        return self.restore(number, kind)

    def restore(self, number, kind):
        """Load an entry from the host tier and compare it; return "right" or the refusal."""
        lease, tensor = self.host[kind].read(self.facts(number, kind)), self.tensors[kind]
        if isinstance(lease, Refusal):
            return lease.value
        tensor[:, TO] = torch.nan
        damaged = self.transfers.load([CopyJob(kind, TO, lease.row)]).damaged()
        if damaged:
            lease.rows.refuse(lease, Refusal.PAYLOAD_DIGEST)
            return Refusal.PAYLOAD_DIGEST.value
        lease.rows.release(lease)
        if not torch.equal(tensor[:, TO], content_of(number, kind, tensor[:, TO].shape)):
            raise WrongRestore(f"entry {number} of {kind}")
        return "right"

    def check(self):
        """Check invariants, and that no lease and no queued job is left."""
        self.end()
        self.host.check_invariants()
        self.disk.check_invariants()
        assert not any(self.host.leases.values())
        assert not self.host.lower_leases
        assert not self.disk.num_queued

    def forgive_disk(self):
        """Clear the disk's failures, so that it is used again at once."""
        self.disk._failures, self.disk._paused_until, self.files._full_until = 0, 0.0, 0.0

    def file(self, number, kind):
        return self.files.folder / entry_name(self.facts(number, kind).key)

    def flip_file(self, number, kind, bit):
        """Flip a bit of a file."""
        data = bytearray(self.file(number, kind).read_bytes())
        flip(data, bit)
        self.file(number, kind).write_bytes(data)

    def drop(self, number, kind):
        """Remove an entry from the disk tier."""
        self.disk.remove(self.facts(number, kind).key)
        self.end()

    def restore_prefix(self):
        """Restore all entries of the prefix."""
        return [self.restore(number, kind) for number, kind in PREFIX]


@contextmanager
def replaced(name, call):
    """Replace a system call in the ``with`` block."""
    original = getattr(os, name)
    setattr(os, name, call)
    try:
        yield original
    finally:
        setattr(os, name, original)


def flip(data, bit):
    data[bit // 8] ^= 1 << bit % 8


# The faults. Each function returns outcomes of fetches.


def flipped_payload_bit(rig):
    number, kind = rig.draw()
    rig.store(number, kind)
    bit = int(rig.rng.integers(8 * rig.layouts[kind].row_bytes))
    rig.flip_file(number, kind, 8 * PAGE_BYTES + bit)
    return [rig.fetch(number, kind)]


def flipped_header_bit(rig):
    number, kind = rig.draw()
    rig.store(number, kind)
    rig.flip_file(number, kind, int(rig.rng.integers(256 * 8)))
    if rig.rng.random() < 0.02:
        rig.reopen()
    return [rig.fetch(number, kind)]


def truncated_file(rig):
    number, kind = rig.draw()
    rig.store(number, kind)
    file = rig.file(number, kind)
    os.truncate(file, int(rig.rng.integers(file.stat().st_size)))
    if rig.rng.random() < 0.02:
        rig.reopen()
    return [rig.fetch(number, kind)]


def zero_filled_file(rig):
    """Zero a file or some of its pages, as after a power cut without a sync."""
    number, kind = rig.draw()
    rig.store(number, kind)
    data = bytearray(rig.file(number, kind).read_bytes())
    begin, end = sorted(rig.rng.integers(0, len(data) // PAGE_BYTES + 1, 2).tolist())
    if rig.rng.random() < 0.2:
        begin, end = 0, len(data) // PAGE_BYTES
    data[begin * PAGE_BYTES : end * PAGE_BYTES] = bytes((end - begin) * PAGE_BYTES)
    rig.file(number, kind).write_bytes(data)
    if rig.rng.random() < 0.1:
        rig.reopen()
    return [rig.fetch(number, kind)]


def swapped(rig, begin):
    """Exchange the contents of two files from an offset on."""
    (one, kind), other = rig.draw(), int(rig.rng.integers(NUM_ENTRIES))
    for number in (one, other):
        rig.store(number, kind)
    first, second = (rig.file(number, kind).read_bytes() for number in (one, other))
    rig.file(one, kind).write_bytes(first[:begin] + second[begin:])
    rig.file(other, kind).write_bytes(second[:begin] + first[begin:])
    if rig.rng.random() < 0.02:
        rig.reopen()
    return [rig.fetch(number, kind) for number in {one, other}]


def swapped_entries(rig):
    return swapped(rig, 0)


def swapped_payloads(rig):
    """Exchange the payloads of two files, so that headers and payloads do not match."""
    return swapped(rig, PAGE_BYTES)


def torn_write(rig):
    """Skip some sectors of a write, which still reports success."""
    number, kind = rig.draw()
    rig.drop(number, kind)
    rng, write = rig.rng, os.pwritev

    def tear(fd, buffers, at):
        data = b"".join(bytes(buffer) for buffer in buffers)
        kept = rng.integers(0, len(data) // 512 + 1)
        chosen = rng.random(len(data) // 512) < rng.random()
        if rng.random() < 0.5:  # only the first sectors
            chosen = np.arange(len(data) // 512) < kept
        torn = memoryview(mmap.mmap(-1, len(data)))
        for sector in np.flatnonzero(chosen).tolist():
            where = slice(512 * sector, 512 * (sector + 1))
            torn[where] = data[where]
        return write(fd, [torn], at)

    with replaced("pwritev", tear):
        rig.store(number, kind)
    if rng.random() < 0.05:
        rig.reopen()
    return [rig.fetch(number, kind)]


def flipped_host_bit(rig):
    """Flip a bit of a row of host memory, in its bytes or its checksums."""
    number, kind = rig.draw()
    rig.host.clear()
    rig.fill_host(number, kind)
    row = rig.host[kind]._row_of[rig.facts(number, kind).key.digest]
    data = rig.host.memory[kind].row(row).numpy()
    flip(data, int(rig.rng.integers(rig.layouts[kind].checksums.stop * 8)))
    if rig.rng.random() < 0.5:
        return [rig.restore(number, kind)]
    # The damaged bytes are written to the disk and loaded again.
    rig.drop(number, kind)
    rig.tiers.offer_below(rig.facts(number, kind))
    rig.end()
    outcome = rig.fetch(number, kind)
    rig.drop(number, kind)  # lower tiers cannot detect this damage
    return [outcome]


def flipped_host_header(rig):
    number, kind = rig.draw()
    rig.host.clear()
    rig.fill_host(number, kind)
    entries = rig.host[kind]
    row = entries._row_of[rig.facts(number, kind).key.digest]
    flip(entries.headers[row], int(rig.rng.integers(256 * 8)))
    return [rig.restore(number, kind)]


def failing_copy(rig):
    """Make a system call fail from a random moment of storing and fetching on."""
    number, kind = rig.draw()
    if rig.rng.random() < 0.5:
        rig.store(number, kind)
    else:
        rig.drop(number, kind)
    name = ["preadv", "pwritev", "replace", "unlink"][rig.rng.integers(4)]
    error = [errno.EIO, errno.ENOSPC, errno.EINTR, errno.EBADF][rig.rng.integers(4)]
    left = [int(rig.rng.integers(3))]
    system_call = getattr(os, name)

    def fail(*arguments, **named):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(error, os.strerror(error))
        return system_call(*arguments, **named)

    with replaced(name, fail):
        rig.store(number, kind)
        outcomes = [rig.fetch(number, kind), rig.fetch(number, kind)]
    rig.forgive_disk()
    return outcomes


def short_copy(rig):
    """Make a system call transfer fewer bytes than requested."""
    number, kind = rig.draw()
    if rig.rng.random() < 0.5:
        rig.drop(number, kind)
    name = ["preadv", "pwritev"][rig.rng.integers(2)]
    system_call, rng = getattr(os, name), rig.rng

    def less(fd, buffers, offset):
        pages = int(rng.integers(0, 3))
        return system_call(fd, [buffers[0][: pages * PAGE_BYTES]], offset) if pages else 0

    with replaced(name, less):
        rig.store(number, kind)
        outcome = rig.fetch(number, kind)
    rig.forgive_disk()
    return [outcome]


def partial_batch(rig):
    """Damage some entries of a prefix; only a whole prefix may become ready."""
    rig.store_all()
    broken = set()
    for number in range(NUM_ENTRIES):
        for kind in EntryKind:
            if rig.rng.random() < 0.15:
                at = int(rig.rng.integers(2)) * PAGE_BYTES + int(rig.rng.integers(200))
                rig.flip_file(number, kind, 8 * at + 3)
                broken.add((number, kind))
    rig.host.clear()
    prefetch = prefetch_all(rig)
    rig.end()
    if not prefetch.is_done:
        raise Hung("a prefetch is never done")
    is_whole = not broken.intersection(PREFIX)
    assert (prefetch.state is PrefetchState.READY) is is_whole
    return rig.restore_prefix()


def prefetch_all(rig):
    """Begin a prefetch of the whole prefix, like a context does."""

    match = PrefixMatch(NUM_ENTRIES + 1, (), 0, 0, None)
    planners = rig.tiers.planners
    planners.disk.rates = planners.disk.rates._replace(bytes_per_second=1e18)
    planners.disk._learns = False
    planners.host.rates = planners.host.rates._replace(tokens_per_second=1e-3)

    digests = [index.to_bytes(16, "little") for index in range(NUM_ENTRIES)]
    entries = SimpleNamespace(
        hashes=SimpleNamespace(digests=digests),
        key=lambda kind, index: rig.facts(index, kind).key,
        facts=lambda kind, index: rig.facts(index, kind),
    )
    return rig.tiers.prefetch("one", match, entries, None)


def aborted(rig):
    """Cancel, reset, clear, evict or close at any point of running reads."""
    rig.store_all()
    rig.host.clear()
    rng = rig.rng
    gate, passed = threading.Semaphore(int(rng.integers(0, NUM_ENTRIES + 2))), threading.Event()
    read = DiskStore._read

    def held(*args):
        is_before = rng.random() < 0.5
        num_read = None if is_before else read(*args)
        if not passed.is_set():
            gate.acquire()
        return read(*args) if is_before else num_read

    DiskStore._read = held
    try:
        prefetch = prefetch_all(rig)
        if rng.random() < 0.5:
            rig.host.poll()
        action = rng.integers(5)
        if action == 0:
            prefetch.cancel()
        elif action == 1:
            rig.tiers.reset()
        elif action == 2:
            rig.host.clear()
        elif action == 3:  # other entries take all free rows and more
            for number in range(100, 100 + NUM_ROWS):
                rig.fill_host(number, EntryKind.KV)
        elif action == 4:
            closing = threading.Thread(target=rig.disk.close)
            closing.start()
        second = prefetch_all(rig) if action != 4 and rng.random() < 0.5 else None
    finally:
        passed.set()
        gate.release(50)
        if action == 4:
            closing.join()
            rig.host.poll()
            rig.open()
        rig.end()
        DiskStore._read = read
    for each in (prefetch, second):
        if each is not None and not each.is_done:
            raise Hung("a prefetch is never done")
    return rig.restore_prefix()


def slow_copy(rig):
    """Let a read end long after its row was released and possibly reused."""
    rig.store_all()
    rig.host.clear()
    number, kind = rig.draw()
    other = (number + 1) % NUM_ENTRIES
    go, read = threading.Event(), DiskStore._read

    def slow(*arguments):
        go.wait(PATIENCE)
        return read(*arguments)

    facts, answer = rig.facts(number, kind), Answer()
    lease = rig.host[facts.key.kind].reserve(facts, for_lower=True)
    DiskStore._read = slow
    try:

        def done(refusal):
            answer(refusal)
            rig.host.end_later(lease, refusal)

        assert rig.disk.load(facts, lease.rows.buffer(lease), done)
        if rig.rng.random() < 0.5:
            rig.host.reset()
        else:
            rig.host.clear()
        for each in range(100, 100 + NUM_ROWS):
            rig.fill_host(each, kind)
        outcomes = [rig.restore(each, kind) for each in range(100, 100 + NUM_ROWS)]
    finally:
        go.set()
        DiskStore._read = read
    rig.end()
    outcomes += [rig.restore(each, kind) for each in range(100, 100 + NUM_ROWS)]
    return [*outcomes, rig.restore(number, kind), rig.fetch(other, kind)]


def killed_writer(rig):
    """Kill a writing process at any moment; the next process opens its files."""
    rig.disk.close()
    seconds = rig.rng.exponential(0.05)
    first = int(rig.rng.integers(1000))
    child = os.fork()
    if not child:
        try:
            rig.open()
            while True:
                rig.store(first % 12, list(EntryKind)[first % 2])
                first += 1
                rig.host.clear()
                if first % 5 == 0:  # so that files are rewritten
                    for number, kind in product(range(12), EntryKind):
                        rig.disk.remove(rig.facts(number, kind).key)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rig.open()
    found = [(n, kind) for n in range(12) for kind in EntryKind if rig.has(n, kind)]
    return [rig.fetch(number, kind) for number, kind in found]


FAULTS = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        flipped_payload_bit,
        flipped_header_bit,
        truncated_file,
        zero_filled_file,
        swapped_entries,
        swapped_payloads,
        torn_write,
        flipped_host_bit,
        flipped_host_header,
        failing_copy,
        short_copy,
        partial_batch,
        aborted,
        slow_copy,
        killed_writer,
    )
}
"""Faults by name."""


class FaultCounts:
    """Counts for faults of one kind; ``outcomes`` counts fetches by "right" or refusal."""

    def __init__(self):
        self.injected = self.wrong = self.hung = self.leaked = 0
        self.outcomes = Counter()
        self.first_breach = ""

    def __add__(self, other):
        total = FaultCounts()
        for name in ("injected", "wrong", "hung", "leaked", "outcomes"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        total.first_breach = self.first_breach or other.first_breach
        return total


def inject(path, name, count, seed):
    """Inject faults of one kind one after another; return their ``FaultCounts``."""
    counts = FaultCounts()
    rng = np.random.default_rng([*np.ravel(seed), list(FAULTS).index(name)])
    rig = Rig(path, rng)
    for _ in range(count):
        counts.injected += 1
        try:
            counts.outcomes.update(FAULTS[name](rig))
            rig.check()
        except Exception as error:
            if isinstance(error, WrongRestore):
                counts.wrong += 1
            elif isinstance(error, Hung):
                counts.hung += 1
            else:
                counts.leaked += 1
            counts.first_breach = counts.first_breach or f"{type(error).__name__}: {error}"
            rig = Rig(Path(path) / f"after-{counts.injected}", rng)
    rig.disk.close()
    return counts
