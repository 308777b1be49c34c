"""Mooncake Store as a store: blobs in the memory of many machines, over TCP or RDMA."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from mamba_cache._checks import check_int, check_number
from mamba_cache._extras import install_hint
from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.stores.protocols import (
    StoreFault,
    StoreHealth,
)

__all__ = ["MooncakeStore"]

_INVALID_PARAMS: Final = -600
_FAULTS: Final = {
    -200: StoreFault.FULL,
    -601: StoreFault.UNREACHABLE,  # the master was restarted and does not know this client yet
    -703: StoreFault.MISSING,  # the blob is being written, or its writer ended too early
    -704: StoreFault.MISSING,
    -706: StoreFault.LEASED,
    -707: StoreFault.TRANSFER_FAILED,  # the blob may have been evicted during the read
    -708: StoreFault.LEASED,
    -712: StoreFault.MISSING,
    -714: StoreFault.LEASED,
    -800: StoreFault.TRANSFER_FAILED,
    -900: StoreFault.UNREACHABLE,
    -901: StoreFault.TIMED_OUT,
    -1010: StoreFault.UNREACHABLE,
}
"""Faults by code of Mooncake 0.3.13; other codes are ``REJECTED``."""

_NO_REQUEST: Final = bytes(64)
"""No valid request: a live master closes the connection when it reads this, a hung one does not."""

_MAX_SECONDS: Final = 3600.0
_REFRESH: Final = "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "5"
"""Without this variable Mooncake keeps data about a peer, by address and port, while this process
lives. Ports are drawn from some 2,000. Sooner or later a new process has the port of a dead one,
and all transfers to it fail. Mooncake reads the variable when it is loaded."""

_LOCAL_BUFFER_BYTES: Final = 16 * 2**20


class MooncakeStore:
    """A ``BlobStore`` of a Mooncake master and the memory segments of its clients.

    The constructor connects. If the master does not answer then, later calls try again. While
    Mooncake connects, no other thread of the process runs: 0.04 to 0.4 s on loopback, 90 s without
    a master, and for ever if the master hangs. So the master is probed before.

    All blobs are lost when the master restarts, and a process's segment when the process ends. Over
    RDMA, buffers must lie in registered memory.

    Args:
        master: "host:port" of ``mooncake_master``.
        segment_bytes: Memory that this process gives to the store; 0: the process is only a client.
        protocol: "tcp" or "rdma".
        device: The RDMA devices, such as "mlx5_0"; empty lets Mooncake choose.
        host: The name under which other processes reach this one. Default: the address from which
            this process reaches the master.
        num_replicas: Number of segments that keep each blob.
        connect_seconds: Time limit for the master's answer to the probe.

    Raises:
        InvalidArgumentError: An argument is out of range.
        MissingExtraError: Mooncake is not installed, or a system library that it needs is not.
    """

    name = "mooncake"

    def __init__(
        self,
        master: str,
        *,
        segment_bytes: int = 0,
        protocol: str = "tcp",
        device: str = "",
        host: str | None = None,
        num_replicas: int = 1,
        connect_seconds: float = 1.0,
    ) -> None:
        self._master = master
        self._address = _address_of(master)
        self._segment_bytes = check_int("segment_bytes", segment_bytes, minimum=0)
        self._protocol = protocol
        self._device = device
        self._host = host
        self._connect_seconds = check_number(
            "connect_seconds", connect_seconds, maximum=_MAX_SECONDS
        )
        self._module = _load()
        self._replicas = self._module.ReplicateConfig()
        self._replicas.replica_num = check_int("num_replicas", num_replicas, minimum=1)
        self._client: Any = None
        self._connecting = threading.Lock()
        self._last_error = ""
        # Guards the fields below. A call of Mooncake's client after its close ends the process.
        self._lock = threading.Lock()
        self._num_calls = 0
        self._is_closed = False
        self._regions: dict[int, int] = {}  # bytes by address
        self._connected()

    def register(self, memory: memoryview) -> StoreFault | None:
        """Register memory with the transfer engine, now or when the client connects."""
        address, size = _span(memory)
        with self._lock:
            if self._is_closed:
                return StoreFault.CLOSED
            code = 0 if self._client is None else self._client.register_buffer(address, size)
            if code != 0:
                return self._fault(code)
            self._regions[address] = size
        return None

    def unregister(self, memory: memoryview) -> None:
        """Unregister memory that was passed to ``register``."""
        address, _ = _span(memory)
        with self._lock:
            was_registered = self._regions.pop(address, None) is not None
            if was_registered and self._client is not None and not self._is_closed:
                self._client.unregister_buffer(address)

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Ask the master which keys can be read."""
        names = list(keys)
        codes = self._codes(names, lambda client: client.batch_is_exist(names))
        answers = {0: StoreFault.MISSING, 1: None}
        return [answers[code] if code in answers else self._fault(code) for code in codes]

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """Store blobs; a blob that is there stays as it is, even if its size differs."""
        names = list(keys)
        addresses, sizes = _spans(buffers)
        codes = self._codes(
            names, lambda client: client.batch_put_from(names, addresses, sizes, self._replicas)
        )
        return [self._fault_unless_0(code) for code in codes]

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """Read blobs straight into the buffers."""
        names = list(keys)
        addresses, sizes = _spans(buffers)
        codes = self._codes(names, lambda client: client.batch_get_into(names, addresses, sizes))
        return [
            StoreFault.SHORT if code == _INVALID_PARAMS else self._size_or_fault(code)
            for code in codes
        ]

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Remove blobs without a lease, which the store keeps for some seconds after a read."""
        names = list(keys)
        codes = self._codes(names, lambda client: client.batch_remove(names))
        faults = [self._fault_unless_0(code) for code in codes]
        return [None if fault is StoreFault.MISSING else fault for fault in faults]

    def health(self) -> StoreHealth:
        """Ask the master for a key that does not exist."""
        where = f"mooncake master at {self._master}, {self._protocol}"
        fault = self.exists_many(["mamba-cache-health"])[0]
        if fault is None or fault is StoreFault.MISSING:
            return StoreHealth(None, where)
        return StoreHealth(fault, f"{where}: {self._last_error}")

    def close(self) -> None:
        """Leave the store and withdraw the segment; while calls run, the last does it."""
        with self._lock:
            self._is_closed = True
        self._leave_if_last()

    def _codes(self, names: list[str], ask: Callable[[Any], list[int]]) -> list[int | StoreFault]:
        """Return Mooncake's code for each key, or a fault."""
        with self._lock:
            if self._is_closed:
                return [StoreFault.CLOSED] * len(names)
            self._num_calls += 1
        try:
            client = self._connected()
            if client is None:
                return [StoreFault.UNREACHABLE] * len(names)
            codes = ask(client)
        finally:
            with self._lock:
                self._num_calls -= 1
            self._leave_if_last()
        if len(codes) != len(names):
            self._last_error = f"{len(codes)} answers came for {len(names)} keys"
            return [StoreFault.REJECTED] * len(names)
        return [*codes]

    def _connected(self) -> Any:
        """Return the client, and connect it first if needed; None if that fails."""
        with self._connecting:
            if self._client is None:
                try:
                    own_address = self._probe()
                except OSError as error:
                    self._last_error = str(error)
                    return None
                client = self._module.MooncakeDistributedStore()
                code = client.setup(
                    self._host or own_address,
                    "P2PHANDSHAKE",  # processes find each other without a server
                    self._segment_bytes,
                    _LOCAL_BUFFER_BYTES,
                    self._protocol,
                    self._device,
                    self._master,
                )
                if code != 0:
                    self._last_error = f"setup answers {code}; its log on stderr has the reason"
                    return None
                with self._lock:
                    for address, size in self._regions.items():
                        client.register_buffer(address, size)
                    self._client = client
        return self._client

    def _probe(self) -> str:
        """Return the address from which this process reaches the master; raise if it hangs."""
        with socket.create_connection(self._address, self._connect_seconds) as probe:
            probe.sendall(_NO_REQUEST)
            with suppress(ConnectionResetError):
                probe.recv(1)
            return str(probe.getsockname()[0])

    def _leave_if_last(self) -> None:
        with self._lock:
            is_last = self._is_closed and not self._num_calls
            client = self._client if is_last else None
            self._client = None if is_last else self._client
        if client is not None:
            client.close()

    def _fault_unless_0(self, code: int | StoreFault) -> StoreFault | None:
        return None if code == 0 else self._fault(code)

    def _size_or_fault(self, code: int | StoreFault) -> int | StoreFault:
        return code if isinstance(code, int) and code >= 0 else self._fault(code)

    def _fault(self, code: int | StoreFault) -> StoreFault:
        if isinstance(code, StoreFault):
            return code
        fault = _FAULTS.get(code, StoreFault.REJECTED)
        if fault.is_of_the_store:
            self._last_error = f"Mooncake answers {code}"
        return fault


def _load() -> Any:
    os.environ.setdefault(*_REFRESH)
    try:
        import mooncake.store  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"a store mooncake:// needs Mooncake, not installed here: {install_hint('mooncake')}"
        ) from error
    except ImportError as error:
        raise MissingExtraError(
            f"Mooncake is installed and cannot be loaded: {error}. On Debian and Ubuntu it needs "
            "libibverbs1, librdmacm1, libnuma1 and libcurl4"
        ) from error
    return mooncake.store


def _address_of(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidArgumentError(f"master must be 'host:port', got {master!r}")
    return host.strip("[]"), int(port)


def _span(buffer: memoryview) -> tuple[int, int]:
    """Return the address and the size of a buffer."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    return array.ctypes.data, array.nbytes


def _spans(buffers: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    """Return the addresses and the sizes of buffers."""
    spans = [_span(buffer) for buffer in buffers]
    return [address for address, _ in spans], [size for _, size in spans]
