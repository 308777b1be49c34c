"""The interface of a store: blobs by key, in a place that several processes share."""

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
    """Why a store's call failed for one key. Callers count each."""

    MISSING = "missing"
    """The store does not have the key, or no longer has it."""

    SHORT = "short"
    """The blob is longer than the buffer; how much of the buffer was written is unspecified."""

    FULL = "full"
    """The store has no memory for the blob now."""

    DISK_FULL = "disk_full"
    """The disk has no room, or other processes use all of the capacity."""

    IO_ERROR = "io_error"
    """The system failed to read or write a file."""

    LEASED = "leased"
    """The blob is being read, so it cannot be removed now."""

    TRANSFER_FAILED = "transfer_failed"
    """Bytes were lost on the way; the buffer of a read may be partly written."""

    TIMED_OUT = "timed_out"
    """The store's own time limit passed; whether the call took effect is unknown."""

    UNREACHABLE = "unreachable"
    """There is no answer: the server is gone or restarts, or the network is down."""

    DENIED = "denied"
    """The store refuses this client: password, certificate or rights are wrong."""

    REJECTED = "rejected"
    """The store answers with another error; see ``StoreHealth.detail``."""

    CLOSED = "closed"
    """``close`` was called."""

    @property
    def is_of_the_store(self) -> bool:
        """Whether other keys would fail alike: a circuit breaker counts such faults."""
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
    """The state of a store.

    Attributes:
        fault: None if the store answers; otherwise the reason.
        detail: For people: the server's name, or the last error. A server's own words are repeated
            only if it was sent no password.
    """

    fault: StoreFault | None
    detail: str


class BlobStore(Protocol):
    """Blobs of bytes by key, of at most 2 MiB, in a store that other processes share.

    Calls block, and may come from several threads at once. **No call raises because of the store**:
    a failure is a ``StoreFault`` in the place of its key. A call may take long or never return:
    the caller sets the deadline, and makes the call in a thread of its own. Until a call returns,
    its buffers are in use.

    A blob is never overwritten: a put of a key that is there keeps the first bytes. A store may
    return other bytes than were put, or report a put that it lost. So verify bytes by a digest, and
    call ``exists_many`` after ``put_many``.

    Keys are printable ASCII without spaces, 1 to 512 characters, each once in a call. Buffers are
    contiguous ``memoryview`` objects of host memory, pinned or not (of a numpy array
    ``array.data``, of a CPU tensor ``tensor.numpy().data``).

    Attributes:
        name: Name of the store in stats and messages, such as "valkey".
    """

    name: str

    def register(self, memory: memoryview) -> StoreFault | None:
        """Register memory for the buffers of later calls.

        This is for stores that access the caller's memory directly: over RDMA, Mooncake accepts
        buffers in registered memory only. Other stores do nothing.

        Args:
            memory: Must stay where it is until ``unregister`` or ``close``.

        Returns:
            None, or why the memory was not registered.
        """
        return None

    def unregister(self, memory: memoryview) -> None:
        """Unregister memory that was passed to ``register``; no call may be using it."""
        return  # a store without registered memory does nothing

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Return for each key whether its blob can be read now.

        Returns:
            None for a blob that can be read, ``MISSING`` if the store answers that it has none,
            another fault if it does not answer.
        """

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """Store blobs.

        Args:
            keys: Key of each blob.
            buffers: Bytes of each blob, at least 1; only read.

        Returns:
            None for a blob that the store reports as stored, now or before, with the bytes that
            were put first. Only ``exists_many`` confirms that the blob can be found.
        """

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """Read blobs.

        Args:
            keys: Key of each blob.
            buffers: Each is written from its start; may be longer than the blob.

        Returns:
            The blob's size, all of it written; or a fault, and the buffer may hold anything.
        """

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Remove blobs.

        Returns:
            None for a blob that is gone now, also if it was never there; otherwise a fault.
        """

    def health(self) -> StoreHealth:
        """Ask the server whether it answers."""

    def close(self) -> None:
        """Close this client; later calls answer ``CLOSED``. Stored blobs stay."""
