"""Block hashes: checked token arrays, keyed hash functions, chains and their values."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, get_args, overload

import numpy as np
import numpy.typing as npt
import xxhash

from mamba_cache._checks import (
    INT32_MAX,
    as_items,
    check_choice,
    check_int,
    check_secret,
    is_unreadable,
)
from mamba_cache.config import HashAlgorithm
from mamba_cache.errors import InvalidArgumentError

__all__ = [
    "MAX_TOKEN_ID",
    "BlockHashChain",
    "BlockHasher",
    "BlockHashes",
    "ExtraKey",
    "as_token_array",
    "compute_block_hashes",
    "encode_keys",
    "hash_id_of",
    "list_hash_ids",
]

MAX_TOKEN_ID = 2**31 - 1
"""The largest valid token id."""

_DTYPE: Final = np.dtype("<i4")
_ONE: Final = np.array(1, _DTYPE)  # comparing arrays with it takes half the time of Python's 1
_TOKEN_BYTES: Final = 4

ExtraKey: TypeAlias = "str | bytes | int | None"
"""A cache salt or LoRA id. Keys of different types differ, such as 1 and "1"."""

_DIGEST_SIZES: Final = (16, 32)
_ID_MASK: Final = 2**63 - 1
_FEW: Final = 16  # maximum number of digests for which a loop is faster than numpy
_PROCESS_SECRET: Final = os.urandom(32)

# BLAKE2b's personalisation, so that roots, blocks and keys never have equal digests.
_ROOT: Final = b"mamba_cache root"
_BLOCK: Final = b"mamba_cache node"
_KEY: Final = b"mamba_cache key"


class BlockHashes(Sequence[int]):
    """Hashes of consecutive blocks from a sequence's start: hash ids and digests; immutable.

    Its items are the *hash ids*: positive ints below 2**63, cut from the digests. Different
    prefixes rarely have the same id, and never the same digest. A slice is a ``BlockHashes``. It
    equals a ``BlockHashes`` with the same digests, and a list or tuple of the same ids.

    Args:
        digests: Digest of each block, all by one hasher, 16 or 32 bytes each.

    Raises:
        InvalidArgumentError: A digest is not ``bytes``, has another length than 16 or 32, or the
            lengths differ.
    """

    __slots__ = ("_digests",)

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._digests: tuple[bytes, ...] = (*as_items("digests", digests, "bytes"),)
        for digest in self._digests:
            if not isinstance(digest, bytes) or len(digest) not in _DIGEST_SIZES:
                raise InvalidArgumentError(
                    f"a digest must be bytes, {_DIGEST_SIZES} of them, got {digest!r}"
                )
        sizes = {len(digest) for digest in self._digests}
        if len(sizes) > 1:
            raise InvalidArgumentError(f"digests must be of one length, got {sorted(sizes)}")

    @classmethod
    def of_own(cls, digests: tuple[bytes, ...]) -> BlockHashes:
        """Return hashes of digests from this package, unchecked."""
        hashes = cls.__new__(cls)
        hashes._digests = digests
        return hashes

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The full digest of each block."""
        return self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def __iter__(self) -> Iterator[int]:
        return iter(list_hash_ids(self._digests))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> BlockHashes: ...
    def __getitem__(self, index: int | slice) -> int | BlockHashes:
        if isinstance(index, slice):
            return BlockHashes.of_own(self._digests[index])
        return hash_id_of(self._digests[index])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockHashes):
            return self._digests == other._digests
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
    client cannot craft a prompt that has another prompt's digest, even if the client has seen
    digests. "sha256" gives the same protection by the length of its digests. "xxh3_128" gives none:
    two blocks that collide under it do so for every parent and secret, and such a pair is found in
    seconds.

    Processes that share entries need the same algorithm and the same secret.

    Args:
        algorithm: "blake2b", "sha256", or, if all clients are trusted, "xxh3_128".
        secret: Key, not empty. Default: a random key for the process.

    Attributes:
        algorithm: As given.
        digest_size_bytes: Length of a digest: 32 with "sha256", else 16.
        start: Returns a new hash object for one block. Its input is the parent's digest, the
            block's tokens as little-endian int32, and the block's encoded multimodal keys, if any.

    Raises:
        InvalidArgumentError: The algorithm is unknown, or the secret is empty or not ``bytes``.
    """

    __slots__ = ("_key", "algorithm", "digest_size_bytes", "start")

    def __init__(self, algorithm: HashAlgorithm = "blake2b", secret: bytes | None = None) -> None:
        check_choice("algorithm", algorithm, get_args(HashAlgorithm))
        secret = check_secret("secret", secret)
        self._key = _PROCESS_SECRET if secret is None else secret
        if len(self._key) > hashlib.blake2b.MAX_KEY_SIZE:
            self._key = hashlib.blake2b(self._key, person=_KEY).digest()
        self.algorithm: HashAlgorithm = algorithm
        self.digest_size_bytes = 32 if algorithm == "sha256" else 16
        # Copying a hash object is faster than making one: a block of 16 tokens takes 0.44 us
        # instead of 0.63 us (AMD EPYC, Python 3.11).
        states: dict[str, Any] = {
            "blake2b": hashlib.blake2b(key=self._key, digest_size=16, person=_BLOCK),
            "sha256": hashlib.sha256(),
            "xxh3_128": xxhash.xxh3_128(),
        }
        self.start: Callable[[], Any] = states[algorithm].copy

    def __repr__(self) -> str:
        return f"BlockHasher({self.algorithm!r}, secret=...)"

    def root(self, block_size_tokens: int, cache_salt: ExtraKey, lora_id: ExtraKey) -> bytes:
        """Return the digest that block 0 is chained on: the keys of the whole sequence.

        Raises:
            InvalidArgumentError: A key is not a str, bytes, int or None.
        """
        return hashlib.blake2b(
            encode_keys(block_size_tokens, cache_salt, lora_id),
            key=self._key,
            digest_size=self.digest_size_bytes,
            person=_ROOT,
        ).digest()


def hash_id_of(digest: bytes) -> int:
    """Return the hash id of a digest."""
    return list_hash_ids((digest,))[0]


def list_hash_ids(digests: Sequence[bytes]) -> list[int]:
    """Return the hash id of each digest."""
    # Ids are positive, so 0 becomes 1; digests still differ.
    if len(digests) <= _FEW:
        return [int.from_bytes(each[:8], "little") & _ID_MASK or 1 for each in digests]
    words = np.frombuffer(b"".join(digests), dtype="<i8")
    ids: list[int] = np.maximum(words[:: len(digests[0]) // 8] & _ID_MASK, 1).tolist()
    return ids


def encode_keys(*values: ExtraKey) -> bytes:
    """Encode values by type, length and content, so that different lists give different bytes."""
    encoded = b""
    for value in values:
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
        encoded += kind + len(content).to_bytes(8, "little") + content
    return encoded


class BlockHashChain:
    """The block hashes of one growing sequence.

    The digest of a block is the hash of its parent's digest, the block's tokens as little-endian
    int32, and the block's multimodal keys. So the digest names the whole prefix. Digests and blocks
    have fixed sizes, and every key is encoded with its length, so different inputs never give the
    same bytes. Block 0's parent is a root: the hash of block size, salt and LoRA id, keyed with the
    secret. A multimodal key is hashed in the block of its position, so it changes that block's
    digest and all later ones.

    Args:
        block_size_tokens: Number of tokens of one block, >= 1.
        hasher: Default: ``BlockHasher()``.
        cache_salt: Sequences with different salts never match.
        lora_id: Id of the adapter. Sequences with different adapters never match.
        multimodal_keys: (position, key) pairs of inputs, such as images, whose placeholder tokens
            do not identify them. ``key`` does, such as a hash of the content. For an input of many
            tokens its first position is enough. The order does not matter.

    Attributes:
        digests: Digest of each complete block so far; the list grows. Read only.

    Raises:
        InvalidArgumentError: ``block_size_tokens`` is not an int >= 1, a position is not an int
            >= 0, or a key has a wrong type.
    """

    __slots__ = (
        "_block_bytes",
        "_hasher",
        "_keys",
        "_root",
        "_split",
        "_tail",
        "digests",
    )

    def __init__(
        self,
        block_size_tokens: int,
        *,
        hasher: BlockHasher | None = None,
        cache_salt: ExtraKey = None,
        lora_id: ExtraKey = None,
        multimodal_keys: Iterable[tuple[int, str | bytes]] = (),
    ) -> None:
        block_size_tokens = check_int(
            "block_size_tokens", block_size_tokens, minimum=1, maximum=INT32_MAX
        )
        self._hasher = BlockHasher() if hasher is None else hasher
        self._root = self._hasher.root(block_size_tokens, cache_salt, lora_id)
        self._keys = _keys_by_block(multimodal_keys, block_size_tokens)
        self._block_bytes = block_size_tokens * _TOKEN_BYTES
        self._split = struct.Struct(f"{self._block_bytes}s").iter_unpack
        self.digests: list[bytes] = []
        self._tail = b""

    @property
    def hashes(self) -> BlockHashes:
        """Hashes of the complete blocks so far; later appends do not change the result."""
        return BlockHashes.of_own(tuple(self.digests))

    @property
    def num_tokens(self) -> int:
        """Number of tokens appended so far, with those of the incomplete last block."""
        return (len(self.digests) * self._block_bytes + len(self._tail)) // _TOKEN_BYTES

    def copy(self, num_blocks: int | None = None) -> BlockHashChain:
        """Return an independent copy, in O(blocks).

        Args:
            num_blocks: Number of complete blocks to copy; later tokens are left out. Default: all
                tokens are copied.

        Raises:
            InvalidArgumentError: There are fewer complete blocks.
        """
        chain: BlockHashChain = object.__new__(BlockHashChain)
        chain._hasher, chain._root, chain._keys = self._hasher, self._root, self._keys
        chain._block_bytes, chain._split = self._block_bytes, self._split
        end = len(self.digests)
        if num_blocks is not None:
            end = check_int("num_blocks", num_blocks, minimum=0, maximum=end)
        chain.digests = self.digests[:end]
        chain._tail = self._tail if num_blocks is None else b""
        return chain

    def append(self, tokens: Any) -> None:
        """Append tokens and hash the blocks that they complete, in O(new tokens).

        Args:
            tokens: As for ``compute_block_hashes``.

        Raises:
            InvalidArgumentError: ``tokens`` are not valid ids; nothing is appended.
        """
        self.append_checked(as_token_array(tokens))

    def append_checked(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append tokens that ``as_token_array`` returned, without checking them again."""
        data = self._tail + tokens.tobytes()
        complete = len(data) - len(data) % self._block_bytes
        start, digests, keys = self._hasher.start, self.digests, self._keys
        parent = digests[-1] if digests else self._root
        for (block,) in self._split(data[:complete]):
            state = start()
            state.update(parent + block + keys.get(len(digests), b"") if keys else parent + block)
            parent = state.digest()
            digests.append(parent)
        self._tail = data[complete:]


def compute_block_hashes(
    tokens: Any,
    block_size_tokens: int,
    *,
    cache_salt: ExtraKey = None,
    lora_id: ExtraKey = None,
    multimodal_keys: Iterable[tuple[int, str | bytes]] = (),
    hasher: BlockHasher | None = None,
) -> BlockHashes:
    """Return the hashes of a sequence's complete blocks; an incomplete last block has none.

    Args:
        tokens: [num_tokens] token ids, each from 0 to 2**31 - 1: a sequence of ints, a numpy array
            or torch tensor of any integer dtype and device.
        block_size_tokens: Number of tokens of one block, >= 1.
        cache_salt: Sequences with different salts never match.
        lora_id: Id of the adapter. Sequences with different adapters never match.
        multimodal_keys: (position, key) pairs, see ``BlockHashChain``.
        hasher: Default: ``BlockHasher()``.

    Raises:
        InvalidArgumentError: An argument is not as described; the message names the value.
    """
    chain = BlockHashChain(
        block_size_tokens,
        hasher=hasher,
        cache_salt=cache_salt,
        lora_id=lora_id,
        multimodal_keys=multimodal_keys,
    )
    chain.append(tokens)
    return chain.hashes


def _keys_by_block(
    keys: Iterable[tuple[int, str | bytes]], block_size_tokens: int
) -> dict[int, bytes]:
    """Return the encoded offsets and keys of each block with multimodal keys."""
    groups: dict[int, list[tuple[int, str | bytes]]] = {}
    for pair in as_items("multimodal_keys", keys, "(position, key) pairs"):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidArgumentError(
                f"multimodal_keys must be (position, key) pairs, got {pair!r}"
            )
        position, key = pair
        position = check_int("the position of a multimodal key", position, minimum=0)
        if not isinstance(key, (str, bytes)):
            raise InvalidArgumentError(
                f"a multimodal key must be a str or bytes, got {key!r} at position {position}"
            )
        block, offset = divmod(position, block_size_tokens)
        groups.setdefault(block, []).append((offset, key))
    for group in groups.values():
        # The given order must not matter; str and bytes cannot be compared with each other.
        group.sort(key=lambda item: (item[0], isinstance(item[1], str), item[1]))
    return {b: encode_keys(*(x for pair in group for x in pair)) for b, group in groups.items()}


def as_token_array(tokens: Any) -> npt.NDArray[np.int32]:
    """Return ``tokens`` as a contiguous little-endian int32 array, which may share their memory.

    Args:
        tokens: [num_tokens] token ids: a sequence of ints (``bytes`` counts as one), a numpy array
            or torch tensor of any integer dtype. A tensor may be on any device; copying it from an
            accelerator waits for that device.

    Raises:
        InvalidArgumentError: Not one-dimensional, not integers (bools are not), or an id is
            negative or above ``MAX_TOKEN_ID``; the message names the first such id.
    """
    if isinstance(tokens, (list, tuple)):
        return _from_sequence(tokens)
    if not isinstance(tokens, np.ndarray):
        if hasattr(tokens, "detach"):  # a tensor: this package does not import torch
            try:
                tokens = tokens.detach().cpu().numpy()
            except (TypeError, NotImplementedError) as error:
                # numpy has no such dtype (bfloat16), or the tensor is sparse or meta.
                raise InvalidArgumentError(
                    "tokens must be a dense tensor of an integer dtype, "
                    f"got {tokens.dtype}, {tokens.layout} on {tokens.device}"
                ) from error
        elif isinstance(tokens, memoryview):  # not all of these are a Sequence: see ndim
            tokens = np.asarray(tokens)
    if isinstance(tokens, np.ndarray):
        return _from_array(tokens)
    if isinstance(tokens, Sequence) and not isinstance(tokens, str):
        return _from_sequence(tokens)
    raise InvalidArgumentError(
        "tokens must be a sequence of ints, a numpy array or a torch tensor, "
        f"got {type(tokens).__name__}"
    )


def _from_array(tokens: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if tokens.ndim != 1:
        raise InvalidArgumentError(
            f"tokens must have one dimension, got an array of shape {tokens.shape}"
        )
    if tokens.dtype.kind not in "iu":
        first = f", first value {tokens[0]!r}" if len(tokens) else ""
        raise InvalidArgumentError(f"tokens must have an integer dtype, got {tokens.dtype}{first}")
    # One pass finds negative and large ids: the bitwise or of all ids is a valid id if and only if
    # each id is valid.
    if not 0 <= int(np.bitwise_or.reduce(tokens)) <= MAX_TOKEN_ID:
        raise _bad_token(tokens.tolist())
    return np.ascontiguousarray(tokens, dtype=_DTYPE)


def _from_sequence(tokens: Sequence[Any]) -> npt.NDArray[np.int32]:
    values = tuple(tokens)  # no other thread can change it, and pack takes its items directly
    # Packing takes 6 ns a token, reading by numpy 20 ns (AMD EPYC).
    try:
        packed = bytearray(struct.Struct(f"<{len(values)}i").pack(*values))
    except Exception as error:
        if isinstance(error, struct.error) or is_unreadable(error):  # not an int of 32 bits
            raise _bad_token(values) from None
        raise
    array: npt.NDArray[np.int32] = np.frombuffer(packed, dtype=_DTYPE)
    # Packing accepts bools as ints, so the types of values that became 0 or 1 are checked.
    low = (array <= _ONE).nonzero()[0].tolist()
    if low and (
        np.minimum.reduce(array) < 0
        or not all(map(_is_integer, {type(values[place]) for place in low}))
    ):
        raise _bad_token(values)
    return array


def _is_integer(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, bool)


def _bad_token(values: Sequence[Any]) -> InvalidArgumentError:
    """Return the error for the first value that is no token id."""
    position, token = next(
        (position, token)
        for position, token in enumerate(values)
        if not _is_integer(type(token)) or not 0 <= token <= MAX_TOKEN_ID
    )
    return InvalidArgumentError(
        f"token ids must be ints from 0 to {MAX_TOKEN_ID}, got {token!r} at position {position}"
    )
