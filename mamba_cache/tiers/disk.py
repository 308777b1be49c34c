"""The disk tier: entries in slab files, verified whenever they are read."""

from __future__ import annotations

import errno
import hmac
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import check_int, check_kind, check_number
from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    InvariantError,
    TierInUseError,
)
from mamba_cache.tiers.directory import folders, open_folder, remove_folder, slab_path
from mamba_cache.tiers.entry import (
    NONCE_BYTES,
    EntryFacts,
    EntryHeader,
    EntryKey,
    EntryKind,
    EntryMacs,
    Refusal,
)
from mamba_cache.tiers.identity import CacheIdentity
from mamba_cache.tiers.jobs import (
    Done,
    LoadJob,
    PutJob,
    QueuedTier,
    RemovalJob,
    report_error,
)
from mamba_cache.tiers.rows import RowLease, RowPool
from mamba_cache.tiers.slab import SlabFile, Submit, row_bytes_of

__all__ = ["DiskTier"]

_WRITES_AT_ONCE: Final = 16
"""Entries that share one wait for the disk."""

_FAILURES_TO_REST: Final = 2
_REST_SECONDS: Final = 5.0


class DiskTier(QueuedTier):
    """Entries in two files of rows, one of states and one of KV blocks, of one identity.

    An entry can be found once it is on the disk to its end. Each read compares its header with what
    the request derived, field by field, and verifies the MAC of header and payload. Whatever is
    wrong is a counted miss: a full disk, an error of the disk, damage, a forged entry. Callers wait
    for the disk only in ``flush`` and ``close``. Any thread may call; ``done`` is called from
    threads of this object, or from the caller's when the answer is known at once.

    Its threads end at ``close``. In a process that was forked it refuses everything.

    Args:
        path: A directory, which is made if there is none. Each identity has a folder in it, that
            one process uses at a time. Folders of other identities are deleted, the least recently
            opened first, when all of them together would take more than ``capacity_bytes``.
        identity: What all entries are of.
        capacity_bytes: What all folders of disk caches below ``path`` may take.
        secret: The key of the entries' MACs: ``CacheConfig.hash_secret``.
        state_bytes: Payload of a state; 0: none is stored.
        kv_bytes: Payload of a KV block; 0: none is stored.
        state_share: Part of the capacity that is for states, where both are stored.
        write_on_use: 2: an entry is written when it is offered for the second time, for most are
            never used again and writing is what a disk has least of; 1: at once.
        num_readers: Threads that read rows, and as many that read parts of large rows; None: as
            there are processors, for who reads also digests, but at least 8 and at most 16.
        max_queued: Loads that may wait, and likewise puts.

    Attributes:
        name: "disk".
        folder: Where the files are.

    Raises:
        BudgetError: The capacity does not hold one row of each kind.
        InvalidArgumentError: An argument is of another kind or out of range, or the path, a folder
            or a file is a link or not this user's alone.
        MissingExtraError: ``cryptography`` is not installed.
        TierInUseError: Another process uses the folder.
        OSError: The folder or its files cannot be made or opened.
    """

    name = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: CacheIdentity,
        capacity_bytes: int,
        *,
        secret: bytes,
        state_bytes: int,
        kv_bytes: int,
        state_share: float = 0.5,
        write_on_use: int = 2,
        num_readers: int | None = None,
        max_queued: int = 256,
    ) -> None:
        check_kind("identity", identity, CacheIdentity)
        self._capacity = check_int("capacity_bytes", capacity_bytes, minimum=0)
        if num_readers is None:
            num_readers = max(8, min(16, os.cpu_count() or 1))
        num_readers = check_int("num_readers", num_readers, minimum=1, maximum=256)
        self._removals: deque[RemovalJob] = deque()
        super().__init__(write_on_use=write_on_use, max_queued=max_queued, queues=[self._removals])
        sizes = {EntryKind.STATE: state_bytes, EntryKind.KV: kv_bytes}
        for kind, size in sizes.items():
            check_int(f"{kind.name.lower()}_bytes", size, minimum=0)
        sizes = {kind: size for kind, size in sizes.items() if size}
        share = check_number("state_share", state_share, maximum=1)
        max_rows = _rows_within(self._capacity, sizes, share)
        self._path, self._identity = Path(path).expanduser(), identity
        self._macs = EntryMacs(secret)
        self._not_recovered: Counter[Refusal] = Counter()
        self._failures = 0
        self._rests_until = self._full_until = 0.0
        self.folder, self._folder_lock = open_folder(self._path, identity)
        self._files: dict[EntryKind, _File] = {}
        try:
            for kind, size in sizes.items():
                slab = SlabFile(slab_path(self.folder, kind), size, max_rows=max_rows[kind])
                self._files[kind] = _File(slab, _DiskRows(max_rows[kind]), set())
            with ThreadPoolExecutor(num_readers) as readers:
                for file in self._files.values():
                    self._recover(file, readers)
        except BaseException:
            self._close_files()
            raise
        # Not an executor: those take nothing any more, with loads under way, as a process ends.
        self._parts: SimpleQueue[tuple[Future[int], Callable[[], int]] | None] = SimpleQueue()
        self._readers = _threads("part", [self._read_parts] * num_readers)
        self._threads = _threads("row", [self._write_queued, *[self._read_queued] * num_readers])

    @property
    def _takes_calls(self) -> bool:
        """Whether it takes calls now: not after errors of the disk, for some seconds each time."""
        is_resting = bool(self._rests_until) and time.monotonic() < self._rests_until
        return not self._is_closing and not is_resting

    def _find(self, keys: Sequence[EntryKey]) -> list[bool]:
        found = []
        used: dict[EntryKind, list[bytes]] = {kind: [] for kind in self._files}
        for key in keys:
            name = self._name_of(key)
            found.append(name is not None and self._files[key.kind].has(name))
            if name is not None and found[-1]:
                used[key.kind].append(name)
        for kind, names in used.items():
            self._files[kind].rows.touch(names)  # as one prefix, from its start
        return found

    def _absence(self, key: EntryKey) -> Refusal | None:
        name = self._name_of(key)
        if name is None:
            return Refusal.IDENTITY
        return None if self._files[key.kind].has(name) else Refusal.MISSING

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored, as ``QueuedTier`` says.

        Raises:
            InvalidArgumentError: It is of another identity, or of another size than the rows.
        """
        self._check_size(facts, payload)
        if self._name_of(facts.key) is None:
            raise InvalidArgumentError(f"{facts.key} is of another identity than the disk cache's")
        return super().put(facts, payload, done)

    def _remove_soon(self, key: EntryKey) -> None:
        name = self._name_of(key)
        if name is not None:
            self._files[key.kind].wrong.add(name)
            self._add(self._removals, RemovalJob(None, key))

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        for _ in self._readers:  # now that nobody waits for parts
            self._parts.put(None)
        for reader in self._readers:
            reader.join()
        self._close_files()

    def _own_stats(self) -> dict[str, Any]:
        files = {kind.name.lower(): file for kind, file in self._files.items()}
        return {
            "entries": {name: len(file.rows) for name, file in files.items()},
            "rows": {name: file.slab.max_rows for name, file in files.items()},
            "ready_rows": {name: file.slab.num_rows for name, file in files.items()},
            "row_bytes": {name: file.slab.row_bytes for name, file in files.items()},
            "disk_bytes": self._disk_bytes(),
            "is_direct": all(file.slab.is_direct for file in files.values()),
            "recovered": self._counts["recovered"],
            "not_recovered": {each.value: n for each, n in self._not_recovered.items()},
            "evicted": sum(file.rows.evicted_total for file in files.values()),
            "io_errors": self._counts["io_errors"],
        }

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself.

        Raises:
            InvariantError: It does not.
        """
        with self._lock:
            super().check_invariants()
            leases = [lease for file in self._files.values() for lease in file.rows.leases]
            if len(leases) > len(self._taken):
                raise InvariantError(f"rows are held for nobody, of {leases}")
            for file in self._files.values():
                file.rows.check_invariants()

    def _name_of(self, key: EntryKey) -> bytes | None:
        """Return what rows call an entry; None if it is of another identity or kind."""
        if key.identity != self._identity.digest or key.rank != self._identity.rank:
            return None
        if key.kind not in self._files:
            return None
        return _name(key)

    def _check_size(self, facts: EntryFacts, payload: memoryview) -> None:
        """Check that an entry has the size of a row."""
        file = self._files.get(facts.key.kind)
        expected = None if file is None else file.slab.payload_bytes
        if facts.payload_bytes != expected or len(payload) != expected:
            raise InvalidArgumentError(
                f"a {facts.key.kind.name.lower()} must have {expected} bytes in this disk cache, "
                f"got {facts.payload_bytes} in a buffer of {len(payload)}"
            )

    def _write_queued(self) -> None:
        """Write what is queued, some entries at once, until the tier is closed."""
        while puts := self._wait(self._put_came, lambda: self._take_puts(_WRITES_AT_ONCE)):
            self._write(puts)
            puts.clear()  # they hold the callers' buffers
        self._end_queued()

    def _read_queued(self) -> None:
        """Read what is queued, one entry at a time, until the tier is closed."""
        while reads := self._wait(
            self._load_came, lambda: self._take(self._removals) or self._take(self._loads)
        ):
            self._read(reads.pop())
        self._end_queued()

    def _end_queued(self) -> None:
        """End what is queued, for the tier is closed: only what is wrong is still removed."""
        for job in self._take_queued():
            if isinstance(job, RemovalJob):
                self._read(job)
            else:
                self._end(job, Refusal.ABORTED, "aborted")

    def _write(self, puts: list[PutJob]) -> None:
        started = time.perf_counter()
        written = [(put, lease) for put in puts if (lease := self._write_one(put)) is not None]
        kinds = {put.facts.key.kind for put, _ in written}
        syncs = (self._try(self._files[kind].slab.sync) for kind in kinds)
        failure = next(filter(None, syncs), None)
        with self._lock:
            self._write_seconds += time.perf_counter() - started
            wrong = [each for each in written if each[0].is_revoked]
            for put, lease in written:
                rows = self._files[put.facts.key.kind].rows
                if not put.is_revoked:
                    (rows.complete if failure is None else rows.cancel)(lease)
        for put, lease in wrong:
            file = self._files[put.facts.key.kind]
            self._try(partial(file.slab.erase_header, lease.row))  # before the row is free
            with self._lock:
                file.rows.cancel(lease)
        refusal = None if failure is None else Refusal.IO_ERROR
        for put, _ in written:
            self._end(put, refusal, failure)

    def _write_one(self, put: PutJob) -> RowLease | None:
        """Write an entry to a row; None, with ``done`` called, if it could not be."""
        file = self._files[put.facts.key.kind]
        lease = self._reserve(file, _name(put.facts.key))
        if isinstance(lease, str):
            failure: str | None = lease
        elif failure := self._try(partial(_write_row, file, lease, put, self._macs)):
            with self._lock:
                file.rows.cancel(lease)
        else:
            return lease
        self._end(put, Refusal.IO_ERROR, failure)
        return None

    def _reserve(self, file: _File, name: bytes) -> RowLease | str:
        """Take a row: one that is free, a new one if the file may grow, or another entry's."""
        is_full = time.monotonic() < self._full_until
        if not is_full and not file.rows.num_free and file.slab.growth:
            is_full = not (self._grow(file, file.slab.growth) or self._grow(file, 1))
            self._full_until = time.monotonic() + _REST_SECONDS if is_full else 0.0
        with self._lock:
            return file.rows.reserve(name) or ("disk_full" if is_full else "no_row")

    def _grow(self, file: _File, count: int) -> bool:
        """Make a file longer; say whether it is. A full disk leaves it as it was."""
        try:
            if not self._make_room(count * file.slab.row_bytes):
                return False
            file.slab.grow(count)
        except (OSError, InvalidArgumentError) as error:  # or somebody has deleted the path
            self._count_failure(error)
            return False
        with self._lock:
            file.rows.add_rows(count)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Delete folders of others that nobody uses until so much fits the capacity."""
        others = [each for each in folders(self._path) if each.path != self.folder]
        spare = self._capacity - self._disk_bytes() - num_bytes
        taken = sum(each.num_bytes for each in others)
        for other in others:
            if taken <= spare:
                break
            if not other.is_in_use:
                try:
                    remove_folder(other)
                except (TierInUseError, InvalidArgumentError, OSError):  # since it was looked at
                    continue
                taken -= other.num_bytes
        return taken <= spare

    def _read(self, job: LoadJob | RemovalJob) -> None:
        """Read and verify an entry, or find it to be wrong."""
        started = time.perf_counter()
        key = job.expected.key if isinstance(job, LoadJob) else job.entry
        file = self._files[key.kind]
        with self._lock:
            lease = file.rows.read(_name(key))
        refusal: Refusal | None = Refusal.MISSING  # given up since it was asked for
        if lease is not None:
            refusal = Refusal.MAC
            if isinstance(job, LoadJob):
                refusal = self._refusal(file, job, lease)
                with self._lock:
                    self._read_seconds += time.perf_counter() - started
            if refusal is not None:
                with self._lock:
                    file.rows.drop(lease)
                if refusal is not Refusal.IO_ERROR:
                    # Nobody finds it when the file is opened again. Before the row is free.
                    self._try(partial(file.slab.erase_header, lease.row))
            with self._lock:
                file.rows.release(lease)
        if isinstance(job, RemovalJob):
            with self._lock:
                file.wrong.discard(_name(key))
        self._end(job, refusal)

    def _submit(self, call: Callable[[], int]) -> Future[int]:
        """Have one of the readers make a call."""
        future: Future[int] = Future()
        self._parts.put((future, call))
        return future

    def _read_parts(self) -> None:
        """Make the reads of all rows, one at a time, until the tier is closed."""
        while (part := self._parts.get()) is not None:
            future, call = part
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del part, future, call  # they hold the caller's buffer

    def _refusal(self, file: _File, load: LoadJob, lease: RowLease) -> Refusal | None:
        """Read a row and say what is wrong with it."""
        found: list[Refusal | None] = []
        if self._try(lambda: found.append(_read_row(file, load, lease, self._macs, self._submit))):
            return Refusal.IO_ERROR
        return found[0]

    def _recover(self, file: _File, readers: ThreadPoolExecutor) -> None:
        """Find the entries that a file holds, by their headers; the payloads are verified later."""
        entries: dict[int, EntryHeader] = {}
        names: set[bytes] = set()
        rows = range(file.slab.num_rows)
        for row, header in enumerate(readers.map(partial(self._header_of, file), rows)):
            if isinstance(header, Refusal):
                self._not_recovered[header] += 1
            elif header is not None and (name := _name(header.facts.key)) not in names:
                names.add(name)
                entries[row] = header
        file.rows.adopt(file.slab.num_rows, entries)
        self._counts["recovered"] += len(entries)

    def _header_of(self, file: _File, row: int) -> EntryHeader | Refusal | None:
        """Read a row's header; None if nothing was written to the row."""
        pages: list[bytes] = []
        if self._try(lambda: pages.append(file.slab.read_header(row))):
            return Refusal.IO_ERROR
        if not any(pages[0]):
            return None
        header = EntryHeader.read(pages[0], self._macs.header_key(self._identity.digest))
        if isinstance(header, Refusal):
            return header
        return self._recovery_refusal(header, file) or header

    def _recovery_refusal(self, header: EntryHeader, file: _File) -> Refusal | None:
        facts = header.facts  # of this identity, whose key the MAC has
        if self._files.get(facts.key.kind) is not file:
            return Refusal.KIND
        if facts.payload_bytes != file.slab.payload_bytes:
            return Refusal.PAYLOAD_BYTES
        return None

    def _try(self, call: Callable[[], object]) -> str | None:
        """Ask the system for something; say why it did not do it. What it refuses is counted."""
        try:
            call()
        except Exception as error:
            if not isinstance(error, OSError):  # a bug, which must not end the thread
                report_error()
            return self._count_failure(error)
        with self._lock:
            self._failures = 0
            self._rests_until = 0.0
        return None

    def _count_failure(self, error: Exception) -> str:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            self._full_until = time.monotonic() + _REST_SECONDS  # what is there can still be read
            return "disk_full"
        with self._lock:
            self._counts["io_errors"] += 1
            self._failures += 1
            if self._failures >= _FAILURES_TO_REST:
                self._rests_until = time.monotonic() + _REST_SECONDS
        return "io_error"

    def _disk_bytes(self) -> int:
        return sum(file.slab.num_rows * file.slab.row_bytes for file in self._files.values())

    def _close_files(self) -> None:
        for file in self._files.values():
            file.slab.close()
        self._folder_lock.release()


class _File(NamedTuple):
    """A slab, what is in its rows, and what of that is wrong and still to be erased."""

    slab: SlabFile
    rows: _DiskRows
    wrong: set[bytes]

    def has(self, name: bytes) -> bool:
        """Say whether an entry can be found."""
        return name in self.rows and name not in self.wrong


class _DiskRows(RowPool):
    """Rows whose entries were there before this process."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.nonces: npt.NDArray[np.uint8] = np.zeros((num_rows, NONCE_BYTES), np.uint8)

    def adopt(self, num_rows: int, entries: Mapping[int, EntryHeader]) -> None:
        """Take over the rows of a file."""
        self.add_rows(num_rows)
        empty = []
        for row in range(num_rows):  # the free rows are handed out in this order
            header = entries.get(row)
            name = b"" if header is None else _name(header.facts.key)
            if header is not None:
                self.generations[row] = header.generation - 1
                self.nonces[row] = np.frombuffer(header.nonce, np.uint8)
            lease = self.reserve(name or row.to_bytes(8, "little"))
            assert lease is not None
            if header is None:
                empty.append(lease)
            else:
                self.complete(lease)
        for lease in empty:
            self.cancel(lease)
        headers = sorted(entries.values(), key=lambda header: header.facts.prefix_tokens)
        # Nobody knows when each was used; the end of a prefix goes before its beginning.
        self.touch([_name(header.facts.key) for header in headers])

    def touch(self, names: Sequence[bytes]) -> None:
        """Record that entries that are there were used: of one prefix, from its start."""
        self._use([self._row_of[name] for name in names])


def _threads(name: str, targets: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    """Start threads that do not keep a process from ending."""
    threads = [
        threading.Thread(target=target, name=f"mamba-cache-disk-{name}-{number}", daemon=True)
        for number, target in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    return threads


def _write_row(file: _File, lease: RowLease, put: PutJob, macs: EntryMacs) -> None:
    identity = put.facts.key.identity
    payload_mac = macs.payload_mac(identity)
    tag = payload_mac.tag_of(put.payload)
    header = EntryHeader(put.facts, tag, lease.generation, payload_mac.nonce)
    file.rows.nonces[lease.row] = np.frombuffer(payload_mac.nonce, np.uint8)
    file.slab.write(lease.row, header.to_bytes(macs.header_key(identity)), put.payload)


def _read_row(
    file: _File, load: LoadJob, lease: RowLease, macs: EntryMacs, submit: Submit
) -> Refusal | None:
    """Read a row and compare it with what is looked for: who reads a part makes its MAC."""
    identity = load.expected.key.identity
    payload_mac = macs.payload_mac(identity, file.rows.nonces[lease.row].tobytes())
    parts: dict[int, bytes] = {}

    def seen(number: int, part: memoryview) -> None:
        parts[number] = payload_mac.part(number, part)

    page = file.slab.read(lease.row, load.into, submit, seen)
    header = EntryHeader.read(page, macs.header_key(identity))
    if isinstance(header, Refusal):
        return header
    refusal = header.refusal(load.expected)
    if refusal is None and header.generation != lease.generation:
        refusal = Refusal.GENERATION
    found = payload_mac.tag([parts[number] for number in sorted(parts)])
    if refusal is None and not hmac.compare_digest(found, header.payload_tag):
        refusal = Refusal.MAC
    return refusal


def _name(key: EntryKey) -> bytes:
    """Return what tells an entry from others of its identity, rank and kind."""
    chunk = b"" if key.chunk is None else key.chunk.to_bytes(4, "little")
    return len(key.digest).to_bytes(1, "little") + key.digest + key.tenant + chunk


def _rows_within(
    capacity: int, payload_bytes: Mapping[EntryKind, int], state_share: float
) -> dict[EntryKind, int]:
    """Return the rows of each kind that the capacity holds."""
    if not payload_bytes:
        raise InvalidArgumentError("give state_bytes, kv_bytes or both; both are 0")
    shares = {EntryKind.STATE: state_share, EntryKind.KV: 1 - state_share}
    if len(payload_bytes) == 1:
        shares = dict.fromkeys(payload_bytes, 1.0)
    rows = {
        kind: int(capacity * shares[kind]) // row_bytes_of(size)
        for kind, size in payload_bytes.items()
    }
    for kind, count in rows.items():
        if not count:
            raise BudgetError(
                f"a capacity of {capacity} bytes is too small: {shares[kind]:.0%} of it is for "
                f"{kind.name.lower()} entries of {row_bytes_of(payload_bytes[kind])} bytes each"
            )
    return rows
