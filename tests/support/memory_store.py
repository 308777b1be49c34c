"""A store in this process's memory, for tests and as a baseline for other stores."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mamba_cache.stores import BlobStore, StoreFault, StoreHealth

__all__ = ["MemoryStore", "check_blobs", "check_keys"]


def check_keys(keys: Sequence[str]) -> None:
    """Check a tier's contract for keys: printable ASCII, each once in a call."""
    assert not isinstance(keys, str)
    for key in keys:
        assert isinstance(key, str)
        assert 0 < len(key) <= 512
        assert key.isascii()
        assert key.isprintable()
        assert " " not in key
    assert len(set(keys)) == len(keys)


def check_blobs(keys: Sequence[str], buffers: Sequence[memoryview], *, writable: bool) -> None:
    """Check a tier's contract for keys and buffers."""
    check_keys(keys)
    assert len(buffers) == len(keys)
    for buffer in buffers:
        assert isinstance(buffer, memoryview)
        assert buffer.nbytes
        assert buffer.c_contiguous
        assert not (writable and buffer.readonly)


class MemoryStore(BlobStore):
    """A ``BlobStore`` private to this process, and never full."""

    name = "memory"

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Return None for each stored key, a fault for others."""
        check_keys(keys)
        with self._lock:
            return [self._fault_of(key) for key in keys]

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """Copy blobs."""
        check_blobs(keys, buffers, writable=False)
        with self._lock:
            return [self._put(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """Copy blobs back."""
        check_blobs(keys, buffers, writable=True)
        with self._lock:
            return [self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Remove blobs."""
        check_keys(keys)
        with self._lock:
            if self._is_closed:
                return [StoreFault.CLOSED] * len(keys)
            for key in keys:
                self._blobs.pop(key, None)
            return [None] * len(keys)

    def health(self) -> StoreHealth:
        """Report the number of blobs."""
        fault = StoreFault.CLOSED if self._is_closed else None
        return StoreHealth(fault, f"{len(self._blobs)} blobs")

    def close(self) -> None:
        """Remove all blobs."""
        with self._lock:
            self._is_closed = True
            self._blobs.clear()

    def _fault_of(self, key: str) -> StoreFault | None:
        if self._is_closed:
            return StoreFault.CLOSED
        return None if key in self._blobs else StoreFault.MISSING

    def _put(self, key: str, buffer: memoryview) -> StoreFault | None:
        fault = self._fault_of(key)
        if fault is not StoreFault.MISSING:
            return fault
        self._blobs[key] = bytes(buffer)
        return None

    def _get(self, key: str, buffer: memoryview) -> int | StoreFault:
        fault = self._fault_of(key)
        if fault is not None:
            return fault
        blob = self._blobs[key]
        if len(blob) > buffer.nbytes:
            return StoreFault.SHORT
        buffer.cast("B")[: len(blob)] = blob
        return len(blob)
