"""The disk as a store of blobs: one file holds the header and the chunks of an entry."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    InvariantError,
    TierInUseError,
)
from mamba_cache.stores import BlobStore, StoreFault, StoreHealth
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
from mamba_cache.tiers.entry import EntryKind, prefix_tokens_in
from mamba_cache.tiers.identity import CacheIdentity

__all__ = ["PAGE_BYTES", "DiskStore", "file_bytes"]

PAGE_BYTES: Final = 4096
"""Size of a page: direct input and output move whole pages."""

_CHUNK_BYTES: Final = 4 * 2**20
_KEY_PARTS: Final = 6
_NANOSECONDS_PER_TOKEN: Final = 1000
_PAUSE_SECONDS: Final = 5.0


class DiskStore(BlobStore):
    """Entries of one identity, each in a file of its own; other blobs are refused.

    A file is written under a temporary name, its header last, and then renamed: it is there whole
    or not at all. If all folders would take more than ``capacity_bytes``, folders of other
    identities are deleted, the least recently opened first; then the least recently used entries.
    ``exists_many`` answers from memory, and marks the entries that it finds as used.
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
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._capacity, self.chunk_bytes = capacity_bytes, chunk_bytes
        sizes = {EntryKind.STATE: state_bytes, EntryKind.KV: kv_bytes}
        self._payload_bytes = {kind: size for kind, size in sizes.items() if size}
        self._file_bytes = {kind: file_bytes(size) for kind, size in self._payload_bytes.items()}
        if not self._file_bytes:
            raise InvalidArgumentError("give state_bytes, kv_bytes or both; both are 0")
        if capacity_bytes < (needed := sum(self._file_bytes.values())):
            raise BudgetError(
                f"a capacity of {capacity_bytes} bytes is too small: one entry of each kind takes "
                f"{needed} bytes"
            )
        self._path, self._identity = Path(path).expanduser(), identity
        self._lock = threading.Lock()  # guards the entries and their counts
        self._entries: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._num: Counter[EntryKind] = Counter()  # number of entries by kind
        self._num_recovered = self._num_evicted = 0
        self._others: list[CacheFolder] = []
        self._relist_at = 0.0  # when folders of other identities are listed again
        self._full_until = 0.0
        self.folder, self._folder_lock = open_folder(self._path, identity)
        try:
            self._recover()
        except BaseException:
            self._folder_lock.release()
            raise

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Return which entries can be found, by the key of any part, without waiting."""
        entries = [_parts_of(key)[0] for key in keys]
        with self._lock:
            for entry in reversed(entries):
                if entry in self._entries:  # in reverse, so that a prefix's start is evicted last
                    self._entries.move_to_end(entry)
            return [None if each in self._entries else StoreFault.MISSING for each in entries]

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """Write the file of one entry: its chunks and, last, its header. One thread at a time.

        The file is not flushed: a file that a power cut damaged is refused when it is read. Only
        the header's answer can be a fault.
        """
        entry = keys[-1]
        with self._lock:
            is_there = entry in self._entries  # an entry is not overwritten
        fault: StoreFault | None = None
        if not is_there and time.monotonic() < self._full_until:
            fault = StoreFault.DISK_FULL
        elif not is_there:
            fault = self._fault_in(partial(self._write, entry, buffers))
            fault = StoreFault.IO_ERROR if fault is StoreFault.MISSING else fault  # folder is gone
        return [*[None] * (len(keys) - 1), fault]

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """Read headers and chunks straight into the buffers; fewer bytes if a file is too short."""
        return [self._get(*_parts_of(key), each) for key, each in zip(keys, buffers, strict=True)]

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Remove the files of the headers among the keys; reads under way go on."""
        entries = [(entry, number is None) for entry, number in map(_parts_of, keys)]
        return [
            self._fault_in(partial(self._remove, entry)) if is_header else None
            for entry, is_header in entries
        ]

    def health(self) -> StoreHealth:
        """Check that the folder is there."""
        fault = self._fault_in(self.folder.stat)
        return StoreHealth(fault, str(self.folder))

    def close(self) -> None:
        """Unlock the folder for other processes."""
        self._folder_lock.release()

    def stats(self) -> dict[str, Any]:
        """Return the fields of ``TierStats`` that only a disk has."""
        # Without the lock, which a fork may have left held; the copy is atomic.
        found, sizes = Counter(dict(self._num)), self._file_bytes
        return {
            "entries": {kind.name.lower(): found[kind] for kind in sizes},
            "row_bytes": {kind.name.lower(): size for kind, size in sizes.items()},
            "disk_bytes": sum(found[kind] * size for kind, size in sizes.items()),
            "recovered": self._num_recovered,
            "evicted": self._num_evicted,
        }

    def check_invariants(self) -> None:
        """Check that the bookkeeping is consistent."""
        with self._lock:
            if +self._num != Counter(map(_kind_of, self._entries)):
                raise InvariantError(f"entries are counted wrong: {self._num}")

    @property
    def _bytes(self) -> int:
        return sum(self._num[kind] * size for kind, size in self._file_bytes.items())

    def _path_of(self, entry: str) -> Path:
        if entry.split("/")[1] != self._identity.digest.hex():
            raise FileNotFoundError(errno.ENOENT, f"{entry} is of another identity")
        return self.folder / entry_name(entry)

    def _write(self, entry: str, parts: Sequence[memoryview]) -> None:
        """Write a file under a temporary name; the renaming publishes the entry."""
        path, flags = self._path_of(entry), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._make_room(_kind_of(entry))
        try:
            for number, part in enumerate(parts, 1):
                is_header = number == len(parts)
                offset = 0 if is_header else PAGE_BYTES + (number - 1) * self.chunk_bytes
                content = _page(part) if is_header else part
                fd, flags = self._open(_new(path), flags, content), os.O_WRONLY
                try:
                    if missing := _transfer(os.pwritev, fd, content, offset):
                        raise OSError(errno.EIO, f"{missing} bytes of an entry were not written")
                    if is_header:
                        _use(fd, part)
                finally:
                    os.close(fd)
            os.replace(_new(path), path)
        except (OSError, InvalidArgumentError):
            with suppress(OSError):
                os.unlink(_new(path))
            raise
        with self._lock:
            self._entries[entry] = None
            self._num[_kind_of(entry)] += 1

    def _get(self, entry: str, number: int | None, into: memoryview) -> int | StoreFault:
        found: list[int] = []
        fault = self._fault_in(lambda: found.append(self._read(entry, number, into)))
        if fault is StoreFault.MISSING:  # the file was deleted
            with suppress(OSError):
                self._remove(entry)
        return found[0] if fault is None else fault

    def _read(self, entry: str, number: int | None, into: memoryview) -> int:
        content = _page() if number is None else into
        fd = self._open(self._path_of(entry), os.O_RDONLY, content)
        try:
            offset = 0 if number is None else PAGE_BYTES + number * self.chunk_bytes
            num_read = len(content) - _transfer(os.preadv, fd, content, offset)
            if number is None:
                into[:] = content[: len(into)]
                num_read = min(num_read, len(into))
                if num_read == len(into):
                    _use(fd, into)
            return num_read
        finally:
            os.close(fd)

    def _open(self, path: Path, flags: int, blob: memoryview) -> int:
        """Open a file without the page cache, if file system, blob address and size allow it."""
        address = np.frombuffer(blob, np.uint8).ctypes.data
        if not (address % PAGE_BYTES or len(blob) % PAGE_BYTES):
            try:
                return open_own_file(path, flags | os.O_DIRECT, self._folder_lock.folder_fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return open_own_file(path, flags, self._folder_lock.folder_fd)

    def _remove(self, entry: str) -> None:
        with self._lock:
            if entry in self._entries:
                del self._entries[entry]
                self._num[_kind_of(entry)] -= 1
        self._path_of(entry).unlink(missing_ok=True)

    def _make_room(self, kind: EntryKind) -> None:
        """Delete other identities' folders, then the oldest entries, until an entry fits."""
        if time.monotonic() >= self._relist_at:
            self._others = [each for each in folders(self._path) if each.path != self.folder]
            self._relist_at = time.monotonic() + _PAUSE_SECONDS
        for other in list(self._others):
            if self._fits(kind):
                return
            with suppress(TierInUseError, InvalidArgumentError, OSError):
                remove_folder(other)
                self._others.remove(other)
        while not self._fits(kind):
            with self._lock:
                oldest = next(iter(self._entries), None)
                self._num_evicted += oldest is not None
            if oldest is None:
                raise OSError(errno.ENOSPC, "other processes use the capacity")
            self._remove(oldest)

    def _fits(self, kind: EntryKind) -> bool:
        """Return whether the capacity has room for one more entry."""
        taken = self._bytes + sum(other.num_bytes for other in self._others)
        return taken + self._file_bytes[kind] <= self._capacity

    def _recover(self) -> None:
        """Find the entries of the folder by their file names; reads verify them later."""
        found = []
        for file in os.scandir(self.folder):
            key = named_entry(self._identity, file.name)
            if key is None or key.rank != self._identity.rank:
                continue
            status = file.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            if status.st_size == PAGE_BYTES + self._payload_bytes.get(key.kind, 0):
                found.append((status.st_mtime_ns, str(key), key.kind))
            else:
                os.unlink(file)
        for _, entry, kind in sorted(found, key=lambda each: each[:2]):
            self._entries[entry] = None
            self._num[kind] += 1
        self._num_recovered = len(found)

    def _fault_in(self, call: Callable[[], object]) -> StoreFault | None:
        """Call the system; return the fault if the call fails."""
        try:
            call()
        except FileNotFoundError:  # evicted or deleted meanwhile
            return StoreFault.MISSING
        except (OSError, InvalidArgumentError) as error:
            if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
                return StoreFault.IO_ERROR
            self._full_until = time.monotonic() + _PAUSE_SECONDS  # pauses writes, not reads
            return StoreFault.DISK_FULL
        return None


def file_bytes(payload_bytes: int) -> int:
    """Return the size of a file: a page for the header, and the pages of the payload."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def _parts_of(key: str) -> tuple[str, int | None]:
    """Return a blob's entry and the number of its chunk; None instead of a number: the header."""
    parts = key.split("/")
    if len(parts) == _KEY_PARTS:
        return key, None
    return "/".join(parts[:_KEY_PARTS]), int(parts[-1])


def _kind_of(entry: str) -> EntryKind:
    return EntryKind(entry.split("/")[3])


def _new(path: Path) -> Path:
    """Return the temporary path of a file."""
    return path.with_name(path.name + NEW)


def _use(fd: int, header: memoryview) -> None:
    """Record a use in the file's time; the end of a prefix counts as older than its start."""
    used_at = time.time_ns() - _NANOSECONDS_PER_TOKEN * prefix_tokens_in(header)
    os.utime(fd, ns=(used_at, used_at))


def _page(content: memoryview | bytes = b"") -> memoryview:
    """Return a page that is aligned for direct reads and writes: the content, then zeroes."""
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    page[: len(content)] = content
    return page


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffer: memoryview,
    offset: int,
) -> int:
    """Read or write a buffer, in as many calls as needed; return the bytes that were not moved."""
    done = 0
    while done < len(buffer):
        moved = call(fd, [buffer[done:]], offset + done)
        done += moved
        if moved % PAGE_BYTES or not moved:
            break
    return len(buffer) - done
