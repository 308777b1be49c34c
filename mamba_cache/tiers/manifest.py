"""Manifests: what a store has of an entry beside its chunks, written when all of them are there."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from mamba_cache.tiers.entry import HEADER_BYTES, EntryFacts, EntryHeader, Refusal, payload_digest

__all__ = ["chunk_slices", "manifest_bytes", "read_manifest", "write_manifest"]

_DIGEST_BYTES: Final = 16
_SIZES: Final = struct.Struct("<QI")  # bytes of a chunk, and how many there are


def chunk_slices(payload_bytes: int, chunk_bytes: int) -> list[slice]:
    """Return where the chunks of a payload lie in it; the last one may be shorter."""
    starts = range(0, payload_bytes, chunk_bytes)
    return [slice(start, min(start + chunk_bytes, payload_bytes)) for start in starts]


def manifest_bytes(payload_bytes: int, chunk_bytes: int) -> int:
    """Return the bytes of the manifest of an entry of so many."""
    return HEADER_BYTES + _SIZES.size + _DIGEST_BYTES * -(-payload_bytes // chunk_bytes)


def write_manifest(facts: EntryFacts, chunk_bytes: int, digests: Sequence[bytes]) -> bytes:
    """Return the manifest of an entry: its header, the size of chunks, and their digests.

    The header's payload digest is that of what follows it, so that it vouches for every chunk.

    Args:
        facts: What the entry is.
        chunk_bytes: Bytes of each chunk but the last.
        digests: Each [16] bytes, ``payload_digest`` of the chunks in order.
    """
    table = _SIZES.pack(chunk_bytes, len(digests)) + b"".join(digests)
    return EntryHeader(facts, payload_digest(table)).to_bytes() + table


def read_manifest(
    data: memoryview, expected: EntryFacts, chunk_bytes: int
) -> list[bytes] | Refusal:
    """Read a manifest, and compare every field with what the request derived.

    Args:
        data: What the store brought.
        expected: What the request derived of the entry.
        chunk_bytes: Bytes of each chunk but the last.

    Returns:
        The digest of each chunk; or why this is not the entry's manifest.
    """
    header = EntryHeader.read(data)
    if isinstance(header, Refusal):
        return header
    if (refusal := header.refusal(expected)) is not None:
        return refusal
    table = bytes(data[HEADER_BYTES:])
    if payload_digest(table) != header.payload_digest:
        return Refusal.PAYLOAD_DIGEST
    if len(data) != manifest_bytes(expected.payload_bytes, chunk_bytes):
        return Refusal.CHUNK
    size, count = _SIZES.unpack_from(table)
    if size != chunk_bytes or count != -(-expected.payload_bytes // chunk_bytes):
        return Refusal.CHUNK
    digests = table[_SIZES.size :]
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]
