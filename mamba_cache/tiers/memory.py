"""Host memory for the rows of a tier, pinned where a GPU copies from it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["ROW_ALIGNMENT", "Pinner", "RowMemory", "plain_slab"]

ROW_ALIGNMENT = 4096
"""Addresses and sizes of rows are multiples of this, as direct input and output need."""

_SLAB_BYTES = 2**28
_HUGE_PAGE = 2**21
_PAGE = 4096
_MAX_THREADS = 12
_SPARE_CORES = 2
"""Cores that the touching threads leave to other work."""
_PINNING_THREADS = 4
_TOUCHED_BYTES = 2**25
"""Bytes that a thread touches in one task."""


class RowMemory:
    """Rows of one size, in slabs that are added one after the other.

    A slab has at most a quarter of a GiB, or one row. So the first rows are there soon, and other
    driver calls, such as a forward's, wait for a short time only while a slab is pinned.
    """

    def __init__(
        self, row_bytes: int, checksums: slice, num_rows: int, *, slab_bytes: int = _SLAB_BYTES
    ) -> None:
        self.row_bytes, self.num_rows = row_bytes, num_rows
        self.checksums = checksums  # slice of a row, behind its payload
        self.rows_per_slab = max(1, slab_bytes // row_bytes)
        self.num_ready = 0
        self._addresses: list[int] = []
        self._arrays: list[npt.NDArray[np.uint8]] = []

    @property
    def num_slabs(self) -> int:
        """Number of slabs once all are added."""
        return -(-self.num_rows // self.rows_per_slab)

    def slab_bytes(self, index: int) -> int:
        """Return the size of a slab."""
        first = index * self.rows_per_slab
        return min(self.rows_per_slab, self.num_rows - first) * self.row_bytes

    def add_slab(self, slab: torch.Tensor) -> int:
        """Add the next slab, [bytes] uint8; return its number of rows."""
        rows = slab.view(-1, self.row_bytes)
        self._addresses.append(rows.data_ptr())
        self._arrays.append(rows.numpy())
        self.num_ready += rows.shape[0]
        return rows.shape[0]

    def array(self, row: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a row in a slab that was added, [row_bytes]."""
        slab, index = divmod(row, self.rows_per_slab)
        array: npt.NDArray[np.uint8] = self._arrays[slab][index]
        return array

    def address(self, row: int) -> int:
        """Return the address of a row in a slab that was added."""
        slab, index = divmod(row, self.rows_per_slab)
        return self._addresses[slab] + index * self.row_bytes

    def row(self, row: int) -> torch.Tensor:
        """Return a row as a tensor, which takes longer than ``array``."""
        return torch.from_numpy(self.array(row))


def plain_slab(num_bytes: int) -> torch.Tensor:
    """Return memory that is not pinned, [num_bytes] uint8, zero; first use allocates its pages."""
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8))


class Pinner:
    """Makes pinned slabs in threads of its own, so that callers need not wait.

    Slabs are in huge pages where the system has them. Many threads touch a slab before its pinning:
    the driver alone would touch page by page, which takes many times as long. The next slabs are
    touched while one is pinned.
    """

    def __init__(self, pin: Callable[[int, int], object], unpin: Callable[[int], object]) -> None:
        self._pin = pin
        count = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) - _SPARE_CORES))
        name = "mamba-cache-pin"
        self._touching = ThreadPoolExecutor(count, thread_name_prefix=f"{name}-touch")
        self._pinning = ThreadPoolExecutor(_PINNING_THREADS, thread_name_prefix=name)
        self._pinned: dict[int, Any] = {}  # pinned slabs by address; keeps their memory alive
        threads = self._touching, self._pinning
        self.close = finalize(self, _close, threads, self._pinned, unpin)

    def make(self, num_bytes: int) -> Future[torch.Tensor]:
        """Begin to make a slab, [num_bytes] uint8."""
        # The threads hold no reference to this object, so it can be collected while they work.
        return self._pinning.submit(
            _make_pinned, num_bytes, self._pin, self._pinned, self._touching
        )


def _make_pinned(
    num_bytes: int,
    pin: Callable[[int, int], object],
    pinned: dict[int, Any],
    touching: ThreadPoolExecutor,
) -> torch.Tensor:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=private)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
    start = -array.ctypes.data % _HUGE_PAGE
    slab = array[start : start + num_bytes]
    parts = [slab[first : first + _TOUCHED_BYTES] for first in range(0, num_bytes, _TOUCHED_BYTES)]
    list(touching.map(_touch, parts))
    pin(slab.ctypes.data, num_bytes)
    pinned[slab.ctypes.data] = slab
    return torch.from_numpy(slab)


def _touch(part: npt.NDArray[np.uint8]) -> None:
    part[::_PAGE] = 0  # numpy releases the GIL


def _close(
    threads: Sequence[ThreadPoolExecutor], pinned: dict[int, Any], unpin: Callable[[int], object]
) -> None:
    for each in threads:
        each.shutdown(wait=True, cancel_futures=True)
    for address in list(pinned):
        unpin(address)
        del pinned[address]
