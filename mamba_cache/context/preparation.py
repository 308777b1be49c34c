"""Checks the tokens of requests and hashes their blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mamba_cache.blocks import MAX_TOKEN_ID, BlockHashChain, BlockHasher, as_token_array
from mamba_cache.config import CacheConfig
from mamba_cache.context.requests import PreparedRequest, Request, TokenArray
from mamba_cache.errors import InvalidArgumentError, SequenceLengthError

__all__ = ["RequestPreparer"]


class RequestPreparer:
    """Turns what a caller gives into what the context works with; keeps nothing.

    Args:
        config: Settings.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._hasher = BlockHasher(config.hash_algorithm, config.hash_secret)

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request's tokens and hash its complete blocks.

        Raises:
            InvalidArgumentError: The prompt is empty, not 1-D, or holds what is no token id.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
        """
        if not isinstance(request, Request):
            raise InvalidArgumentError(f"give a Request, got {type(request).__name__}")
        tokens = self.check_tokens(request.prompt_tokens)
        if not len(tokens):
            raise InvalidArgumentError(f"the prompt of request {request.request_id!r} is empty")
        if len(tokens) > self._config.max_sequence_length:
            raise SequenceLengthError(
                f"request {request.request_id!r} has {len(tokens)} prompt tokens; "
                f"max_sequence_length is {self._config.max_sequence_length}"
            )
        chain = BlockHashChain(
            self._config.block_size_tokens,
            hasher=self._hasher,
            cache_salt=request.cache_salt,
            lora_id=request.lora_id,
            multimodal_keys=request.multimodal_keys,
        )
        if self._config.enable_prefix_caching:
            chain.append(tokens)
        tokens.flags.writeable = False  # the hashes are of just these tokens
        return PreparedRequest(request, tokens, chain.hashes, chain, self)

    def check_tokens(self, tokens: object) -> TokenArray:
        """Return tokens as an int32 array of the context's own.

        Raises:
            InvalidArgumentError: They are not 1-D ints, or one is no token id.
        """
        own: TokenArray = self.read_tokens(tokens).copy()  # the caller may write into theirs
        return own

    def are_tokens(self, array: np.ndarray[Any, np.dtype[Any]]) -> bool:
        """Say whether all ints of an array of any shape are token ids."""
        # One pass: the bits of all ids together make a valid id if and only if each of them is one.
        bits, limit = int(np.bitwise_or.reduce(array, axis=None)), self._config.vocab_size
        is_below = limit is None or bits < limit or int(array.max()) < limit
        return 0 <= bits <= MAX_TOKEN_ID and is_below

    def read_tokens(self, tokens: object) -> TokenArray:
        """Return tokens as an int32 array, which may share their memory.

        Raises:
            InvalidArgumentError: They are not 1-D ints, or one is no token id.
        """
        array: TokenArray = as_token_array(tokens)
        limit = self._config.vocab_size
        if limit is not None and len(array) and int(array.max()) >= limit:
            raise InvalidArgumentError(
                f"token ids must be below vocab_size ({limit}), got {int(array.max())}"
            )
        return array
