"""Valkey (or Redis) as a store.

It speaks the protocol itself, four commands of it, because blobs of megabytes go straight between
sockets and the caller's buffers then: reads are three times as fast as through a client that makes
``bytes`` of each answer.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from mamba_cache._checks import check_int, check_number
from mamba_cache.stores.protocols import (
    MAX_BLOB_BYTES,
    BlobStore,
    StoreFault,
    StoreHealth,
    check_blobs,
    check_keys,
)

__all__ = ["ValkeyStore"]

_Part = bytes | memoryview
_Answer = TypeVar("_Answer")

_BYTES_AT_ONCE: Final = 32 * 2**20
"""Bytes that are asked for before any is read, so that the server does not hoard answers."""

_DRAIN_BYTES: Final = 2**16
_MAX_LINE: Final = 2**16
_RECEIVED_BYTES: Final = 2**12
_MAX_SECONDS: Final = 3600.0

_FAULTS: Final = {
    "OOM": StoreFault.FULL,
    "NOAUTH": StoreFault.DENIED,
    "WRONGPASS": StoreFault.DENIED,
    "NOPERM": StoreFault.DENIED,
    "LOADING": StoreFault.UNREACHABLE,
    "MASTERDOWN": StoreFault.UNREACHABLE,
    "BUSY": StoreFault.UNREACHABLE,
}
"""By the first word of an error."""


class ValkeyStore(BlobStore):
    """A ``BlobStore`` in a Valkey or Redis server. Connections are made when they are needed.

    Set ``maxmemory`` and ``maxmemory-policy allkeys-lru`` in the server: nothing else bounds what
    it keeps. Clusters are not supported; their redirections are ``REJECTED``.

    Args:
        host: The server's name or address.
        port: Its port.
        db: The number of its database.
        username: For AUTH. Default: the server's default user.
        password: For AUTH. Default: none is sent.
        tls: A context with which connections are made, such as ``ssl.create_default_context()``.
            Default: no TLS.
        timeout_seconds: How long a connection, sending one blob, or the server's silence within a
            call may take before the keys that are left are ``TIMED_OUT``.
        ttl_seconds: After how long a blob goes by itself, in whole seconds. Default: never.

    Raises:
        InvalidArgumentError: An argument is out of range.
    """

    name = "valkey"
    max_blob_bytes = MAX_BLOB_BYTES

    def __init__(
        self,
        host: str,
        port: int = 6379,
        *,
        db: int = 0,
        username: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_seconds: float = 5.0,
        ttl_seconds: int | None = None,
    ) -> None:
        self._address = (host, check_int("port", port, minimum=1, maximum=65535))
        self._db = check_int("db", db, minimum=0)
        self._user = username
        self._password = password
        self._tls = tls
        self._timeout = check_number("timeout_seconds", timeout_seconds, maximum=_MAX_SECONDS)
        self._options = [b"NX"]
        if ttl_seconds is not None:
            seconds = check_int("ttl_seconds", ttl_seconds, minimum=1)
            self._options += [b"EX", b"%d" % seconds]
        self._idle: list[_Connection] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._last_error = ""

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Ask EXISTS of each key."""
        check_keys(keys)
        commands: list[list[_Part]] = [[b"EXISTS", key.encode()] for key in keys]
        found = self._call([commands], lambda connection, i: connection.read_int(), len(keys))
        return [StoreFault.MISSING if one == 0 else _fault_in(one) for one in found]

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """SET each key that is not there."""
        check_blobs(keys, buffers, writable=False)
        sent = [i for i, buffer in enumerate(buffers) if buffer.nbytes <= self.max_blob_bytes]
        commands: list[list[_Part]] = [
            [b"SET", keys[i].encode(), buffers[i].cast("B"), *self._options] for i in sent
        ]
        answers = self._call([commands], lambda connection, i: connection.read_status(), len(sent))
        by_index = dict(zip(sent, answers, strict=True))
        return [by_index.get(i, StoreFault.TOO_LARGE) for i in range(len(keys))]

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """GET each key into its buffer."""
        check_blobs(keys, buffers, writable=True)
        views = [buffer.cast("B") for buffer in buffers]
        return self._call(
            _groups(keys, views), lambda connection, i: connection.read_blob(views[i]), len(keys)
        )

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """UNLINK each key."""
        check_keys(keys)
        commands: list[list[_Part]] = [[b"UNLINK", key.encode()] for key in keys]
        answers = self._call([commands], lambda connection, i: connection.read_int(), len(keys))
        return [_fault_in(one) for one in answers]

    def health(self) -> StoreHealth:
        """Ask PING; say which server it is."""
        where = f"valkey at {self._address[0]}:{self._address[1]}, db {self._db}"
        fault = self._call([[[b"PING"]]], lambda connection, i: connection.read_status(), 1)[0]
        return StoreHealth(fault, f"{where}: {self._last_error}" if fault else where)

    def close(self) -> None:
        """Close connections; those of calls that run now are closed when these end."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _call(
        self,
        groups: Iterable[Sequence[Sequence[_Part]]],
        read: Callable[[_Connection, int], _Answer | StoreFault],
        num_answers: int,
    ) -> list[_Answer | StoreFault]:
        """Send groups of commands, each after the last one's answers, and read all answers."""
        answers: list[_Answer | StoreFault] = []
        if not num_answers:
            return answers
        connection = None
        try:
            connection = self._take()
            for commands in groups:
                connection.send(commands)
                for _ in commands:
                    answers.append(read(connection, len(answers)))
        except (_ProtocolError, _RefusedError, OSError) as error:
            if connection is not None:
                connection.close()
            self._last_error = str(error) or type(error).__name__
            return answers + [_fault_of(error)] * (num_answers - len(answers))
        self._last_error = connection.last_error or self._last_error
        self._give_back(connection)
        return answers

    def _take(self) -> _Connection:
        """Return a connection that works as far as can be seen."""
        if os.getpid() != self._pid:  # forked: they are the parent's, and one may hold the lock
            for connection in self._idle:
                connection.close()  # its side of them: the parent goes on with them
            self._lock, self._idle, self._pid = threading.Lock(), [], os.getpid()
        with self._lock:
            if self._is_closed:
                raise _RefusedError(StoreFault.CLOSED, "the store is closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.is_quiet():
                    return connection
                connection.close()
        connection = _Connection(self._address, self._tls, self._timeout)
        try:
            connection.greet(self._user, self._password, self._db)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: _Connection) -> None:
        connection.last_error = ""
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()


class _ProtocolError(Exception):
    """What came is no answer of a Valkey server."""


class _RefusedError(Exception):
    """The server does not let this client in."""

    def __init__(self, fault: StoreFault, words: str) -> None:
        super().__init__(words)
        self.fault = fault


class _Connection:
    """One connection: commands out, answers in, in the same order."""

    def __init__(
        self, address: tuple[str, int], tls: ssl.SSLContext | None, timeout_seconds: float
    ) -> None:
        self.last_error = ""
        self._has_secret = False
        self._buffer = b""
        raw = socket.create_connection(address, timeout=timeout_seconds)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket = tls.wrap_socket(raw, server_hostname=address[0]) if tls else raw
        except BaseException:
            raw.close()
            raise

    def greet(self, username: str | None, password: str | None, db: int) -> None:
        """Say who comes, and choose the database."""
        commands: list[list[_Part]] = []
        if password is not None:
            self._has_secret = True
            user = [] if username is None else [username.encode()]
            commands.append([b"AUTH", *user, password.encode()])
        commands.append([b"SELECT", b"%d" % db])
        self.send(commands)
        faults = [self.read_status() for _ in commands]
        for fault in faults:
            if fault:
                raise _RefusedError(fault, self.last_error)

    def is_quiet(self) -> bool:
        """Whether nothing came since the last answer: neither an end nor what nobody asked for."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not self._buffer and not poll.poll(0)

    def send(self, commands: Sequence[Sequence[_Part]]) -> None:
        """Send commands; long parts go without a copy."""
        head = bytearray()
        for command in commands:
            head += b"*%d\r\n" % len(command)
            for part in command:
                head += b"$%d\r\n" % len(part)
                if isinstance(part, memoryview):
                    self._socket.sendall(head)
                    self._socket.sendall(part)
                    head.clear()
                else:
                    head += part
                head += b"\r\n"
        self._socket.sendall(head)

    def read_status(self) -> StoreFault | None:
        """Read the answer of SET, PING, AUTH or SELECT; "not set, as it is there" is none."""
        kind, rest = self._read_line()
        if kind == b"-":
            return self._fault_of(rest)
        if kind == b"+" or (kind, rest) == (b"$", b"-1"):
            return None
        raise _ProtocolError("a status was due, and something else came")

    def read_int(self) -> int | StoreFault:
        kind, rest = self._read_line()
        if kind == b"-":
            return self._fault_of(rest)
        if kind == b":":
            return _as_int(rest)
        raise _ProtocolError("a number was due, and something else came")

    def read_blob(self, into: memoryview) -> int | StoreFault:
        """Read a blob straight into a buffer; return its bytes."""
        kind, rest = self._read_line()
        if kind == b"-":
            return self._fault_of(rest)
        if kind != b"$":
            raise _ProtocolError("a blob was due, and something else came")
        size = _as_int(rest)
        if size < 0:
            return StoreFault.MISSING
        if size > len(into):
            drained = memoryview(bytearray(_DRAIN_BYTES))
            for start in range(0, size, _DRAIN_BYTES):
                self._read_into(drained[: size - start])
        else:
            self._read_into(into[:size])
        end = memoryview(bytearray(2))
        self._read_into(end)
        if bytes(end) != b"\r\n":
            raise _ProtocolError(f"a blob of {size} bytes does not end where it should")
        return StoreFault.SHORT if size > len(into) else size

    def close(self) -> None:
        self._socket.close()

    def _fault_of(self, words: bytes) -> StoreFault:
        text = words.decode("utf-8", "replace")
        code = text.partition(" ")[0]
        if self._has_secret:
            # A server that does not know AUTH repeats its arguments.
            kind = code if code in _FAULTS else "an error of another kind"
            text = f"the server answered {kind} (its words may hold the password)"
        self.last_error = text
        return _FAULTS.get(code, StoreFault.REJECTED)

    def _read_line(self) -> tuple[bytes, bytes]:
        """Return the first byte of a line, which says what it is, and the rest."""
        while b"\r\n" not in self._buffer:
            if len(self._buffer) > _MAX_LINE:
                raise _ProtocolError("a line has no end")
            received = self._socket.recv(_RECEIVED_BYTES)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line[:1], line[1:]

    def _read_into(self, into: memoryview) -> None:
        """Fill a buffer: with what came behind the last line, and then from the socket."""
        done = min(len(into), len(self._buffer))
        into[:done] = self._buffer[:done]
        self._buffer = self._buffer[done:]
        while done < len(into):
            received = self._socket.recv_into(into[done:])
            if not received:
                raise ConnectionResetError("the server closed the connection")
            done += received


def _fault_of(error: Exception) -> StoreFault:
    if isinstance(error, _RefusedError):
        return error.fault
    if isinstance(error, _ProtocolError):
        return StoreFault.REJECTED
    if isinstance(error, TimeoutError):
        return StoreFault.TIMED_OUT
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return StoreFault.DENIED
    return StoreFault.UNREACHABLE


def _as_int(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise _ProtocolError("a number was due, and something else came") from None


def _fault_in(answer: int | StoreFault) -> StoreFault | None:
    return answer if isinstance(answer, StoreFault) else None


def _groups(keys: Sequence[str], views: Sequence[memoryview]) -> Iterator[list[list[_Part]]]:
    """Yield the GET commands of keys, of which there are some, in groups of not too many bytes."""
    group: list[list[_Part]] = []
    num_bytes = 0
    for key, view in zip(keys, views, strict=True):
        if group and num_bytes + len(view) > _BYTES_AT_ONCE:
            yield group
            group, num_bytes = [], 0
        group.append([b"GET", key.encode()])
        num_bytes += len(view)
    yield group
