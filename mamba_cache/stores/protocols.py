"""What a store is: blobs by key, in a place that several processes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

__all__ = [
    "BlobStore",
    "StoreFault",
    "StoreHealth",
]


class StoreFault(str, Enum):
    """Why a store did not do what it was asked for, of one key. Callers count each."""

    MISSING = "missing"
    """It does not have the key, or has it no more."""

    SHORT = "short"
    """The blob is longer than the buffer; how much was written to the buffer is not told."""

    FULL = "full"
    """It has no memory for the blob now."""

    DISK_FULL = "disk_full"
    """The disk has no room, or other processes use all that it may take."""

    IO_ERROR = "io_error"
    """The system did not read or write a file."""

    LEASED = "leased"
    """Somebody reads the blob, so that it cannot be removed now."""

    TRANSFER_FAILED = "transfer_failed"
    """Bytes were lost on the way; a buffer that was to be filled is partly written."""

    TIMED_OUT = "timed_out"
    """The store's own limit of time passed; whether it did it is not known."""

    UNREACHABLE = "unreachable"
    """There is no answer: the server is gone or restarts, or the network is down."""

    DENIED = "denied"
    """It refuses this client: password, certificate or rights are wrong."""

    REJECTED = "rejected"
    """It answers with another error; ``StoreHealth.detail`` says more."""

    CLOSED = "closed"
    """``close`` was called."""

    @property
    def is_of_the_store(self) -> bool:
        """Whether other keys would fare alike: what a circuit breaker counts."""
        return self in _OF_THE_STORE


_OF_THE_STORE = frozenset(
    {
        StoreFault.IO_ERROR,
        StoreFault.TRANSFER_FAILED,
        StoreFault.TIMED_OUT,
        StoreFault.UNREACHABLE,
        StoreFault.DENIED,
        StoreFault.REJECTED,
        StoreFault.CLOSED,
    }
)


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """What a store says of itself.

    Attributes:
        fault: None if it answers; otherwise why not.
        detail: For people: which server it is, or what the last error was. A server's own words
            are repeated only if it was sent no password.
    """

    fault: StoreFault | None
    detail: str


class BlobStore(Protocol):
    """Blobs of bytes by key, of at most 2 MiB, in a store that other processes share.

    Calls are plain and block; they come from any thread, and several at once. **None raises because
    of the store**: what went wrong is a ``StoreFault`` at the place of its key. A call may take as
    long as the store pleases, or never return: deadlines are the caller's, who lets a thread wait.
    Until a call returns, its buffers are in use.

    A blob is never overwritten: whoever puts a key that is there leaves the first bytes. What comes
    back need not be what was put, and "stored" need not be true: verify bytes by a digest, and ask
    ``exists_many`` after ``put_many``.

    Keys are printable ASCII without spaces, 1 to 512 characters, each once in a call. Buffers are
    contiguous ``memoryview`` objects of host memory, pinned or not (of a numpy array
    ``array.data``, of a CPU tensor ``tensor.numpy().data``).

    Attributes:
        name: What stats and messages call it, such as "valkey".
    """

    name: str

    def register(self, memory: memoryview) -> StoreFault | None:
        """Tell it of memory that buffers of later calls will lie in.

        It is for stores that read and write a caller's memory directly: over RDMA, Mooncake takes
        no buffers from elsewhere. The others do nothing.

        Args:
            memory: Stays where it is until ``unregister`` or ``close``.

        Returns:
            None, or why it was not registered.
        """
        return None

    def unregister(self, memory: memoryview) -> None:
        """Take that back, with the same memory, while no call uses it."""
        return  # nothing, for the stores that need no such memory

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Say of each key whether it can be read now.

        Returns:
            None where it can, ``MISSING`` where the store says that it does not have it, or why it
            does not say.
        """

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """Store blobs.

        Args:
            keys: Their names.
            buffers: Their bytes, each 1 or more; only read.

        Returns:
            None where the store says that the key is stored, now or before, with whatever bytes
            were first. Only ``exists_many`` tells that it can be found.
        """

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """Read blobs.

        Args:
            keys: Their names.
            buffers: Written to, each from its start; may be longer than the blob.

        Returns:
            The blob's bytes, which were written, or why not: then the buffer may hold anything.
        """

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Remove blobs.

        Returns:
            None where it is gone now, also if it was not there; or why not.
        """

    def health(self) -> StoreHealth:
        """Ask the server for a sign of life."""

    def close(self) -> None:
        """Let go of the store; later calls answer ``CLOSED``. What was stored stays."""
