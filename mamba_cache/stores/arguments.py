"""Checks at the door of every store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mamba_cache.errors import InvalidArgumentError

__all__ = ["MAX_BLOB_BYTES", "MAX_KEY_LENGTH", "check_blobs", "check_keys"]

MAX_KEY_LENGTH: Final = 512
"""Characters of the longest key."""

MAX_BLOB_BYTES: Final = 512 * 2**20
"""The longest blob of the stores here: what Valkey takes unless it is told otherwise."""


def check_keys(keys: Sequence[str]) -> None:
    """Check the keys of a call."""
    if isinstance(keys, str):
        raise InvalidArgumentError(f"keys must be a sequence of keys, got the string {keys!r}")
    for key in keys:
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_LENGTH:
            raise InvalidArgumentError(
                f"a key must be a string of 1 to {MAX_KEY_LENGTH} characters, got {key!r:.200}"
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise InvalidArgumentError(f"a key must be printable ASCII without spaces, got {key!r}")
    if len(set(keys)) < len(keys):
        raise InvalidArgumentError("a key must come once in a call, and one came twice")


def check_blobs(keys: Sequence[str], buffers: Sequence[memoryview], *, writable: bool) -> None:
    """Check the keys and buffers of a call."""
    check_keys(keys)
    if len(buffers) != len(keys):
        raise InvalidArgumentError(f"{len(keys)} keys need as many buffers, got {len(buffers)}")
    for key, buffer in zip(keys, buffers, strict=True):
        if not isinstance(buffer, memoryview):
            kind = type(buffer).__name__
            raise InvalidArgumentError(f"the buffer of {key!r} must be a memoryview, got a {kind}")
        if not buffer.nbytes or not buffer.c_contiguous:
            raise InvalidArgumentError(f"the buffer of {key!r} must be contiguous and not empty")
        if writable and buffer.readonly:
            raise InvalidArgumentError(f"the buffer of {key!r} must be writable, and is read-only")
