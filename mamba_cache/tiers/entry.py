"""Entries of the tiers: what names one, and the header that says what it holds."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from mamba_cache._checks import INT32_MAX, INT64_MAX, check_int, check_kind
from mamba_cache.errors import InvalidArgumentError

__all__ = [
    "HEADER_BYTES",
    "PART_BYTES",
    "EntryFacts",
    "EntryHeader",
    "EntryKey",
    "EntryKind",
    "Refusal",
    "block_digest",
    "digest_of_parts",
    "header_bytes",
    "parts_of",
    "payload_digest",
]

HEADER_BYTES: Final = 256
"""Bytes of every header."""

PART_BYTES: Final = 4 * 2**20
"""Bytes of a payload's parts, each with a digest of its own: several threads can take them. The
last one has up to twice as many."""

_MAGIC: Final = b"mambacE1"
_VERSION: Final = 2
_KEY_VERSION: Final = "mc1"
_NO_CHUNK: Final = 2**32 - 1
_IDENTITY_BYTES: Final = 32
_TENANT_BYTES: Final = 16
_BLOCK_DIGEST_BYTES: Final = 16
_PAYLOAD_DIGEST_BYTES: Final = 16
_DIGEST_SIZES: Final = (16, 32)
_CHECKSUM_BYTES: Final = 16

# Magic, version, kind, bytes of the full digest, rank, chunk, generation, prefix tokens, payload
# bytes, identity, tenant, full digest, digest of tokens and parent, payload digest.
_FIELDS: Final = struct.Struct("<8sHBBIIQQQ32s16s32s16s16s")
_PADDING: Final = HEADER_BYTES - _FIELDS.size - _CHECKSUM_BYTES


class EntryKind(Enum):
    """What an entry holds."""

    STATE = "s"
    """The state at a boundary."""

    KV = "k"
    """Keys and values of one block."""


class Refusal(str, Enum):
    """Why an entry was not restored. Each is counted."""

    MISSING = "missing"
    """There is no such entry, or there is none any more."""

    SHORT = "short"
    """Fewer bytes were read than an entry has."""

    MAGIC = "magic"
    """It does not begin as a header does: zeroes, or something else altogether."""

    VERSION = "version"
    """The header is of another version."""

    CHECKSUM = "checksum"
    """The header is not what was written."""

    MALFORMED = "malformed"
    """The checksum is right and a field is impossible: no writer of this package made it."""

    IDENTITY = "identity"
    """Another model, other weights, specs or numerics."""

    TENANT = "tenant"
    """Of requests with another salt."""

    KIND = "kind"
    """A state in the place of a KV block, or the other way round."""

    RANK = "rank"
    """Another part of the model."""

    CHUNK = "chunk"
    """Another chunk of the entry."""

    DIGEST = "digest"
    """Another prefix."""

    PREFIX_TOKENS = "prefix_tokens"
    """A prefix of another length."""

    BLOCK_DIGEST = "block_digest"
    """Other tokens, or another parent, of the same digest: a collision."""

    PAYLOAD_BYTES = "payload_bytes"
    """Another size than the row's."""

    PAYLOAD_DIGEST = "payload_digest"
    """The bytes are not those that were written."""

    GENERATION = "generation"
    """The row was given to another entry in the meantime."""

    IO_ERROR = "io_error"
    """Reading or writing failed."""

    TIMEOUT = "timeout"
    """It did not come by its deadline."""

    ABORTED = "aborted"
    """Nobody wants it any more."""


@dataclass(frozen=True, slots=True)
class EntryKey:
    """What an entry is found by.

    Its spelling is ``mc1/<identity>/<tenant>/<s or k>/<full digest>/<rank>[/<chunk>]``, digests in
    hexadecimal.

    Attributes:
        identity: [32] bytes, ``CacheIdentity.digest``.
        tenant: [16] bytes, ``tenant_digest``.
        kind: A state or a KV block.
        digest: [16 or 32] bytes, the full block digest; it names the whole prefix.
        rank: ``CacheIdentity.rank``.
        chunk: Which chunk of an entry that is stored in several; None if it is whole.

    Raises:
        InvalidArgumentError: A field is of another kind, length or range.
    """

    identity: bytes
    tenant: bytes
    kind: EntryKind
    digest: bytes
    rank: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        _check_bytes("identity", self.identity, (_IDENTITY_BYTES,))
        _check_bytes("tenant", self.tenant, (_TENANT_BYTES,))
        check_kind("kind", self.kind, EntryKind)
        _check_bytes("digest", self.digest, _DIGEST_SIZES)
        rank = check_int("rank", self.rank, minimum=0, maximum=INT32_MAX)
        object.__setattr__(self, "rank", rank)
        if self.chunk is not None:
            chunk = check_int("chunk", self.chunk, minimum=0, maximum=INT32_MAX)
            object.__setattr__(self, "chunk", chunk)

    def __str__(self) -> str:
        parts = [
            _KEY_VERSION,
            self.identity.hex(),
            self.tenant.hex(),
            self.kind.value,
            self.digest.hex(),
            str(self.rank),
        ]
        if self.chunk is not None:
            parts.append(str(self.chunk))
        return "/".join(parts)

    @classmethod
    def parse(cls, text: str) -> EntryKey:
        """Return the key that is spelled so.

        Raises:
            InvalidArgumentError: None is.
        """
        try:
            version, identity, tenant, kind, digest, rank, *chunks = text.split("/")
            key = cls(
                bytes.fromhex(identity),
                bytes.fromhex(tenant),
                EntryKind(kind),
                bytes.fromhex(digest),
                int(rank),
                *(int(chunk) for chunk in chunks),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"no entry's key: {text!r}") from error
        if version != _KEY_VERSION or str(key) != text:
            raise InvalidArgumentError(f"no entry's key: {text!r}")
        return key


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """What a request derives of an entry that it looks for, and an entry's header says of it.

    Attributes:
        key: What it is found by.
        prefix_tokens: Tokens from the sequence's start to the end of its block.
        block_digest: [16] bytes, ``block_digest`` of its block's tokens and their parent.
        payload_bytes: What it holds, in bytes.

    Raises:
        InvalidArgumentError: A field is of another kind, length or range.
    """

    key: EntryKey
    prefix_tokens: int
    block_digest: bytes
    payload_bytes: int

    def __post_init__(self) -> None:
        check_kind("key", self.key, EntryKey)
        _check_bytes("block_digest", self.block_digest, (_BLOCK_DIGEST_BYTES,))
        for name in ("prefix_tokens", "payload_bytes"):
            number = check_int(name, getattr(self, name), minimum=1, maximum=INT64_MAX)
            object.__setattr__(self, name, number)

    def refusal(self, other: EntryFacts) -> Refusal | None:
        """Say in which field ``other``, which a tier holds, is not what is looked for.

        Returns:
            The first that differs; None if all are equal.
        """
        mine, its = self.key, other.key
        for expected, found, reason in (
            (mine.identity, its.identity, Refusal.IDENTITY),
            (mine.tenant, its.tenant, Refusal.TENANT),
            (mine.kind, its.kind, Refusal.KIND),
            (mine.rank, its.rank, Refusal.RANK),
            (mine.chunk, its.chunk, Refusal.CHUNK),
            (mine.digest, its.digest, Refusal.DIGEST),
            (self.prefix_tokens, other.prefix_tokens, Refusal.PREFIX_TOKENS),
            (self.block_digest, other.block_digest, Refusal.BLOCK_DIGEST),
            (self.payload_bytes, other.payload_bytes, Refusal.PAYLOAD_BYTES),
        ):
            if expected != found:
                return reason
        return None


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """What stands before an entry's payload.

    Attributes:
        facts: What the entry is.
        payload_digest: [16] bytes, ``payload_digest`` of the payload.
        generation: How often the row had been given to an entry when this one was written.

    Raises:
        InvalidArgumentError: A field is of another kind, length or range.
    """

    facts: EntryFacts
    payload_digest: bytes
    generation: int = 0

    def __post_init__(self) -> None:
        check_kind("facts", self.facts, EntryFacts)
        _check_bytes("payload_digest", self.payload_digest, (_PAYLOAD_DIGEST_BYTES,))
        generation = check_int("generation", self.generation, minimum=0, maximum=INT64_MAX)
        object.__setattr__(self, "generation", generation)

    def to_bytes(self) -> bytes:
        """Return ``HEADER_BYTES`` bytes: the fields, zeroes, and a checksum of both."""
        return header_bytes(self.facts, self.payload_digest, self.generation)

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview) -> EntryHeader | Refusal:
        """Read a header that something else may have written, or nothing.

        Args:
            data: At least ``HEADER_BYTES`` bytes; what follows them is not looked at.

        Returns:
            The header, or why these bytes are none. Only a header that some writer made is
            returned, so it is still to be compared with what is looked for.
        """
        content = bytes(data[:HEADER_BYTES])
        if len(content) < HEADER_BYTES:
            return Refusal.SHORT
        (
            magic, version, kind, digest_size, rank, chunk, generation, prefix_tokens,
            payload_bytes, identity, tenant, digest, tokens_digest, its_payload_digest,
        ) = _FIELDS.unpack_from(content)  # fmt: skip
        if magic != _MAGIC:
            return Refusal.MAGIC
        if version != _VERSION:
            return Refusal.VERSION
        if _checksum(content[:-_CHECKSUM_BYTES]) != content[-_CHECKSUM_BYTES:]:
            return Refusal.CHECKSUM
        try:
            key = EntryKey(
                identity,
                tenant,
                EntryKind(chr(kind)),
                digest[:digest_size],
                rank,
                None if chunk == _NO_CHUNK else chunk,
            )
            facts = EntryFacts(key, prefix_tokens, tokens_digest, payload_bytes)
            header = cls(facts, its_payload_digest, generation)
        except ValueError:
            return Refusal.MALFORMED
        # What is not a field is zero: nothing that a later version means is read past.
        return header if header.to_bytes() == content else Refusal.MALFORMED

    def refusal(self, expected: EntryFacts) -> Refusal | None:
        """Say in which field the entry is not what is looked for; None if all are equal.

        Args:
            expected: What the request derived.
        """
        return expected.refusal(self.facts)


def header_bytes(facts: EntryFacts, payload_digest: bytes, generation: int) -> bytes:
    """Return what ``EntryHeader.to_bytes`` does, of fields that are known to be right."""
    key = facts.key
    packed = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        ord(key.kind.value),
        len(key.digest),
        key.rank,
        _NO_CHUNK if key.chunk is None else key.chunk,
        generation,
        facts.prefix_tokens,
        facts.payload_bytes,
        key.identity,
        key.tenant,
        key.digest,
        facts.block_digest,
        payload_digest,
    )
    content = packed + bytes(_PADDING)
    return content + _checksum(content)


def block_digest(parent: bytes, tokens: npt.NDArray[np.int32]) -> bytes:
    """Return the digest of a block's tokens and of what it is chained on.

    By another function than the chain's: what collides in one does not in the other.

    Args:
        parent: The full digest of the block before, or the chain's root
            (``BlockHashChain.parent_digest``).
        tokens: [block_size_tokens] int32, the block's tokens.

    Returns:
        [16] bytes.
    """
    content = len(parent).to_bytes(8, "little") + parent + tokens.astype("<i4").tobytes()
    return hashlib.blake2b(content, digest_size=_BLOCK_DIGEST_BYTES).digest()


def payload_digest(payload: Any) -> bytes:
    """Return the digest of a payload: xxh3-128, at about the speed of one core's memory.

    It tells bytes that were damaged, not bytes that somebody chose so that it would not tell.

    Args:
        payload: A contiguous buffer of bytes; it is not copied.

    Returns:
        [16] bytes: ``digest_of_parts`` of the digests of its parts.
    """
    data = memoryview(payload)
    parts = parts_of(data.nbytes)
    if len(parts) == 1:
        digest: bytes = xxhash.xxh3_128_digest(data)
        return digest
    data = data.cast("B")
    return digest_of_parts([payload_digest(data[part]) for part in parts])


def parts_of(num_bytes: int) -> list[slice]:
    """Return the parts of a payload: each of ``PART_BYTES``, but the last one has the rest too."""
    starts = range(0, max(num_bytes - PART_BYTES, 0) + 1, PART_BYTES)
    return [slice(start, end) for start, end in pairwise([*starts, num_bytes])]


def digest_of_parts(digests: Sequence[bytes]) -> bytes:
    """Return ``payload_digest`` of a payload by those of its parts.

    Args:
        digests: Each [16] bytes, ``payload_digest`` of a part, in order; at least one.
    """
    return digests[0] if len(digests) == 1 else payload_digest(b"".join(digests))


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()


def _check_bytes(name: str, value: object, sizes: tuple[int, ...]) -> None:
    if not isinstance(value, bytes) or len(value) not in sizes:
        raise InvalidArgumentError(
            f"{name} must be bytes, {' or '.join(map(str, sizes))} of them, got {value!r}"
        )
