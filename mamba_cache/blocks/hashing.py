"""Block hashes as values, and the keyed hash functions that make them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias, get_args, overload

import numpy as np
import xxhash

from mamba_cache._checks import as_items, check_choice, check_secret
from mamba_cache.config import HashAlgorithm
from mamba_cache.errors import InvalidArgumentError

__all__ = ["BlockHasher", "BlockHashes", "ExtraKey", "encode_keys", "hash_id_of"]

ExtraKey: TypeAlias = "str | bytes | int | None"
"""A cache salt or LoRA id. Equal spellings of different types are different keys."""

_DIGEST_SIZES: Final = (16, 32)
_ID_MASK: Final = 2**63 - 1
_FEW: Final = 8
_PROCESS_SECRET: Final = os.urandom(32)

# BLAKE2b's personalisation: what one of them hashes never has the digest of another.
_ROOT: Final = b"mamba_cache root"
_BLOCK: Final = b"mamba_cache node"
_KEY: Final = b"mamba_cache key"


class BlockHashes(Sequence[int]):
    """Hashes of consecutive blocks from a sequence's start: ids to look up, digests to verify.

    As a sequence it holds the *hash ids*: positive ints below 2**63, cut from the digests. Two
    different prefixes can share an id, though hardly ever; nobody shares a digest. Immutable.
    A slice is a ``BlockHashes`` too. Equal to another one with the same digests, and to a list or
    tuple of the same ids.

    Args:
        digests: One digest per block: all of one hasher, 16 or 32 bytes each.

    Raises:
        InvalidArgumentError: A digest is not ``bytes``, or their lengths differ or are others.
    """

    __slots__ = ("_digests", "_ids", "_length")

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._digests: list[bytes] = as_items("digests", digests, "bytes")
        self._length = len(self._digests)
        self._ids: list[int] = []
        for digest in self._digests:
            if not isinstance(digest, bytes) or len(digest) not in _DIGEST_SIZES:
                raise InvalidArgumentError(
                    f"a digest must be bytes, {_DIGEST_SIZES} of them, got {digest!r}"
                )
        sizes = {len(digest) for digest in self._digests}
        if len(sizes) > 1:
            raise InvalidArgumentError(f"digests must be of one length, got {sorted(sizes)}")

    @classmethod
    def _snapshot(cls, digests: list[bytes], ids: list[int]) -> BlockHashes:
        """Share lists that only ever grow: what is appended later stays out of sight."""
        hashes = cls.__new__(cls)
        hashes._digests = digests
        hashes._ids = ids
        hashes._length = len(digests)
        return hashes

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The full digest of each block."""
        return tuple(self._digests[: self._length])

    def digest(self, index: int) -> bytes:
        """Return the full digest of one block, in O(1).

        Raises:
            IndexError: There is no such block.
        """
        return self._digests[range(self._length)[index]]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._hash_ids()[: self._length])

    def _hash_ids(self) -> list[int]:
        """Return the hash ids of these blocks, and perhaps of later ones."""
        ids = self._ids
        known = len(ids)
        if known < self._length:
            new = _cut_from(self._digests[known : self._length])
            # Threads that come here at once write the same.
            ids[known : self._length] = new
        return ids

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> BlockHashes: ...
    def __getitem__(self, index: int | slice) -> int | BlockHashes:
        if isinstance(index, slice):
            places, ids = range(self._length)[index], self._ids
            if len(places) == self._length and index.step is None:
                return self
            known = [ids[i] for i in places] if len(ids) >= self._length else []
            return BlockHashes._snapshot([self._digests[i] for i in places], known)
        position = index if 0 <= index < self._length else range(self._length)[index]
        ids = self._ids
        return ids[position] if position < len(ids) else hash_id_of(self._digests[position])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockHashes):
            return self.digests == other.digests
        if isinstance(other, (list, tuple)):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"BlockHashes({list(self)})"


class BlockHasher:
    """A hash function for blocks, with a secret.

    The secret is the BLAKE2b key of every chain's root, and with "blake2b" of every block. So a
    client cannot craft a prompt whose digest is that of another prompt, even if the client has seen
    digests. "sha256" gives the same protection by the length of its digests. "xxh3_128" gives none:
    two blocks that collide under it do so for every parent and every secret, and finding such a
    pair takes seconds.

    Processes that share entries need the same algorithm and the same secret.

    Args:
        algorithm: "blake2b", "sha256", or, where all clients are trusted, "xxh3_128".
        secret: A key of any length but zero. Default: one drawn when the process starts.

    Attributes:
        algorithm: As given.
        digest_size_bytes: Length of a digest: 32 with "sha256", else 16.
        digest: The hash function of one block. Its input is the digest of the parent, the block's
            tokens as little-endian int32, and the encoded multimodal keys of the block, if any.

    Raises:
        InvalidArgumentError: Unknown algorithm, or a secret that is empty or not ``bytes``.
    """

    __slots__ = ("_key", "algorithm", "digest", "digest_size_bytes")

    def __init__(self, algorithm: HashAlgorithm = "blake2b", secret: bytes | None = None) -> None:
        check_choice("algorithm", algorithm, get_args(HashAlgorithm))
        secret = check_secret("secret", secret)
        self._key = _as_key(_PROCESS_SECRET if secret is None else secret)
        self.algorithm: HashAlgorithm = algorithm
        self.digest_size_bytes = 32 if algorithm == "sha256" else 16
        self.digest = _digest_function(algorithm, self._key)

    def __repr__(self) -> str:
        return f"BlockHasher({self.algorithm!r}, secret=...)"

    def root(self, block_size_tokens: int, cache_salt: ExtraKey, lora_id: ExtraKey) -> bytes:
        """Return the digest that block 0 is chained on: all that concerns a whole sequence.

        Raises:
            InvalidArgumentError: A key is not a str, bytes, int or None.
        """
        return hashlib.blake2b(
            encode_keys(block_size_tokens, cache_salt, lora_id),
            key=self._key,
            digest_size=self.digest_size_bytes,
            person=_ROOT,
        ).digest()


def _cut_from(digests: list[bytes]) -> list[int]:
    """Return the hash id of each digest."""
    if len(digests) <= _FEW:
        return [hash_id_of(digest) for digest in digests]
    words = np.frombuffer(b"".join(digests), dtype="<i8")
    ids = words.reshape(len(digests), -1)[:, 0] & _ID_MASK
    # 0 is not positive; it shares the id 1 instead, and the digests tell the two apart.
    hash_ids: list[int] = np.maximum(ids, 1).tolist()
    return hash_ids


def hash_id_of(digest: bytes) -> int:
    """Return the hash id that is cut from a digest."""
    return int.from_bytes(digest[:8], "little") & _ID_MASK or 1


def _as_key(secret: bytes) -> bytes:
    """Return a secret as a key of BLAKE2b, which has at most 64 bytes."""
    if len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
        return secret
    return hashlib.blake2b(secret, person=_KEY).digest()


def _digest_function(algorithm: HashAlgorithm, key: bytes) -> Callable[[bytes], bytes]:
    if algorithm == "sha256":
        return _sha256
    if algorithm == "xxh3_128":
        xxh3: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
        return xxh3
    # A copy of a keyed object reads no arguments: a block of 16 tokens takes 0.47 us, and 0.63 us
    # with a new object (AMD EPYC, Python 3.11).
    copy = hashlib.blake2b(key=key, digest_size=16, person=_BLOCK).copy

    def digest(data: bytes) -> bytes:
        block = copy()
        block.update(data)
        return block.digest()

    return digest


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def encode_keys(*values: ExtraKey) -> bytes:
    """Encode values so that no other list of values gives the same bytes: type, length, content."""
    return b"".join(_encode_one(value) for value in values)


def _encode_one(value: ExtraKey) -> bytes:
    if value is None:
        kind, content = b"n", b""
    elif isinstance(value, bytes):
        kind, content = b"b", value
    elif isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int) and not isinstance(value, bool):
        kind, content = b"i", str(value).encode()
    else:
        raise InvalidArgumentError(
            f"a cache salt or key must be a str, bytes, int or None, got {value!r}"
        )
    return kind + len(content).to_bytes(8, "little") + content
