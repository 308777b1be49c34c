"""The disk tier: one file for each entry, verified whenever it is read."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    InvariantError,
    TierInUseError,
)
from mamba_cache.tiers.directory import (
    NEW,
    CacheFolder,
    entry_name,
    folders,
    named_entry,
    open_folder,
    open_own_file,
    remove_folder,
)
from mamba_cache.tiers.entry import (
    EntryFacts,
    EntryKey,
    EntryKind,
    EntryMacs,
    Refusal,
    parts_of,
)
from mamba_cache.tiers.identity import CacheIdentity
from mamba_cache.tiers.jobs import (
    REST_SECONDS,
    Done,
    LoadJob,
    PutJob,
    QueuedTier,
    RemovalJob,
    report_error,
)

__all__ = ["PAGE_BYTES", "DiskTier", "file_bytes"]

PAGE_BYTES: Final = 4096
"""Direct input and output move whole pages."""

_NANOSECONDS_PER_TOKEN: Final = 1000

_Submit = Callable[[Callable[[], bytes]], Future[bytes]]
"""Runs a call in another thread."""


class DiskTier(QueuedTier):
    """Entries of one identity, each in a file of its own.

    A file is written under another name and renamed, so it is there whole or not at all. Folders of
    other identities are deleted, the least recently opened first, when all of them would take more
    than ``capacity_bytes``.
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
        write_on_use: int = 2,
        num_readers: int | None = None,
        max_queued: int = 256,
    ) -> None:
        self._capacity = capacity_bytes
        if num_readers is None:  # who reads also makes MACs
            num_readers = max(8, min(16, os.cpu_count() or 1))
        super().__init__(write_on_use=write_on_use, max_queued=max_queued)
        sizes = {EntryKind.STATE: state_bytes, EntryKind.KV: kv_bytes}
        self._payload_bytes = {kind: size for kind, size in sizes.items() if size}
        self._file_bytes = {kind: file_bytes(size) for kind, size in self._payload_bytes.items()}
        if not self._file_bytes:
            raise InvalidArgumentError("give state_bytes, kv_bytes or both; both are 0")
        if self._capacity < (needed := sum(self._file_bytes.values())):
            raise BudgetError(
                f"a capacity of {capacity_bytes} bytes is too small: one entry of each kind takes "
                f"{needed} bytes"
            )
        self._path, self._identity = Path(path).expanduser(), identity
        self._macs = EntryMacs(secret)
        self._entries: OrderedDict[EntryKey, None] = OrderedDict()  # least recently used first
        self._num: Counter[EntryKind] = Counter()
        # Not an executor: those take nothing any more, with loads under way, as a process ends.
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._others: list[CacheFolder] = []
        self._looks_at = 0.0  # when folders of other identities are listed again
        self._full_until = 0.0
        self.folder, self._folder_lock = open_folder(self._path, identity)
        try:
            self._recover()
        except BaseException:
            self._folder_lock.release()
            raise
        self._callers = self._start(*[self._make_calls] * num_readers)  # for the parts of entries
        self._threads = self._start(self._write_queued, *[self._read_queued] * num_readers)

    @property
    def _takes_calls(self) -> bool:
        """Whether it takes calls now: not after errors of the disk, for some seconds each time."""
        return not self._is_closing and self._rest_left is None

    def _find(self, keys: Sequence[EntryKey]) -> list[bool]:
        found = [key in self._entries for key in keys]
        for key, is_there in zip(reversed(keys), reversed(found), strict=True):
            if is_there:  # of one prefix: its start was used last
                self._entries.move_to_end(key)
        return found

    def _absence(self, key: EntryKey) -> Refusal | None:
        if not self._is_own(key):
            return Refusal.IDENTITY
        return None if key in self._entries else Refusal.MISSING

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored, as ``QueuedTier`` says."""
        self._check_size(facts, payload)
        if not self._is_own(facts.key):
            raise InvalidArgumentError(f"{facts.key} is of another identity than the disk cache's")
        return super().put(facts, payload, done)

    def _remove_soon(self, key: EntryKey) -> None:
        if self._is_own(key):
            self._forget(key)
            # Where files are written: what is put from now on is written later.
            self._removals.append(RemovalJob(None, key))
            self._put_came.notify()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        for _ in self._callers:  # now that nobody waits for parts
            self._calls.put(None)
        for caller in self._callers:
            caller.join()
        self._folder_lock.release()

    def _own_stats(self) -> dict[str, Any]:
        return {
            "entries": {kind.name.lower(): self._num[kind] for kind in self._file_bytes},
            "row_bytes": {kind.name.lower(): size for kind, size in self._file_bytes.items()},
            "disk_bytes": self._bytes,
            "recovered": self._counts["recovered"],
            "evicted": self._counts["evicted"],
            "io_errors": self._counts["io_errors"],
        }

    def check_invariants(self) -> None:
        """Prove that the bookkeeping agrees with itself."""
        with self._lock:
            super().check_invariants()
            if +self._num != Counter(key.kind for key in self._entries):
                raise InvariantError(f"entries are counted wrong: {self._num}")

    @property
    def _bytes(self) -> int:
        return sum(self._num[kind] * size for kind, size in self._file_bytes.items())

    def _is_own(self, key: EntryKey) -> bool:
        """Say whether an entry is of this identity."""
        return key.identity == self._identity.digest and key.rank == self._identity.rank

    def _check_size(self, facts: EntryFacts, payload: memoryview) -> None:
        """Check that an entry has the size of its kind."""
        expected = self._payload_bytes.get(facts.key.kind)
        if facts.payload_bytes != expected or len(payload) != expected:
            raise InvalidArgumentError(
                f"a {facts.key.kind.name.lower()} must have {expected} bytes in this disk cache, "
                f"got {facts.payload_bytes} in a buffer of {len(payload)}"
            )

    def _path_of(self, key: EntryKey) -> Path:
        return self.folder / entry_name(key)

    def _remember(self, key: EntryKey) -> None:
        self._entries[key] = None
        self._num[key.kind] += 1

    def _forget(self, key: EntryKey) -> None:
        """Make an entry unfindable."""
        if key in self._entries:
            del self._entries[key]
            self._num[key.kind] -= 1

    def _write_queued(self) -> None:
        """Remove and write what is queued, one entry at a time, until the tier is closed."""
        while jobs := self._wait(
            self._put_came, lambda: self._take(self._removals) or self._take_puts(1)
        ):
            self._write(jobs.pop())  # a list would hold the caller's buffer
        self._end_queued()

    def _read_queued(self) -> None:
        """Read what is queued, one entry at a time, until the tier is closed."""
        while loads := self._wait(self._load_came, lambda: self._take(self._loads)):
            self._read(loads.pop())
        self._end_queued()

    def _end_queued(self) -> None:
        """End what is queued, for the tier is closed: only what is wrong is still removed."""
        for job in self._take_queued():
            if isinstance(job, RemovalJob):
                self._write(job)
            else:
                self._end(job, Refusal.ABORTED, "aborted")

    def _write(self, job: PutJob | RemovalJob) -> None:
        """Write the file of an entry, or delete it."""
        if isinstance(job, RemovalJob):
            self._delete(job.entry)
            self._end(job)
            return
        failure = self._write_file(job)
        with self._lock:
            is_wrong = job.is_revoked
            if failure is None and not is_wrong:
                self._remember(job.facts.key)
        if is_wrong:
            self._delete(job.facts.key)
        self._end(job, None if failure is None else Refusal.IO_ERROR, failure)

    def _write_file(self, put: PutJob) -> str | None:
        """Write the file of an entry; return why that failed."""
        facts = put.facts
        if time.monotonic() < self._full_until:
            return "disk_full"

        def write() -> None:
            self._make_room(self._file_bytes[facts.key.kind])
            payload = put.payload
            parts = (payload[part] for part in parts_of(len(payload)))
            header = self._macs.seal(facts, parts)
            _write_entry(self._path_of(facts.key), header, payload, facts.prefix_tokens)

        return self._try(write)

    def _make_room(self, num_bytes: int) -> None:
        """Delete other identities' folders, then the oldest entries, until so much fits."""
        if time.monotonic() >= self._looks_at:
            self._others = [each for each in folders(self._path) if each.path != self.folder]
            self._looks_at = time.monotonic() + REST_SECONDS
        for other in list(self._others):
            if self._fits(num_bytes):
                return
            with suppress(TierInUseError, InvalidArgumentError, OSError):
                remove_folder(other)
                self._others.remove(other)
        while not self._fits(num_bytes):
            with self._lock:
                key = next(iter(self._entries), None)
                if key is None:
                    raise OSError(errno.ENOSPC, "other processes use the capacity")
                self._forget(key)
                self._counts["evicted"] += 1
            self._delete(key)

    def _fits(self, num_bytes: int) -> bool:
        """Say whether the capacity has room for so much."""
        taken = self._bytes + sum(other.num_bytes for other in self._others)
        return taken + num_bytes <= self._capacity

    def _delete(self, key: EntryKey) -> None:
        """Delete a file, if it is there; who reads it goes on."""
        try:
            self._path_of(key).unlink(missing_ok=True)
        except OSError as error:
            self._count_error(error)

    def _read(self, load: LoadJob) -> None:
        """Read and verify an entry; what is wrong is removed."""
        found: list[Refusal | None] = []
        failure = self._try(lambda: found.append(self._read_file(load)))
        refusal = found[0] if failure is None else Refusal.IO_ERROR
        if refusal is not None:
            with self._lock:
                self._remove_soon(load.expected.key)
        self._end(load, refusal)

    def _read_file(self, load: LoadJob) -> Refusal | None:
        """Read a file and compare it with what is looked for: who reads a part makes its MAC."""
        key, into = load.expected.key, load.into
        try:
            fd = _open_entry(self._path_of(key), os.O_RDONLY, into)
        except FileNotFoundError:  # evicted since, or somebody deleted it
            return Refusal.MISSING
        try:
            mac = self._macs.open(_read_page(fd), load.expected)
            if isinstance(mac, Refusal):
                return mac
            macs = _read_payload(fd, into, self._submit, mac.part)
            if not all(macs):
                return Refusal.SHORT
            if not mac.vouches_for(macs):
                return Refusal.MAC
            _use(fd, load.expected.prefix_tokens)
            return None
        finally:
            os.close(fd)

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have a thread that makes calls make one."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def _make_calls(self) -> None:
        """Make calls, one at a time, until there comes None."""
        while (submitted := self._calls.get()) is not None:
            future, call = submitted
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del submitted, future, call  # they hold the caller's buffer

    def _recover(self) -> None:
        """Find the entries of the folder by their names; they are verified when they are read."""
        found = []
        for file in os.scandir(self.folder):
            key = named_entry(self._identity, file.name)
            if key is None or key.rank != self._identity.rank:
                continue
            status = file.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            if status.st_size == PAGE_BYTES + self._payload_bytes.get(key.kind, 0):
                found.append((status.st_mtime_ns, file.name, key))
            else:
                os.unlink(file)
        for _, _, key in sorted(found):
            self._remember(key)
        self._counts["recovered"] = len(found)

    def _try(self, call: Callable[[], object]) -> str | None:
        """Ask the system for something; say why it did not do it. What it refuses is counted."""
        try:
            call()
        except Exception as error:
            if not isinstance(error, (OSError, InvalidArgumentError)):
                report_error()  # a bug, which must not end the thread
            return self._count_error(error)
        with self._lock:
            self._count_success()
        return None

    def _count_error(self, error: Exception) -> str:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            self._full_until = time.monotonic() + REST_SECONDS  # what is there can still be read
            return "disk_full"
        with self._lock:
            self._counts["io_errors"] += 1
            self._count_failure()
        return "io_error"


def file_bytes(payload_bytes: int) -> int:
    """Return the bytes of one file: a page for the header, and the pages of the payload."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def _open_entry(path: Path, flags: int, payload: memoryview) -> int:
    """Open a file past the page cache, if its file system and the payload's address allow it."""
    address = np.frombuffer(payload, np.uint8).ctypes.data
    if not (address % PAGE_BYTES or len(payload) % PAGE_BYTES):
        try:
            return open_own_file(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return open_own_file(path, flags)


def _write_entry(path: Path, header: bytes, payload: memoryview, prefix_tokens: int) -> None:
    """Write a file, and publish it by a rename.

    It does not wait for the disk: what a power cut leaves of a file is refused when it is read.
    """
    page = _page()
    page[: len(header)] = header
    new = path.with_name(path.name + NEW)
    fd = _open_entry(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, payload)
    try:
        missing = _transfer(os.pwritev, fd, [page, payload], 0)
        if missing:
            raise OSError(errno.EIO, f"{missing} bytes of an entry were not written")
        _use(fd, prefix_tokens)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
    finally:
        os.close(fd)


def _use(fd: int, prefix_tokens: int) -> None:
    """Record that an entry is used now; the end of a prefix counts as older than its start."""
    used_at = time.time_ns() - _NANOSECONDS_PER_TOKEN * prefix_tokens
    os.utime(fd, ns=(used_at, used_at))


def _read_page(fd: int) -> bytes:
    """Read the page with the header; less than a page if the file ends before."""
    page = _page()
    missing = _transfer(os.preadv, fd, [page], 0)
    return bytes(page[: PAGE_BYTES - missing])


def _read_payload(
    fd: int, into: memoryview, submit: _Submit, seen: Callable[[int, memoryview], bytes]
) -> list[bytes]:
    """Read a payload, and return what ``seen`` gives for each part; b"" for a part cut short.

    Nothing writes to ``into`` any more when it returns or raises.
    """
    parts = parts_of(len(into))

    def read_part(number: int) -> bytes:
        part = into[parts[number]]
        missing = _transfer(os.preadv, fd, [part], PAGE_BYTES + parts[number].start)
        return b"" if missing else seen(number, part)

    if len(parts) == 1:
        return [read_part(0)]
    reads: deque[Future[bytes]] = deque()
    found = []
    try:
        for number in range(len(parts)):
            reads.append(submit(partial(read_part, number)))
        while reads:  # an error must not be found by way of itself: it holds the buffer
            found.append(reads.popleft().result())
    finally:
        wait([read for read in reads if not read.cancel()])
    return found


def _page() -> memoryview:
    """Return a page of zeroes at an address that direct reads and writes take."""
    return memoryview(mmap.mmap(-1, PAGE_BYTES))


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: list[memoryview],
    offset: int,
) -> int:
    """Read or write buffers one after the other; return how many bytes were not moved."""
    left = sum(len(buffer) for buffer in buffers)
    while left:
        moved = call(fd, buffers, offset)
        left -= moved
        if moved % PAGE_BYTES or not moved:
            break
        offset += moved
        while buffers and moved >= len(buffers[0]):
            moved -= len(buffers.pop(0))
        if moved:
            buffers[0] = buffers[0][moved:]
    return left
