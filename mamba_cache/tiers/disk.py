"""The disk tier: entries in slab files, verified whenever they are read."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from mamba_cache._checks import check_int, check_kind, check_number
from mamba_cache.errors import BudgetError, InvalidArgumentError, TierInUseError
from mamba_cache.tiers.answers import report_error, tell
from mamba_cache.tiers.directory import folders, open_folder, remove_folder, slab_path
from mamba_cache.tiers.entry import (
    EntryFacts,
    EntryHeader,
    EntryKey,
    EntryKind,
    Refusal,
    payload_digest,
    payload_hasher,
)
from mamba_cache.tiers.host import TierStats
from mamba_cache.tiers.identity import CacheIdentity
from mamba_cache.tiers.protocols import Done
from mamba_cache.tiers.rows import RowLease, RowPool
from mamba_cache.tiers.slab import SlabFile, Submit, row_bytes_of

__all__ = ["DiskStats", "DiskTier"]

_WRITES_AT_ONCE: Final = 16
"""Entries that share one wait for the disk."""

_FAILURES_TO_REST: Final = 2
_REST_SECONDS: Final = 5.0
_MAX_FIRST_USES: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """What the disk tier did since it was opened, and what it holds now.

    Attributes:
        entries: Entries that can be found now, by kind.
        rows: Rows that the files have room for now, by kind.
        max_rows: Rows that they may have at most, by kind.
        disk_bytes: What the files take on the disk.
        is_direct: Whether reads and writes go past the page cache (``O_DIRECT``).
        is_healthy: Whether calls are taken now.
        recovered: Entries that were there when it was opened.
        not_recovered: Rows that held something else then, by reason.
        loads: Entries asked for.
        hits: Those that were read and verified.
        refused: Those that were not, by reason.
        puts: Entries offered.
        written: Those that were stored.
        not_written: Those that were not, by reason: "first_use", "in_flight", "queue_full",
            "unhealthy", "no_row", "disk_full", "io_error", "aborted".
        evicted: Entries given up for others.
        io_errors: Reads, writes and waits that the system refused, a full disk not counted.
        read_bytes: Payloads read.
        written_bytes: Payloads written.
        read_seconds: Time in which threads read and verified them, in sum.
        write_seconds: Time in which a thread digested and wrote them.
    """

    entries: Mapping[str, int]
    rows: Mapping[str, int]
    max_rows: Mapping[str, int]
    disk_bytes: int
    is_direct: bool
    is_healthy: bool
    recovered: int
    not_recovered: Mapping[str, int]
    loads: int
    hits: int
    refused: Mapping[str, int]
    puts: int
    written: int
    not_written: Mapping[str, int]
    evicted: int
    io_errors: int
    read_bytes: int
    written_bytes: int
    read_seconds: float
    write_seconds: float


class DiskTier:
    """Entries in two files of rows, one of states and one of KV blocks, of one identity.

    An entry can be found once it is on the disk to its end, and each read compares its header with
    what the request derived, field by field, and its payload with its digest. Whatever is wrong is
    a counted miss: a full disk, an error of the disk, damage. Nobody who calls waits for the disk,
    except in ``flush`` and ``close``. Any thread may call; ``done`` is called from threads of this
    object, or from the caller's when the answer is known at once.

    Its threads end at ``close``. In a process that was forked it refuses everything.

    Args:
        path: A directory, which is made if there is none. Each identity has a folder in it, that
            one process uses at a time. Folders of others are deleted, the least recently opened
            first, when all of them together would take more than ``capacity_bytes``.
        identity: What all entries are of.
        capacity_bytes: What everything below ``path`` may take.
        state_bytes: Payload of a state; 0: none is stored.
        kv_bytes: Payload of a KV block; 0: none is stored.
        state_share: Part of the capacity that is for states, where both are stored.
        write_on_use: 2: an entry is written when it is offered for the second time, for most are
            never used again and writing is what a disk has least of; 1: at once.
        num_readers: Reads at once, of parts of one row or of several.
        max_queued: Loads that may wait, and likewise puts.

    Attributes:
        name: "disk".
        folder: Where the files are.
        state_lengths: Tokens of the prefixes whose states were there when it was opened.

    Raises:
        BudgetError: The capacity does not hold one row of each kind.
        InvalidArgumentError: An argument is of another kind or out of range.
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
        state_bytes: int,
        kv_bytes: int,
        state_share: float = 0.5,
        write_on_use: int = 2,
        num_readers: int = 8,
        max_queued: int = 256,
    ) -> None:
        check_kind("identity", identity, CacheIdentity)
        self._capacity = check_int("capacity_bytes", capacity_bytes, minimum=0)
        self._write_on_use = check_int("write_on_use", write_on_use, minimum=1, maximum=2)
        num_readers = check_int("num_readers", num_readers, minimum=1, maximum=256)
        self._max_queued = check_int("max_queued", max_queued, minimum=1)
        sizes = {EntryKind.STATE: state_bytes, EntryKind.KV: kv_bytes}
        for kind, size in sizes.items():
            check_int(f"{kind.name.lower()}_bytes", size, minimum=0)
        sizes = {kind: size for kind, size in sizes.items() if size}
        share = check_number("state_share", state_share, maximum=1)
        max_rows = _rows_within(self._capacity, sizes, share)
        self._path, self._identity, self._pid = Path(path).expanduser(), identity, os.getpid()
        self._lock = threading.RLock()
        self._load_came = threading.Condition(self._lock)
        self._put_came = threading.Condition(self._lock)
        self._one_over = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._refused: Counter[Refusal] = Counter()
        self._not_written: Counter[str] = Counter()
        self._not_recovered: Counter[Refusal] = Counter()
        self._read_seconds = self._write_seconds = 0.0
        self._loads: deque[_Load] = deque()
        self._puts: deque[_Put] = deque()
        self._pending: set[EntryKey] = set()
        self._first_uses: OrderedDict[EntryKey, None] = OrderedDict()
        self._num_busy = self._failures = 0
        self._rests_until = 0.0
        self._full_until = 0.0
        self._is_closing = False
        self.state_lengths: set[int] = set()
        self.folder, self._folder_lock = open_folder(self._path, identity, sizes)
        self._files: dict[EntryKind, _File] = {}
        try:
            for kind, size in sizes.items():
                slab = SlabFile(slab_path(self.folder, kind), size, max_rows=max_rows[kind])
                self._files[kind] = _File(slab, _DiskRows(max_rows[kind]))
            with ThreadPoolExecutor(num_readers) as readers:
                for file in self._files.values():
                    self._recover(file, readers)
        except OSError:
            self._close_files()
            raise
        # Not an executor: those take nothing any more, with loads under way, as a process ends.
        self._parts: SimpleQueue[tuple[Future[int], Callable[[], int]] | None] = SimpleQueue()
        self._readers = _threads("part", [self._read_parts] * num_readers)
        self._threads = _threads("row", [self._write_queued, *[self._read_queued] * num_readers])

    @property
    def is_healthy(self) -> bool:
        """Whether it takes calls now: not after errors of the disk, for some seconds each time."""
        if self._is_closing or os.getpid() != self._pid:
            return False
        return not self._rests_until or time.monotonic() >= self._rests_until

    @property
    def num_queued(self) -> int:
        """Loads and puts that are not over."""
        return len(self._loads) + len(self._puts) + self._num_busy

    def has_many(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether it is likely to be there; ``load`` alone knows.

        Those that are count as used, as one prefix from its start.

        Args:
            keys: Of entries of one request.
        """
        if not self.is_healthy:
            return [False] * len(keys)
        found = []
        names: dict[EntryKind, list[bytes]] = {kind: [] for kind in self._files}
        with self._lock:
            for key in keys:
                name = self._name_of(key)
                if name is not None and name in self._files[key.kind].rows:
                    names[key.kind].append(name)
                    found.append(True)
                else:
                    found.append(False)
            for kind, its_names in names.items():
                self._files[kind].rows.touch(its_names)
        return found

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored.

        Args:
            facts: What it is.
            payload: [``facts.payload_bytes``] bytes, contiguous; not written until ``done``.
            done: Called with None when it is on the disk, or with why it is not.

        Returns:
            False if it is not taken, and ``done`` not called: it is offered for the first time and
            only the second counts, it is on its way, the queue is full, or the disk has failed.

        Raises:
            InvalidArgumentError: It is of another identity, or of another size than the rows.
        """
        self._check_size(facts, payload)
        name = self._name_of(facts.key)
        if name is None:
            raise InvalidArgumentError(f"{facts.key} is of another identity than the disk cache's")
        if not self.is_healthy:  # without the lock: a fork may have left it held for ever
            self._not_written["unhealthy"] += 1
            return False
        key = facts.key
        with self._lock:
            self._counts["puts"] += 1
            if name in self._files[key.kind].rows:
                self._files[key.kind].rows.touch([name])
                is_there, reason = True, None
            else:
                is_there, reason = False, self._reason_against(key)
            if reason is not None:
                self._not_written[reason] += 1
                return False
            if not is_there:
                self._pending.add(key)
                self._puts.append(_Put(facts, name, payload, done))
                self._put_came.notify()
        if is_there:
            done(None)
        return True

    def load(self, expected: EntryFacts, into: memoryview, done: Done) -> bool:
        """Queue an entry to be read and verified: each field of its header, and its digest.

        Args:
            expected: What the request derived of it.
            into: [``expected.payload_bytes``] bytes, contiguous, to write to until ``done``. They
                hold the entry only if that was called with None.
            done: Called with None when it is there and verified, or with why it is not. An entry
                that does not match is not found again.

        Returns:
            False if it is not taken, and ``done`` not called: the queue is full, or the disk has
            failed.

        Raises:
            InvalidArgumentError: It is of another size than the rows.
        """
        self._check_size(expected, into)
        name = self._name_of(expected.key)
        refusal = Refusal.IDENTITY if name is None else Refusal.MISSING
        if not self.is_healthy:
            return False
        with self._lock:
            if self._is_closing or len(self._loads) >= self._max_queued:
                return False
            self._counts["loads"] += 1
            rows = self._files[expected.key.kind].rows
            number = rows.next_number
            try:
                lease = None if name is None else rows.read(name)
                if lease is not None:
                    self._loads.append(_Load(expected, lease, into, done))
                    self._load_came.notify()
                    return True
            except BaseException:
                last = self._loads[-1] if self._loads else None
                if last is None or (last.expected, last.lease.number) != (expected, number):
                    rows.take_back(number)
                raise
            self._refused[refusal] += 1
        done(refusal)
        return True

    def remove(self, key: EntryKey) -> None:
        """Make an entry unfindable that is known to be wrong, for later processes too.

        It writes to the disk in the caller's thread.
        """
        name = self._name_of(key)
        if name is None or not self.is_healthy:
            return
        file = self._files[key.kind]
        with self._lock:
            lease = file.rows.read(name)
            if lease is not None:
                file.rows.drop(lease)
        if lease is not None:
            # Before the row is free.
            self._try(lambda: file.slab.erase_header(lease.row))
            with self._lock:
                file.rows.release(lease)

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until what was queued so far is over.

        Args:
            timeout_seconds: How long. Default: as long as it takes.

        Returns:
            Whether it is.
        """
        with self._lock:
            # Once more: a call that was interrupted may have queued something and told nobody.
            self._load_came.notify_all()
            self._put_came.notify_all()
            return self._one_over.wait_for(lambda: not self.num_queued, timeout_seconds)

    def close(self) -> None:
        """End its threads; what is queued is given up, and ``done`` called for each."""
        if os.getpid() != self._pid:
            return  # the threads, and what they hold, are the parent's
        # Each part may be done again: a call that was interrupted is followed by another.
        with self._lock:
            self._is_closing = True
            self._load_came.notify_all()
            self._put_came.notify_all()
        for thread in self._threads:
            thread.join()
        for _ in self._readers:  # now that nobody waits for parts
            self._parts.put(None)
        for reader in self._readers:
            reader.join()
        while self._loads:
            load = self._loads[0]
            tell(load.done, Refusal.ABORTED)
            self._refused[Refusal.ABORTED] += 1
            self._loads.popleft()
            self._files[load.expected.key.kind].rows.release(load.lease)
        while self._puts:
            tell(self._puts[0].done, Refusal.ABORTED)
            self._not_written["aborted"] += 1
            self._puts.popleft()
        self._pending.clear()
        self._close_files()

    def stats(self) -> DiskStats:
        """Return what it did so far and what it holds now."""
        with self._lock:
            files = {kind.name.lower(): file for kind, file in self._files.items()}
            return DiskStats(
                entries={name: len(file.rows) for name, file in files.items()},
                rows={name: file.slab.num_rows for name, file in files.items()},
                max_rows={name: file.slab.max_rows for name, file in files.items()},
                disk_bytes=self._disk_bytes(),
                is_direct=all(file.slab.is_direct for file in files.values()),
                is_healthy=self.is_healthy,
                recovered=self._counts["recovered"],
                not_recovered={each.value: n for each, n in self._not_recovered.items()},
                loads=self._counts["loads"],
                hits=self._counts["hits"],
                refused={each.value: n for each, n in self._refused.items()},
                puts=self._counts["puts"],
                written=self._counts["written"],
                not_written=dict(self._not_written),
                evicted=sum(file.rows.evicted_total for file in files.values()),
                io_errors=self._counts["io_errors"],
                read_bytes=self._counts["read_bytes"],
                written_bytes=self._counts["written_bytes"],
                read_seconds=self._read_seconds,
                write_seconds=self._write_seconds,
            )

    def tier_stats(self) -> TierStats:
        """Return the same in the form that all tiers have in common."""
        stats = self.stats()
        return TierStats(
            name=self.name,
            entries=stats.entries,
            rows=stats.max_rows,
            ready_rows=stats.rows,
            row_bytes={
                kind.name.lower(): file.slab.row_bytes for kind, file in self._files.items()
            },
            stored=stats.written,
            restored=stats.hits,
            evicted=stats.evicted,
            dropped=stats.not_written,
            refused=stats.refused,
        )

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself.

        Raises:
            InvariantError: It does not.
        """
        with self._lock:
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
        """Check that an entry has the size of a row.

        Raises:
            InvalidArgumentError: It has not.
        """
        file = self._files.get(facts.key.kind)
        expected = None if file is None else file.slab.payload_bytes
        if facts.payload_bytes != expected or len(payload) != expected:
            raise InvalidArgumentError(
                f"a {facts.key.kind.name.lower()} must have {expected} bytes in this disk cache, "
                f"got {facts.payload_bytes} in a buffer of {len(payload)}"
            )

    def _reason_against(self, key: EntryKey) -> str | None:
        """Say why an entry that is not there is not written now."""
        if self._is_closing:
            return "aborted"
        if key in self._pending:
            return "in_flight"
        if self._write_on_use > 1 and key not in self._first_uses:
            self._first_uses[key] = None
            if len(self._first_uses) > _MAX_FIRST_USES:
                self._first_uses.popitem(last=False)
            return "first_use"
        if len(self._puts) >= self._max_queued:
            return "queue_full"
        self._first_uses.pop(key, None)
        return None

    def _write_queued(self) -> None:
        """Write what is queued, some entries at once, until the tier is closed."""
        while True:
            with self._lock:
                self._put_came.wait_for(lambda: self._puts or self._is_closing)
                if self._is_closing:
                    return
                number = min(len(self._puts), _WRITES_AT_ONCE)
                puts = [self._puts.popleft() for _ in range(number)]
                self._num_busy += number
            self._write(puts)
            with self._lock:
                self._num_busy -= number
                self._one_over.notify_all()

    def _write(self, puts: list[_Put]) -> None:
        started = time.perf_counter()
        written = [(put, lease) for put in puts if (lease := self._write_one(put)) is not None]
        kinds = {put.facts.key.kind for put, _ in written}
        is_synced = all(self._try(self._files[kind].slab.sync) for kind in kinds)
        with self._lock:
            self._write_seconds += time.perf_counter() - started
            for put, lease in written:
                rows = self._files[put.facts.key.kind].rows
                if is_synced:
                    rows.complete(lease)
                    self._counts["written"] += 1
                    self._counts["written_bytes"] += len(put.payload)
                else:
                    rows.cancel(lease)
                    self._not_written["io_error"] += 1
            self._pending.difference_update(put.facts.key for put in puts)
        for put, _ in written:
            tell(put.done, None if is_synced else Refusal.IO_ERROR)

    def _write_one(self, put: _Put) -> RowLease | None:
        """Write an entry to a row; None, with ``done`` called, if it could not be."""
        file = self._files[put.facts.key.kind]
        lease = self._reserve(file, put.name)
        reason = "disk_full" if self._full_until else "no_row"
        if lease is not None:
            if self._try(partial(_write_row, file.slab, lease, put)):
                return lease
            reason = "io_error"
        with self._lock:
            if lease is not None:
                file.rows.cancel(lease)
            self._not_written[reason] += 1
        tell(put.done, Refusal.IO_ERROR)
        return None

    def _reserve(self, file: _File, name: bytes) -> RowLease | None:
        """Take a row: one that is free, a new one if the file may grow, or another entry's."""
        if not file.rows.num_free and file.slab.growth and time.monotonic() >= self._full_until:
            is_longer = self._grow(file, file.slab.growth) or self._grow(file, 1)
            self._full_until = 0.0 if is_longer else time.monotonic() + _REST_SECONDS
        with self._lock:
            return file.rows.reserve(name)

    def _grow(self, file: _File, count: int) -> bool:
        """Make a file longer; say whether it is. A full disk leaves it as it was."""
        try:
            if not self._make_room(count * file.slab.row_bytes):
                return False
            file.slab.grow(count)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._count_failure()
            return False
        with self._lock:
            file.rows.add_rows(count)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Delete folders of others that nobody uses until so much fits the capacity.

        Returns:
            Whether it does.

        Raises:
            OSError: A folder cannot be read or deleted.
        """
        others = [each for each in folders(self._path) if each.path != self.folder]
        spare = self._capacity - self._disk_bytes() - num_bytes
        taken = sum(each.num_bytes for each in others)
        for other in others:
            if taken <= spare:
                break
            if not other.is_in_use:
                try:
                    remove_folder(other)
                except TierInUseError:  # since it was looked at
                    continue
                taken -= other.num_bytes
        return taken <= spare

    def _read_queued(self) -> None:
        """Read what is queued, one entry at a time, until the tier is closed."""
        while True:
            with self._lock:
                self._load_came.wait_for(lambda: self._loads or self._is_closing)
                if self._is_closing:
                    return
                load = self._loads.popleft()
                self._num_busy += 1
            self._read(load)
            with self._lock:
                self._num_busy -= 1
                self._one_over.notify_all()

    def _read(self, load: _Load) -> None:
        started = time.perf_counter()
        file = self._files[load.expected.key.kind]
        refusal = self._refusal(file, load)
        with self._lock:
            self._read_seconds += time.perf_counter() - started
            if refusal is None:
                self._counts["hits"] += 1
                self._counts["read_bytes"] += len(load.into)
            else:
                self._refused[refusal] += 1
                file.rows.drop(load.lease)
        if refusal not in (None, Refusal.IO_ERROR):
            # Nobody finds it any more, nor when the file is opened again. Before the row is free.
            self._try(lambda: file.slab.erase_header(load.lease.row))
        with self._lock:
            file.rows.release(load.lease)
        tell(load.done, refusal)

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

    def _refusal(self, file: _File, load: _Load) -> Refusal | None:
        """Read a row and say what is wrong with it."""
        found: list[Refusal | None] = []
        if not self._try(lambda: found.append(_read_row(file.slab, load, self._submit))):
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
                if header.facts.key.kind is EntryKind.STATE:
                    self.state_lengths.add(header.facts.prefix_tokens)
        file.rows.adopt(file.slab.num_rows, entries)
        self._counts["recovered"] += len(entries)

    def _header_of(self, file: _File, row: int) -> EntryHeader | Refusal | None:
        """Read a row's header; None if nothing was written to the row."""
        pages: list[bytes] = []
        if not self._try(lambda: pages.append(file.slab.read_header(row))):
            return Refusal.IO_ERROR
        if not any(pages[0]):
            return None
        header = EntryHeader.read(pages[0])
        if isinstance(header, Refusal):
            return header
        return self._recovery_refusal(header, file) or header

    def _recovery_refusal(self, header: EntryHeader, file: _File) -> Refusal | None:
        facts = header.facts
        name = self._name_of(facts.key)
        if name is None:
            return Refusal.IDENTITY
        if self._files[facts.key.kind] is not file:
            return Refusal.KIND
        if facts.payload_bytes != file.slab.payload_bytes:
            return Refusal.PAYLOAD_BYTES
        return None

    def _try(self, call: Callable[[], object]) -> bool:
        """Ask the system for something; say whether it did it. What it refuses is counted."""
        try:
            call()
        except Exception as error:
            self._count_failure()
            if not isinstance(error, OSError):  # a bug, which must not end the thread
                report_error()
            return False
        with self._lock:
            self._failures = 0
            self._rests_until = 0.0
        return True

    def _count_failure(self) -> None:
        with self._lock:
            self._counts["io_errors"] += 1
            self._failures += 1
            if self._failures >= _FAILURES_TO_REST:
                self._rests_until = time.monotonic() + _REST_SECONDS

    def _disk_bytes(self) -> int:
        return sum(file.slab.num_rows * file.slab.row_bytes for file in self._files.values())

    def _close_files(self) -> None:
        for file in self._files.values():
            file.slab.close()
        self._folder_lock.release()


class _File(NamedTuple):
    """A slab and what is in its rows."""

    slab: SlabFile
    rows: _DiskRows


class _Load(NamedTuple):
    """An entry that is to be read."""

    expected: EntryFacts
    lease: RowLease
    into: memoryview
    done: Done


class _Put(NamedTuple):
    """An entry that is to be written."""

    facts: EntryFacts
    name: bytes
    payload: memoryview
    done: Done


class _DiskRows(RowPool):
    """Rows whose entries were there before this process."""

    def adopt(self, num_rows: int, entries: Mapping[int, EntryHeader]) -> None:
        """Take over the rows of a file.

        Args:
            num_rows: How many it has.
            entries: The headers of those that hold an entry, by row; of different names.
        """
        self.add_rows(num_rows)
        empty = []
        for row in range(num_rows):  # the free rows are handed out in this order
            header = entries.get(row)
            name = b"" if header is None else _name(header.facts.key)
            if header is not None:
                self.generations[row] = header.generation - 1
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


def _write_row(slab: SlabFile, lease: RowLease, put: _Put) -> None:
    header = EntryHeader(put.facts, payload_digest(put.payload), lease.generation)
    slab.write(lease.row, header.to_bytes(), put.payload)


def _read_row(slab: SlabFile, load: _Load, submit: Submit) -> Refusal | None:
    """Read a row and compare it with what is looked for: a part is hashed as others come."""
    hasher = payload_hasher()
    header = EntryHeader.read(slab.read(load.lease.row, load.into, submit, hasher.update))
    if isinstance(header, Refusal):
        return header
    refusal = header.refusal(load.expected)
    if refusal is None and header.generation != load.lease.generation:
        refusal = Refusal.GENERATION
    if refusal is None and hasher.digest() != header.payload_digest:
        refusal = Refusal.PAYLOAD_DIGEST
    return refusal


def _name(key: EntryKey) -> bytes:
    """Return what tells an entry from others of its identity, rank and kind."""
    chunk = b"" if key.chunk is None else key.chunk.to_bytes(4, "little")
    return len(key.digest).to_bytes(1, "little") + key.digest + key.tenant + chunk


def _rows_within(
    capacity: int, payload_bytes: Mapping[EntryKind, int], state_share: float
) -> dict[EntryKind, int]:
    """Return the rows of each kind that the capacity holds.

    Raises:
        BudgetError: It does not hold one of each.
        InvalidArgumentError: There is no kind.
    """
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
