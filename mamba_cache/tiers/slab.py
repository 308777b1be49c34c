"""Slab files: rows of one size, each an entry's header and its payload."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial
from pathlib import Path
from typing import Final
from weakref import finalize

import numpy as np

from mamba_cache.tiers.directory import open_own_file
from mamba_cache.tiers.entry import parts_of

__all__ = ["PAGE_BYTES", "SlabFile", "Submit", "row_bytes_of"]

PAGE_BYTES: Final = 4096
"""Rows begin at multiples of it, because direct input and output move whole pages."""

_GROWTH_BYTES: Final = 256 * 2**20
Submit = Callable[[Callable[[], int]], Future[int]]
"""Has a call made by another thread, and gives what will hold its result."""


def row_bytes_of(payload_bytes: int) -> int:
    """Return the bytes of one row: a page for the header, and the pages of the payload."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


class _Buffers(threading.local):
    """Memory of each thread, at addresses that direct reads and writes take."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        pages = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        self.pages = pages[:PAGE_BYTES], pages[PAGE_BYTES:]

    @cached_property
    def row(self) -> memoryview:
        """A row, for payloads at an address that is no page's."""
        return memoryview(mmap.mmap(-1, self._row_bytes))


class SlabFile:
    """A file of rows. Any thread may read and write them; who may use which is not decided here.

    With ``O_DIRECT``, where the file system has it, nothing goes through the page cache: entries
    are read once in a while, and would only push out what others need of it.
    """

    def __init__(self, path: Path, payload_bytes: int, *, max_rows: int) -> None:
        self.payload_bytes = payload_bytes
        self.row_bytes = row_bytes_of(payload_bytes)
        self.max_rows = max_rows
        self._buffers = _Buffers(self.row_bytes)
        self._fd, self.is_direct = _open(path)
        try:
            if os.fstat(self._fd).st_size > max_rows * self.row_bytes:
                os.ftruncate(self._fd, max_rows * self.row_bytes)
            self.num_rows = os.fstat(self._fd).st_size // self.row_bytes
        except OSError:
            os.close(self._fd)
            raise
        self._closes = finalize(self, os.close, self._fd)

    @property
    def growth(self) -> int:
        """How many rows it is best made longer by; 0 if the file is as large as it may be."""
        step = max(1, _GROWTH_BYTES // self.row_bytes)
        return min(step, self.max_rows - self.num_rows)

    def grow(self, count: int) -> None:
        """Add rows whose room on the disk is taken at once, so that it cannot be full later."""
        end = (self.num_rows + count) * self.row_bytes
        try:
            os.posix_fallocate(self._fd, 0, end)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            os.ftruncate(self._fd, end)  # the file system takes no room ahead
        self.num_rows += count

    def write(self, row: int, header: bytes, payload: memoryview) -> None:
        """Write a row. It is on the disk after ``sync``."""
        first, last = self._buffers.pages
        first[:] = header.ljust(PAGE_BYTES, b"\0")
        body, rest = self._split(payload)
        if self._is_unaligned(body):
            whole = self._buffers.row[: len(body)]
            whole[:] = body
            body = whole
        buffers = [first, *([body] if len(body) else [])]
        if len(rest):
            last[:] = bytes(rest).ljust(PAGE_BYTES, b"\0")
            buffers.append(last)
        missing = _transfer(os.pwritev, self._fd, buffers, row * self.row_bytes)
        if missing:
            raise OSError(errno.EIO, f"{missing} bytes of a row were not written")

    def read(
        self,
        row: int,
        into: memoryview,
        submit: Submit | None = None,
        seen: Callable[[int, memoryview], object] | None = None,
    ) -> bytes:
        """Read a row, in parts. Nothing writes to ``into`` any more when it returns or raises."""
        parts = parts_of(len(into))
        if submit is None or len(parts) == 1:
            submit = _call_at_once
        first, last = self._buffers.pages
        body, rest = self._split(into)
        target = self._buffers.row[: len(body)] if self._is_unaligned(body) else body

        def read_part(number: int) -> int:
            start = parts[number].start
            part, pages = into[parts[number]], target[parts[number]]
            buffers = [pages] if len(pages) else []
            if start == 0:
                buffers.insert(0, first)
            if len(pages) < len(part):
                buffers.append(last)
            offset = row * self.row_bytes + (PAGE_BYTES + start if start else 0)
            if missing := _transfer(os.preadv, self._fd, buffers, offset):
                return missing
            if target is not body:
                part[: len(pages)] = pages
            if len(pages) < len(part):
                rest[:] = last[: len(rest)]
            if seen is not None:
                seen(number, part)
            return 0

        reads: deque[Future[int]] = deque()
        try:
            for number in range(len(parts)):
                reads.append(submit(partial(read_part, number)))
            missing = 0
            while reads:  # an error must not be found by way of itself: it holds the buffer
                missing += reads.popleft().result()
        finally:
            wait([read for read in reads if not read.cancel()])
        return b"" if missing else bytes(first)

    def read_header(self, row: int) -> bytes:
        """Read the page with a row's header; less than a page if the file ends before."""
        first, _ = self._buffers.pages
        missing = _transfer(os.preadv, self._fd, [first], row * self.row_bytes)
        return bytes(first[: PAGE_BYTES - missing])

    def erase_header(self, row: int) -> None:
        """Write zeroes over a row's header, so that nobody finds the entry when it is opened."""
        first, _ = self._buffers.pages
        first[:] = bytes(PAGE_BYTES)
        if _transfer(os.pwritev, self._fd, [first], row * self.row_bytes):
            raise OSError(errno.EIO, "a header was not erased")

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file, if it was not."""
        self._closes()

    def _split(self, payload: memoryview) -> tuple[memoryview, memoryview]:
        """Split a payload into whole pages and the rest."""
        end = len(payload) // PAGE_BYTES * PAGE_BYTES
        return payload[:end], payload[end:]

    def _is_unaligned(self, body: memoryview) -> bool:
        return self.is_direct and np.frombuffer(body, np.uint8).ctypes.data % PAGE_BYTES != 0


def _call_at_once(call: Callable[[], int]) -> Future[int]:
    """Stand for ``submit`` where there are no other threads."""
    future: Future[int] = Future()
    future.set_result(call())
    return future


def _open(path: Path) -> tuple[int, bool]:
    """Open a file past the page cache if its file system lets us."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return open_own_file(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return open_own_file(path, flags), False


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: list[memoryview],
    offset: int,
) -> int:
    """Read or write buffers one behind the other."""
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
