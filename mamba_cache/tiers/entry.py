"""Entries of the tiers: their keys, their headers, and the MACs of headers and payloads."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple

import xxhash

from mamba_cache._extras import install_hint
from mamba_cache.errors import MissingExtraError

__all__ = [
    "HEADER_BYTES",
    "NONCE_BYTES",
    "EntryFacts",
    "EntryHeader",
    "EntryKey",
    "EntryKind",
    "EntryMacs",
    "PayloadMac",
    "Refusal",
    "payload_digest",
    "prefix_tokens_in",
]

HEADER_BYTES: Final = 256
"""Bytes of every header."""

NONCE_BYTES: Final = 16
"""Bytes of ``EntryHeader.nonce``."""

_MAGIC: Final = b"mambacE1"
_VERSION: Final = 3
_KEY_VERSION: Final = "mc1"
_WHOLE: Final = 2**32 - 1
_CHECKSUM_BYTES: Final = 16
_LAST_NONCE: Final = b"\xff" * 12
_MAX_IDENTITIES: Final = 16
_MAX_PREFIX_TOKENS: Final = 2**40

# Magic, version, kind, bytes of the full digest, rank, mark of a whole entry, generation, prefix
# tokens, payload bytes, identity, tenant, full digest, nonce, payload tag.
_FIELDS: Final = struct.Struct("<8sHBBIIQQQ32s16s32s16s16s")
_PADDING: Final = HEADER_BYTES - _FIELDS.size - _CHECKSUM_BYTES


class EntryKind(str, Enum):
    """Kind of an entry."""

    STATE = "s"
    """The state at a boundary."""

    KV = "k"
    """Keys and values of one block."""


class Refusal(str, Enum):
    """Why an entry was not restored. Each is counted."""

    MISSING = "missing"
    """The entry was never there, or is gone."""

    SHORT = "short"
    """Fewer bytes were read than the entry has."""

    MAGIC = "magic"
    """The bytes do not begin as a header does."""

    VERSION = "version"
    """The header is of another version."""

    CHECKSUM = "checksum"
    """In host memory: the header differs from the one that was written."""

    MAC = "mac"
    """On disk or in a store: no process with this secret wrote this header or payload."""

    MALFORMED = "malformed"
    """The checksum is right but constant bytes differ: another version wrote the entry."""

    IDENTITY = "identity"
    """The entry is of another model, or of other weights, specs or numerics."""

    TENANT = "tenant"
    """The entry is of requests with another salt."""

    KIND = "kind"
    """The entry is a state instead of a KV block, or a KV block instead of a state."""

    RANK = "rank"
    """The entry is of another rank's part of the model."""

    DIGEST = "digest"
    """The entry is of another prefix."""

    PREFIX_TOKENS = "prefix_tokens"
    """The entry is of a prefix of another length."""

    PAYLOAD_BYTES = "payload_bytes"
    """The payload has another size than a row."""

    PAYLOAD_DIGEST = "payload_digest"
    """In host memory: the payload differs from the one that was written."""

    GENERATION = "generation"
    """The row has got another entry in the meantime."""

    IO_ERROR = "io_error"
    """Reading or writing failed."""

    TIMEOUT = "timeout"
    """The entry did not arrive by its deadline."""

    ABORTED = "aborted"
    """The load or write was cancelled, or could not begin."""


@dataclass(frozen=True, slots=True)
class EntryKey:
    """The key of an entry.

    As text it is ``mc1/<identity>/<tenant>/<s or k>/<full digest>/<rank>``, digests in
    hexadecimal. The key of a chunk has ``/<number>`` appended.
    """

    identity: bytes  # [32]
    tenant: bytes  # [16]
    kind: EntryKind
    digest: bytes  # [16 or 32], the full block digest: it names the whole prefix
    rank: int = 0

    def __str__(self) -> str:
        identity, tenant, digest = self.identity.hex(), self.tenant.hex(), self.digest.hex()
        return f"{_KEY_VERSION}/{identity}/{tenant}/{self.kind.value}/{digest}/{self.rank}"


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """Facts that a request derives of an entry, and with which the entry's header must agree."""

    key: EntryKey
    prefix_tokens: int  # from the sequence's start to the end of its block
    payload_bytes: int


class EntryHeader(NamedTuple):
    """The fields of an entry's header that its reader cannot derive."""

    payload_tag: bytes  # [16]: ``payload_digest`` in host memory, a ``PayloadMac``'s elsewhere
    generation: int = 0  # of the row
    nonce: bytes = bytes(NONCE_BYTES)  # unique to each entry outside host memory

    def to_bytes(self, facts: EntryFacts, key: bytes = b"") -> bytes:
        """Return ``HEADER_BYTES`` bytes: the fields, zeroes, and a checksum of both.

        A key makes the checksum a MAC.
        """
        own = facts.key
        packed = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            ord(own.kind.value),
            len(own.digest),
            own.rank,
            _WHOLE,
            self.generation,
            facts.prefix_tokens,
            facts.payload_bytes,
            own.identity,
            own.tenant,
            own.digest,
            self.nonce,
            self.payload_tag,
        )
        content = packed + bytes(_PADDING)
        return content + _checksum(content, key)

    @classmethod
    def read(
        cls, data: bytes | bytearray | memoryview, expected: EntryFacts, key: bytes = b""
    ) -> EntryHeader | Refusal:
        """Read an untrusted header, and compare every field."""
        content = bytes(data[:HEADER_BYTES])
        if len(content) < HEADER_BYTES:
            return Refusal.SHORT
        (
            magic, version, kind, digest_size, rank, whole, generation, prefix_tokens,
            payload_bytes, identity, tenant, digest, nonce, payload_tag,
        ) = _FIELDS.unpack_from(content)  # fmt: skip
        if magic != _MAGIC:
            return Refusal.MAGIC
        if version != _VERSION:
            return Refusal.VERSION
        checksum = _checksum(content[:-_CHECKSUM_BYTES], key)
        if not hmac.compare_digest(checksum, content[-_CHECKSUM_BYTES:]):
            return Refusal.MAC if key else Refusal.CHECKSUM
        own = expected.key
        for found, derived, reason in (
            (identity, own.identity, Refusal.IDENTITY),
            (tenant, own.tenant, Refusal.TENANT),
            (kind, ord(own.kind.value), Refusal.KIND),
            (rank, own.rank, Refusal.RANK),
            (digest_size, len(own.digest), Refusal.DIGEST),
            (digest, own.digest.ljust(len(digest), b"\0"), Refusal.DIGEST),
            (prefix_tokens, expected.prefix_tokens, Refusal.PREFIX_TOKENS),
            (payload_bytes, expected.payload_bytes, Refusal.PAYLOAD_BYTES),
            # A later version may give these bytes a meaning, so they are not ignored.
            (whole, _WHOLE, Refusal.MALFORMED),
            (content[_FIELDS.size : -_CHECKSUM_BYTES], bytes(_PADDING), Refusal.MALFORMED),
        ):
            if found != derived:
                return reason
        return cls(payload_tag, generation, nonce)


class EntryMacs:
    """The keys of the MACs of entries on disk and in stores.

    A process without the secret can write no entry that another one accepts. Any thread may call.
    """

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError(
                f"a disk cache or a store needs cryptography: {install_hint('tiers')}"
            ) from error
        self._hash, self._hkdf, self._expand, self._aead = hashes.SHA256, HKDF, HKDFExpand, AESGCM
        self._secret = secret
        self._keys: dict[bytes, bytes] = {}

    def seal(self, facts: EntryFacts, parts: Iterable[Any]) -> bytes:
        """Return the header of an entry, with the MAC of the parts of its payload."""
        identity = facts.key.identity
        mac = self.payload_mac(identity)
        tag = mac.tag_of([mac.part(number, part) for number, part in enumerate(parts)])
        header = EntryHeader(tag, nonce=mac.nonce)
        return header.to_bytes(facts, self.header_key(identity))

    def open(
        self, data: bytes | bytearray | memoryview, expected: EntryFacts
    ) -> PayloadMac | Refusal:
        """Verify an untrusted header; return the MAC to verify the payload with."""
        identity = expected.key.identity
        header = EntryHeader.read(data, expected, self.header_key(identity))
        if isinstance(header, Refusal):
            return header
        return replace(self.payload_mac(identity, header.nonce), tag=header.payload_tag)

    def header_key(self, identity: bytes) -> bytes:
        """Return the key of the headers of an identity, [32] bytes, for ``EntryHeader``."""
        return self._keys_of(identity)[:32]

    def payload_mac(self, identity: bytes, nonce: bytes | None = None) -> PayloadMac:
        """Return an object that computes the MAC of one entry's payload."""
        nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        expand = self._expand(self._hash(), 32, b"mamba_cache payload " + nonce)
        key = expand.derive(self._keys_of(identity)[32:])
        return PayloadMac(nonce, self._aead(key).encrypt)

    def _keys_of(self, identity: bytes) -> bytes:
        keys = self._keys.get(identity)
        if keys is None:
            if len(self._keys) >= _MAX_IDENTITIES:  # training changes the weights' identity
                self._keys = {}
            hkdf = self._hkdf(self._hash(), 64, identity, b"mamba_cache entries %d" % _VERSION)
            keys = self._keys[identity] = hkdf.derive(self._secret)
        return keys


@dataclass(frozen=True, slots=True, eq=False)
class PayloadMac:
    """Computes the MAC of one entry's payload from its parts: AES-GMAC. Made by ``EntryMacs``."""

    # A repeated GMAC nonce reveals the key. So each written entry has a key of its own, derived
    # from 128 random bits, and under this key the nonces count the entry's parts. That also binds
    # a part to its entry and its place.
    nonce: bytes
    _encrypt: Callable[[bytes, bytes, Any], bytes]
    tag: bytes = b""  # expected MAC of the parts' MACs; empty for a new entry

    def part(self, number: int, content: Any) -> bytes:
        """Return the MAC of a part, [16] bytes."""
        return self._encrypt(number.to_bytes(12, "little"), b"", content)

    def tag_of(self, macs: Sequence[bytes]) -> bytes:
        """Return the MAC of the concatenated MACs of all parts, [16] bytes."""
        return self._encrypt(_LAST_NONCE, b"", b"".join(macs))

    def vouches_for(self, macs: Sequence[bytes]) -> bool:
        """Return whether the MACs of all parts agree with ``tag``."""
        return hmac.compare_digest(self.tag_of(macs), self.tag)


def payload_digest(payload: Any) -> bytes:
    """Return the digest of a payload in host memory: xxh3-128, at about the speed of memory.

    This digest detects damaged bytes, but not bytes that an attacker chose.
    """
    digest: bytes = xxhash.xxh3_128_digest(payload)
    return digest


def prefix_tokens_in(header: memoryview) -> int:
    """Return the number of prefix tokens in an untrusted header, bounded."""
    prefix_tokens: int = _FIELDS.unpack_from(header)[7]
    return min(prefix_tokens, _MAX_PREFIX_TOKENS)


def _checksum(content: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES, key=key).digest()
