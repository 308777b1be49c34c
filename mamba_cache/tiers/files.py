"""The file of a disk entry: a page with its header, then its payload, read in parts."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from mamba_cache.tiers.directory import NEW, open_own_file
from mamba_cache.tiers.entry import parts_of

__all__ = ["PAGE_BYTES", "Submit", "file_bytes", "open_entry", "read_page", "read_payload", "use",
           "write_entry"]  # fmt: skip

PAGE_BYTES: Final = 4096
"""Direct input and output move whole pages."""

_NANOSECONDS_PER_TOKEN: Final = 1000

Submit = Callable[[Callable[[], bytes]], Future[bytes]]
"""Runs a call in another thread."""


def file_bytes(payload_bytes: int) -> int:
    """Return the bytes of one file: a page for the header, and the pages of the payload."""
    return PAGE_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def open_entry(path: Path, flags: int, payload: memoryview) -> int:
    """Open a file past the page cache, if its file system and the payload's address allow it."""
    address = np.frombuffer(payload, np.uint8).ctypes.data
    if not (address % PAGE_BYTES or len(payload) % PAGE_BYTES):
        try:
            return open_own_file(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return open_own_file(path, flags)


def write_entry(path: Path, header: bytes, payload: memoryview, prefix_tokens: int) -> None:
    """Write a file, and publish it by a rename.

    It does not wait for the disk: what a power cut leaves of a file is refused when it is read.
    """
    page = _page()
    page[: len(header)] = header
    new = path.with_name(path.name + NEW)
    fd = open_entry(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, payload)
    try:
        missing = _transfer(os.pwritev, fd, [page, payload], 0)
        if missing:
            raise OSError(errno.EIO, f"{missing} bytes of an entry were not written")
        use(fd, prefix_tokens)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
    finally:
        os.close(fd)


def use(fd: int, prefix_tokens: int) -> None:
    """Record that an entry is used now; the end of a prefix counts as older than its start."""
    used_at = time.time_ns() - _NANOSECONDS_PER_TOKEN * prefix_tokens
    os.utime(fd, ns=(used_at, used_at))


def read_page(fd: int) -> bytes:
    """Read the page with the header; less than a page if the file ends before."""
    page = _page()
    missing = _transfer(os.preadv, fd, [page], 0)
    return bytes(page[: PAGE_BYTES - missing])


def read_payload(
    fd: int, into: memoryview, submit: Submit, seen: Callable[[int, memoryview], bytes]
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
