"""The trace log: a listener that writes a line for each request, for ``mamba-cache replay``."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import threading
import time
from collections import deque
from datetime import datetime, timezone
from typing import Final

from mamba_cache._checks import check_secret
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.events import Admitted, Event
from mamba_cache.tiers.identity import tenant_digest

__all__ = ["TRACE_FORMAT", "TRACE_VERSION", "TraceLog"]

TRACE_FORMAT: Final = "mamba_cache_trace"
"""Key of the first line of a log; its value is ``TRACE_VERSION``."""

TRACE_VERSION: Final = 2
"""Version of the format; version 1 had other field names."""

_MAX_QUEUED: Final = 4096
_SECONDS_BETWEEN_WRITES: Final = 1.0


class TraceLog:
    """A listener that appends a line for each admitted request to a file.

    Lines have the format of Mooncake's traces. They contain no text and no token ids: the id of a
    block is 8 bytes of a keyed digest in hexadecimal, and only complete blocks have an id. A thread
    writes once a second, so requests do not wait. Lines that do not fit the queue, or that cannot
    be written, are dropped and counted.

    Example::

        with TraceLog("requests.jsonl") as log:
            context.listeners.add(log)
            ...

    Args:
        path: The file, readable for its owner only. Each process needs its own file.
        secret: Key of the digests; logs with equal keys can be joined. Default: a random key that
            is not stored.

    Attributes:
        num_written: Requests written.
        num_dropped: Requests dropped.
        num_errors: Writes that failed.

    Raises:
        InvalidArgumentError: ``path`` is no path, or ``secret`` is not bytes.
    """

    def __init__(self, path: str | os.PathLike[str], *, secret: bytes | None = None) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidArgumentError(f"path must be a path, got {path!r}")
        self._path = os.fspath(path)
        self.num_written = self.num_dropped = self.num_errors = 0
        self._key = hashlib.blake2b(
            check_secret("secret", secret) or os.urandom(32), person=b"mc trace log"
        ).digest()
        self._began = time.monotonic()
        self._queue: deque[tuple[float, Admitted]] = deque()
        self._pid = os.getpid()
        self._has_header = False
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> TraceLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Queue an ``Admitted`` event; ignore others."""
        if not isinstance(event, Admitted):
            return
        # A forked process has no writer thread, and the file belongs to its parent.
        if self._closing.is_set() or len(self._queue) >= _MAX_QUEUED or os.getpid() != self._pid:
            self.num_dropped += 1
            return
        self._queue.append(((time.monotonic() - self._began) * 1e3, event))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mamba-cache-trace", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def flush(self) -> None:
        """Write the queued lines."""
        with self._writing:
            entries = [self._queue.popleft() for _ in range(len(self._queue))]
            if not entries or os.getpid() != self._pid:
                return
            lines = [self._fields(*entry) for entry in entries]
            if not self._has_header:
                header = {
                    TRACE_FORMAT: TRACE_VERSION,
                    "block_size_tokens": entries[0][1].block_size_tokens,
                    "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                }
                lines.insert(0, header)
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            try:
                _append(self._path, content)
            except OSError:
                self.num_errors += 1
                self.num_dropped += len(entries)
            else:
                self._has_header = True
                self.num_written += len(entries)

    def close(self) -> None:
        """Write the queued lines and end the thread. Later requests are dropped."""
        self._closing.set()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join()
            atexit.unregister(self.close)
        self.flush()

    def _run(self) -> None:
        while not self._closing.wait(_SECONDS_BETWEEN_WRITES):
            self.flush()

    def _fields(self, milliseconds: float, event: Admitted) -> dict[str, object]:
        fields: dict[str, object] = {
            "timestamp": round(milliseconds, 1),
            "input_length": event.num_tokens,
            "hash_ids": [
                hashlib.blake2b(digest, digest_size=8, key=self._key).hexdigest()
                for digest in event.digests
            ],
        }
        if event.will_continue is not None:
            fields["will_continue"] = event.will_continue
        if event.cache_salt is not None:
            fields["tenant"] = tenant_digest(self._key, event.cache_salt).hex()
        return fields


def _append(path: str, content: bytes) -> None:
    """Append the whole content or nothing.

    Raises:
        OSError: The file cannot be opened or written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(file).st_size
        if os.write(file, content) != len(content):
            os.ftruncate(file, size)
            raise OSError("the file took only a part of the lines")
    finally:
        os.close(file)
