"""Valkey (or Redis) as a store, by redis-py."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from mamba_cache._checks import check_int, check_number
from mamba_cache._extras import install_hint
from mamba_cache.errors import MissingExtraError
from mamba_cache.stores.protocols import (
    BlobStore,
    StoreFault,
    StoreHealth,
)

__all__ = ["ValkeyStore"]

_Answer = TypeVar("_Answer")

_CUTOFF_BYTES: Final = 6000
"""Longer arguments are sent without a copy."""

_MAX_SECONDS: Final = 3600.0

_FAULTS: Final = {
    "AuthenticationError": StoreFault.DENIED,
    "NoPermissionError": StoreFault.DENIED,
    "OutOfMemoryError": StoreFault.FULL,
    "MasterDownError": StoreFault.UNREACHABLE,
    "TimeoutError": StoreFault.TIMED_OUT,
    "ConnectionError": StoreFault.UNREACHABLE,
    "OSError": StoreFault.UNREACHABLE,
}
"""Faults by exception class of redis-py; of an exception's classes the first one here counts."""


class ValkeyStore(BlobStore):
    """A ``BlobStore`` in a Valkey or Redis server. Connections are made when they are needed.

    Set ``maxmemory`` and ``maxmemory-policy allkeys-lru`` in the server: nothing else bounds the
    memory of the blobs. Clusters are not supported; their redirections are ``REJECTED``.

    Args:
        host: The server's name or address.
        port: The server's port.
        db: The number of the database.
        username: User for AUTH. Default: the server's default user.
        password: Password for AUTH. Default: none is sent.
        tls: Context of TLS connections, such as ``ssl.create_default_context()``. Default: no TLS.
        timeout_seconds: Limit for connecting, for sending one blob, and for the server's silence
            within a call. After it the remaining keys of the call are ``TIMED_OUT``.
        ttl_seconds: Whole seconds after which a blob expires. Default: never.

    Raises:
        InvalidArgumentError: An argument is out of range.
        MissingExtraError: redis-py is not installed.
    """

    name = "valkey"

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
        timeout = check_number("timeout_seconds", timeout_seconds, maximum=_MAX_SECONDS)
        self._options: list[str | int] = ["NX"]
        if ttl_seconds is not None:
            self._options += ["EX", check_int("ttl_seconds", ttl_seconds, minimum=1)]
        options: dict[str, Any] = {
            "host": host,
            "port": check_int("port", port, minimum=1, maximum=65535),
            "db": check_int("db", db, minimum=0),
            "username": username,
            "password": password,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "encoding_errors": "replace",
            "protocol": 2,
        }
        self._redis = _load()
        own = self._redis.connection
        encode = own.Encoder("utf-8", "strict", decode_responses=False).encode
        # The packer of hiredis copies each blob twice, and writes a third as much in a second.
        options["command_packer"] = own.PythonRespSerializer(_CUTOFF_BYTES, encode)
        self._pool = self._redis.ConnectionPool(_connection_class(self._redis, tls), **options)
        self._where = f"valkey at {host}:{port}, db {db}"
        self._has_secret = password is not None
        self._is_closed = False
        self._last_error = ""

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Send EXISTS for each key."""

        def judge(index: int, number: object) -> StoreFault | None:
            if number == 1:
                return None
            return StoreFault.MISSING if number == 0 else StoreFault.REJECTED

        return self._call([("EXISTS", key) for key in keys], judge)

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """Send SET NX for each key."""
        pairs = zip(keys, buffers, strict=True)
        commands = [("SET", key, buffer.cast("B"), *self._options) for key, buffer in pairs]
        return self._call(commands, _no_fault)

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """Send GET for each key whose STRLEN fits its buffer, so that no other blob is received."""
        views = [buffer.cast("B") for buffer in buffers]

        def measure(index: int, size: object) -> int | StoreFault:
            if not isinstance(size, int):
                return StoreFault.REJECTED
            if not size:
                return StoreFault.MISSING
            return StoreFault.SHORT if size > len(views[index]) else size

        def fill(index: int, blob: object) -> int | StoreFault:
            view = views[fits[index]]
            if blob is None:  # removed after STRLEN
                return StoreFault.MISSING
            if not isinstance(blob, bytes) or len(blob) > len(view):
                return StoreFault.REJECTED
            view[: len(blob)] = blob
            return len(blob)

        answers = self._call([("STRLEN", key) for key in keys], measure)
        fits = [i for i, size in enumerate(answers) if not isinstance(size, StoreFault)]
        found = self._call([("GET", keys[i]) for i in fits], fill)
        by_index = dict(zip(fits, found, strict=True))
        return [by_index.get(i, answer) for i, answer in enumerate(answers)]

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Send UNLINK for each key."""
        return self._call([("UNLINK", key) for key in keys], _no_fault)

    def health(self) -> StoreHealth:
        """Send PING; the detail names the server."""
        [fault] = self._call([("PING",)], _no_fault)
        return StoreHealth(fault, f"{self._where}: {self._last_error}" if fault else self._where)

    def close(self) -> None:
        """Close idle connections; the others are closed when their calls end."""
        self._is_closed = True
        self._pool.disconnect(inuse_connections=False)

    def _call(
        self, commands: Sequence[tuple[Any, ...]], take: Callable[[int, Any], _Answer]
    ) -> list[_Answer | StoreFault]:
        """Send commands; return the result of ``take`` for each answer, a fault for each error."""
        answers: list[_Answer | StoreFault] = []
        if self._is_closed:
            self._last_error = "the store is closed"
            return [StoreFault.CLOSED for _ in commands]
        if not commands:
            return answers
        try:
            connection = self._pool.get_connection()
            try:
                connection.send_packed_command(connection.pack_commands(commands))
                while len(answers) < len(commands):
                    answers.append(self._read(connection, partial(take, len(answers))))
            except BaseException:
                connection.disconnect()  # an answer may still be on its way
                raise
            finally:
                self._pool.release(connection)
                if self._is_closed:
                    self._pool.disconnect(inuse_connections=False)
        except (self._redis.RedisError, OSError) as error:
            answers += [self._fault_of(error)] * (len(commands) - len(answers))
        return answers

    def _read(
        self, connection: Any, take: Callable[[Any], _Answer | StoreFault]
    ) -> _Answer | StoreFault:
        """Read one answer; after an answer that is an error the connection goes on."""
        try:
            return take(connection.read_response())
        except self._redis.ResponseError as error:
            return self._fault_of(error)

    def _fault_of(self, error: Exception) -> StoreFault:
        """Return the fault of an exception; keep its message unless that may contain a secret."""
        names = [each.__name__ for each in type(error).__mro__]
        fault = next((_FAULTS[name] for name in _FAULTS if name in names), StoreFault.REJECTED)
        if isinstance(error.__context__, ssl.SSLError):
            is_end = isinstance(error.__context__, ssl.SSLEOFError)
            fault = StoreFault.UNREACHABLE if is_end else StoreFault.DENIED
        self._last_error = str(error)
        is_of_redis_py = type(error) in {self._redis.ConnectionError, self._redis.TimeoutError}
        if self._has_secret and not is_of_redis_py:
            # A server that does not know AUTH repeats its arguments.
            self._last_error = f"{type(error).__name__} (the server's words may hold the password)"
        return fault


def _no_fault(index: int, answer: object) -> None:
    """Return None for an answer that is no error."""


def _load() -> Any:
    try:
        import redis  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise MissingExtraError(
            f"a store valkey:// needs redis-py, not installed here: {install_hint('valkey')}"
        ) from error
    return redis


def _connection_class(redis: Any, tls: ssl.SSLContext | None) -> Any:
    if tls is None:
        return redis.Connection
    context = tls

    class TlsConnection(redis.Connection):  # type: ignore[misc]
        def _connect(self) -> ssl.SSLSocket:
            return context.wrap_socket(super()._connect(), server_hostname=self.host)

    return TlsConnection
