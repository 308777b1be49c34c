"""Block hashes of a sequence, each chained on the block before."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import INT32_MAX, as_items, check_int
from mamba_cache.blocks.hashing import BlockHasher, BlockHashes, ExtraKey, encode_keys
from mamba_cache.blocks.tokens import as_token_array
from mamba_cache.errors import InvalidArgumentError

__all__ = ["BlockHashChain", "compute_block_hashes"]

_TOKEN_BYTES = 4


class BlockHashChain:
    """The block hashes of one sequence that grows.

    The digest of a block is the hash of its parent's digest, the block's tokens as little-endian
    int32, and the block's multimodal keys, so it names the whole prefix. Digests and blocks have
    one size each, and every key is encoded with its length: different inputs never give the same
    bytes. Block 0's parent is a root made of the hasher's secret, the block size, the salt and the
    LoRA id. A multimodal key belongs to the block in which its position lies, so it concerns that
    block and all after it.

    Args:
        block_size_tokens: Tokens of one block, >= 1.
        hasher: Default: ``BlockHasher()``.
        cache_salt: Sequences of different salts never match.
        lora_id: Likewise for adapters.
        multimodal_keys: (position, key) pairs: at this token position stands an input, such as an
            image, that its token ids do not tell apart but ``key`` does (a hash of its content).
            For an input of many tokens its first position is enough. The order is free.

    Raises:
        InvalidArgumentError: ``block_size_tokens`` is not an int >= 1, a position is not an int
            >= 0, or a key is of a type that is not allowed.
    """

    __slots__ = (
        "_all_keys",
        "_block_bytes",
        "_digests",
        "_hasher",
        "_ids",
        "_keys",
        "_parent",
        "_root",
        "_split",
        "_tail",
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
        self._parent = self._root
        self._all_keys = _keys_by_block(multimodal_keys, block_size_tokens)
        self._keys = list(self._all_keys)
        self._block_bytes = block_size_tokens * _TOKEN_BYTES
        self._split = struct.Struct(f"{self._block_bytes}s").iter_unpack
        self._digests: list[bytes] = []
        self._ids: list[int] = []  # of the first digests, as far as somebody has asked for them
        self._tail = bytearray()

    @property
    def hashes(self) -> BlockHashes:
        """Hashes of the complete blocks so far, in O(1); later blocks do not change it."""
        return BlockHashes._snapshot(self._digests, self._ids)

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far, those of the incomplete last block included."""
        return (len(self._digests) * self._block_bytes + len(self._tail)) // _TOKEN_BYTES

    def copy(self, num_blocks: int | None = None) -> BlockHashChain:
        """Return a chain that grows on its own, in O(blocks).

        Args:
            num_blocks: How many complete blocks it has; what comes after them is not in it.
                Default: it has all tokens.

        Raises:
            InvalidArgumentError: There are not so many complete blocks.
        """
        chain: BlockHashChain = object.__new__(BlockHashChain)
        chain._hasher, chain._parent, chain._root = self._hasher, self._parent, self._root
        chain._all_keys, chain._block_bytes = self._all_keys, self._block_bytes
        chain._split = self._split
        if num_blocks is None:
            chain._keys = list(self._keys)
            chain._digests, chain._ids = list(self._digests), list(self._ids)
            chain._tail = bytearray(self._tail)
            return chain
        end = check_int("num_blocks", num_blocks, minimum=0, maximum=len(self._digests))
        chain._parent = self.parent_digest(end)
        # Keys of a block are forgotten when it is hashed.
        chain._keys = [keys for keys in self._all_keys if keys[0] >= end]
        chain._digests, chain._ids = self._digests[:end], self._ids[:end]
        chain._tail = bytearray()
        return chain

    def parent_digest(self, index: int) -> bytes:
        """Return what block ``index`` is chained on: the digest before it, or the root.

        Args:
            index: A block, from 0 to the number of complete blocks.
        """
        return self._digests[index - 1] if index else self._root

    def append(self, tokens: Any) -> None:
        """Append tokens and hash the blocks that they complete, in O(new tokens).

        Args:
            tokens: As for ``compute_block_hashes``.

        Raises:
            InvalidArgumentError: ``tokens`` are not valid ids; nothing is appended.
        """
        self.append_checked(as_token_array(tokens))

    def append_checked(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append what ``as_token_array`` returned, without a second look at it."""
        data = tokens.view(np.uint8).data
        if self._tail:
            self._tail += data
            if len(self._tail) < self._block_bytes:
                return
            data, self._tail = memoryview(self._tail), bytearray()
        complete = len(data) - len(data) % self._block_bytes
        self._hash_blocks(data[:complete])
        self._tail += data[complete:]

    def _hash_blocks(self, data: memoryview) -> None:
        """Hash whole blocks: one by one where they have keys, and in runs between."""
        while data:
            next_block = len(self._digests)
            if not self._keys:
                self._hash_run(data)
                return
            num_plain = self._keys[-1][0] - next_block
            if num_plain:
                end = num_plain * self._block_bytes
                self._hash_run(data[:end])
            else:
                end = self._block_bytes
                self._hash_with_keys(bytes(data[:end]), self._keys.pop()[1])
            data = data[end:]

    def _hash_with_keys(self, block: bytes, keys: list[tuple[int, str | bytes]]) -> None:
        encoded = encode_keys(*(part for key in keys for part in key))
        self._parent = self._hasher.digest(self._parent + block + encoded)
        self._digests.append(self._parent)

    def _hash_run(self, data: memoryview) -> None:
        digest, parent = self._hasher.digest, self._parent
        blocks = self._split(data)
        self._digests += [parent := digest(parent + block) for (block,) in blocks]
        self._parent = parent


def compute_block_hashes(
    tokens: Any,
    block_size_tokens: int,
    *,
    cache_salt: ExtraKey = None,
    lora_id: ExtraKey = None,
    multimodal_keys: Iterable[tuple[int, str | bytes]] = (),
    hasher: BlockHasher | None = None,
) -> BlockHashes:
    """Return the hashes of a sequence's complete blocks; a rest shorter than a block has none.

    Args:
        tokens: [num_tokens] token ids, each from 0 to 2**31 - 1: a sequence of ints, a numpy array
            or torch tensor of any integer dtype and device.
        block_size_tokens: Tokens of one block, >= 1.
        cache_salt: Sequences of different salts never match.
        lora_id: Likewise for adapters.
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
) -> list[tuple[int, list[tuple[int, str | bytes]]]]:
    """Group keys as (block, [(offset, key)]), the first block last so that it can be popped."""
    groups: dict[int, list[tuple[int, str | bytes]]] = {}
    for given, key in _as_pairs(keys):
        position = check_int("the position of a multimodal key", given, minimum=0)
        if not isinstance(key, (str, bytes)):
            raise InvalidArgumentError(
                f"a multimodal key must be a str or bytes, got {key!r} at position {position}"
            )
        block, offset = divmod(position, block_size_tokens)
        groups.setdefault(block, []).append((offset, key))
    for group in groups.values():
        # str and bytes do not compare, and the order in which keys were given must not matter.
        group.sort(key=lambda item: (item[0], isinstance(item[1], str), item[1]))
    return sorted(groups.items(), reverse=True)


def _as_pairs(keys: Any) -> list[tuple[Any, Any]]:
    pairs = as_items("multimodal_keys", keys, "(position, key) pairs")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidArgumentError(
                f"multimodal_keys must be (position, key) pairs, got {pair!r}"
            )
    return pairs
