"""Manifests: what a store has of an entry beside its chunks, written when all of them are there."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Final

from mamba_cache.tiers.entry import (
    HEADER_BYTES,
    EntryFacts,
    EntryHeader,
    EntryMacs,
    PayloadMac,
    Refusal,
)

__all__ = ["chunk_slices", "manifest_bytes", "read_manifest", "write_manifest"]

_MAC_BYTES: Final = 16
_SIZES: Final = struct.Struct("<QI")  # bytes of a chunk, and how many there are


def chunk_slices(payload_bytes: int, chunk_bytes: int) -> list[slice]:
    """Return where the chunks of a payload lie in it; the last one may be shorter."""
    starts = range(0, payload_bytes, chunk_bytes)
    return [slice(start, min(start + chunk_bytes, payload_bytes)) for start in starts]


def manifest_bytes(payload_bytes: int, chunk_bytes: int) -> int:
    """Return the bytes of the manifest of an entry of so many."""
    return HEADER_BYTES + _SIZES.size + _MAC_BYTES * -(-payload_bytes // chunk_bytes)


def write_manifest(
    facts: EntryFacts,
    chunk_bytes: int,
    chunk_macs: Sequence[bytes],
    macs: EntryMacs,
    payload_mac: PayloadMac,
) -> bytes:
    """Return the manifest of an entry: its header, the size of chunks, and their MACs.

    The header's payload tag is that of what follows it, so that it vouches for every chunk.
    """
    table = _SIZES.pack(chunk_bytes, len(chunk_macs)) + b"".join(chunk_macs)
    header = EntryHeader(facts, payload_mac.tag_of_table(table), nonce=payload_mac.nonce)
    return header.to_bytes(macs.header_key(facts.key.identity)) + table


def read_manifest(
    data: memoryview, expected: EntryFacts, chunk_bytes: int, macs: EntryMacs
) -> tuple[PayloadMac, list[bytes]] | Refusal:
    """Read a manifest, and compare every field with what the request derived."""
    header = EntryHeader.read(data, macs.header_key(expected.key.identity))
    if isinstance(header, Refusal):
        return header
    if (refusal := header.refusal(expected)) is not None:
        return refusal
    table = bytes(data[HEADER_BYTES:])
    payload_mac = macs.payload_mac(expected.key.identity, header.nonce)
    if not hmac.compare_digest(payload_mac.tag_of_table(table), header.payload_tag):
        return Refusal.MAC
    if len(data) != manifest_bytes(expected.payload_bytes, chunk_bytes):
        return Refusal.CHUNK
    size, count = _SIZES.unpack_from(table)
    if size != chunk_bytes or count != -(-expected.payload_bytes // chunk_bytes):
        return Refusal.CHUNK
    chunk_macs = table[_SIZES.size :]
    ends = range(0, len(chunk_macs), _MAC_BYTES)
    return payload_mac, [chunk_macs[at : at + _MAC_BYTES] for at in ends]
