"""The log of requests: what prompts share, without what they say, for ``bench replay``."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections import deque
from datetime import datetime, timezone
from typing import Final, NamedTuple

from mamba_cache.blocks import BlockHashes, ExtraKey
from mamba_cache.tiers import tenant_digest

__all__ = ["TRACE_FORMAT", "TraceLog"]

TRACE_FORMAT: Final = "mamba_cache_trace"
"""What the first line of a log has under this name: the version of its format."""

_VERSION: Final = 1
_MAX_QUEUED: Final = 4096
_SECONDS_BETWEEN_WRITES: Final = 1.0
_DIGEST_BYTES: Final = 8


class _Line(NamedTuple):
    """A request that is to be written."""

    milliseconds: float
    num_tokens: int
    hashes: BlockHashes
    will_continue: bool | None
    cache_salt: ExtraKey


class TraceLog:
    """Writes a line for each request to a file: when it came, how long it is, what it shares.

    A line holds no text and no token ids: of each complete block of the prompt 8 bytes of a keyed
    digest, from which nobody can work out the tokens without the key. The key is ``secret``, so
    that logs of processes with the same one go together; without, each log has a key of its own
    that is written nowhere.

    Whoever adds a request waits for nothing: a thread writes what is queued about once a second.
    What does not fit in the queue is dropped and counted, and so is what the system refuses to
    write. Any thread may call.

    Args:
        path: The file; what is there is kept, and added to. One process a file.
        block_size_tokens: Tokens of a block.
        secret: The key. Default: drawn.

    Attributes:
        path: As given.
        num_written: Requests in the file.
        num_dropped: Requests that are not, because the queue was full or a write failed.
        num_errors: Writes, and attempts to open the file, that the system refused.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_size_tokens: int,
        secret: bytes | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.num_written = self.num_dropped = self.num_errors = 0
        self._block_size = block_size_tokens
        self._key = hashlib.blake2b(secret or os.urandom(32), person=b"mc trace log").digest()
        self._queue: deque[_Line] = deque()
        self._began = time.monotonic()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the file
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: int | None = None
        self._has_header = self._is_closed = False

    def add(
        self,
        hashes: BlockHashes,
        num_tokens: int,
        *,
        will_continue: bool | None = None,
        cache_salt: ExtraKey = None,
    ) -> None:
        """Queue a request.

        Args:
            hashes: Of the prompt's complete blocks.
            num_tokens: Tokens of the prompt.
            will_continue: The hint that came with it.
            cache_salt: Requests of different ones share nothing.
        """
        if self._is_closed or len(self._queue) >= _MAX_QUEUED or os.getpid() != self._pid:
            self.num_dropped += 1
            return
        milliseconds = (time.monotonic() - self._began) * 1e3
        self._queue.append(_Line(milliseconds, num_tokens, hashes, will_continue, cache_salt))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mamba-cache-trace", daemon=True)
            self._thread.start()
        elif len(self._queue) == _MAX_QUEUED // 2:
            self._wake.set()

    def flush(self) -> None:
        """Write what is queued now, and wait until it is handed to the system."""
        if os.getpid() == self._pid:
            self._write_queued()

    def close(self) -> None:
        """Write what is queued, and end. What is added later is dropped."""
        if os.getpid() != self._pid:
            return  # the thread and the file are the parent's
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._write_queued()
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(_SECONDS_BETWEEN_WRITES)
            self._wake.clear()
            self._write_queued()

    def _write_queued(self) -> None:
        with self._lock:
            lines = [self._queue.popleft() for _ in range(len(self._queue))]
            if not lines:
                return
            try:
                if self._file is None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    self._file = os.open(self.path, flags, 0o600)
                header = [] if self._has_header else [self._header()]
                content = [json.dumps(line) for line in (*header, *map(self._fields, lines))]
                _append(self._file, ("\n".join(content) + "\n").encode())
            except OSError:
                self.num_errors += 1
                self.num_dropped += len(lines)
            else:
                self._has_header = True
                self.num_written += len(lines)

    def _header(self) -> dict[str, object]:
        return {
            TRACE_FORMAT: _VERSION,
            "block_size_tokens": self._block_size,
            "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }

    def _fields(self, line: _Line) -> dict[str, object]:
        fields: dict[str, object] = {
            "timestamp": round(line.milliseconds, 1),
            "length": line.num_tokens,
            "hashes": [
                hashlib.blake2b(digest, digest_size=_DIGEST_BYTES, key=self._key).hexdigest()
                for digest in line.hashes.digests
            ],
        }
        if line.will_continue is not None:
            fields["will_continue"] = line.will_continue
        if line.cache_salt is not None:
            fields["tenant"] = tenant_digest(self._key, line.cache_salt).hex()
        return fields


def _append(file: int, content: bytes) -> None:
    """Write all of it or nothing.

    Raises:
        OSError: The system refuses.
    """
    before = os.fstat(file).st_size
    try:
        if os.write(file, content) != len(content):
            raise OSError(errno.ENOSPC, "the file took a part of what was to be written")
    except OSError:
        os.ftruncate(file, before)
        raise
