"""Token ids in whatever form an engine holds them, as one checked array."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mamba_cache.errors import InvalidArgumentError

__all__ = ["MAX_TOKEN_ID", "as_token_array"]

MAX_TOKEN_ID = 2**31 - 1
"""The largest token id that a block hash takes."""

_DTYPE: Final = np.dtype("<i4")


def as_token_array(tokens: Any) -> npt.NDArray[np.int32]:
    """Return ``tokens`` as a contiguous little-endian int32 array, which may share their memory.

    Args:
        tokens: [num_tokens] token ids: a sequence of ints (``bytes`` counts as one), a numpy array
            or torch tensor of any integer dtype. A tensor may be on any device; one on an
            accelerator is copied, which waits for that device.

    Raises:
        InvalidArgumentError: Not one-dimensional, not integers (bools are not), or an id is
            negative or above ``MAX_TOKEN_ID``; the message names the first such id.
    """
    if not isinstance(tokens, (np.ndarray, list)):
        if hasattr(tokens, "detach"):
            tokens = _from_tensor(tokens)
        elif isinstance(tokens, memoryview):  # a sequence too, but only if it has one dimension
            tokens = np.asarray(tokens)
    if isinstance(tokens, np.ndarray):
        return _from_array(tokens)
    if isinstance(tokens, list) or (isinstance(tokens, Sequence) and not isinstance(tokens, str)):
        return _from_sequence(tokens)
    raise InvalidArgumentError(
        "tokens must be a sequence of ints, a numpy array or a torch tensor, "
        f"got {type(tokens).__name__}"
    )


def _from_tensor(tokens: Any) -> Any:
    # Recognised by its methods: this package does not import torch.
    try:
        return tokens.detach().cpu().numpy()
    except (TypeError, NotImplementedError) as error:
        # A dtype that numpy lacks, such as bfloat16; a tensor that is sparse, or without data.
        raise InvalidArgumentError(
            "tokens must be a dense tensor of an integer dtype, "
            f"got {tokens.dtype}, {tokens.layout} on {tokens.device}"
        ) from error


def _from_array(tokens: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if tokens.ndim != 1:
        raise InvalidArgumentError(
            f"tokens must have one dimension, got an array of shape {tokens.shape}"
        )
    if tokens.dtype.kind not in "iu":
        first = f", first value {tokens[0]!r}" if len(tokens) else ""
        raise InvalidArgumentError(f"tokens must have an integer dtype, got {tokens.dtype}{first}")
    # One pass finds both faults: the bits of all ids together make a valid id if and only if
    # each of them is one.
    if not 0 <= int(np.bitwise_or.reduce(tokens)) <= MAX_TOKEN_ID:
        position = int(np.argmax((tokens < 0) | (tokens > MAX_TOKEN_ID)))
        raise _bad_token(tokens[position], position)
    return np.ascontiguousarray(tokens, dtype=_DTYPE)


def _from_sequence(tokens: Sequence[Any]) -> npt.NDArray[np.int32]:
    values = list(tokens)  # one that no other thread changes
    # Counting plain ints takes 10 ns a token and packing them 8 (AMD EPYC); numpy's own reading
    # takes 20, and accepts bools.
    kinds = [*map(type, values)]
    if kinds.count(int) != len(values) and not all(map(_is_integer, set(kinds))):
        position = next(i for i, kind in enumerate(kinds) if not _is_integer(kind))
        raise _bad_token(values[position], position)
    packed = bytearray(_DTYPE.itemsize * len(values))
    try:
        struct.pack_into(f"<{len(values)}i", packed, 0, *values)
    except struct.error:  # not an int of 32 bits
        raise _out_of_range(values) from None
    array: npt.NDArray[np.int32] = np.frombuffer(packed, dtype=_DTYPE)
    if values and array.min() < 0:
        raise _out_of_range(values)
    return array


def _out_of_range(values: list[Any]) -> InvalidArgumentError:
    position = next(i for i, token in enumerate(values) if not 0 <= token <= MAX_TOKEN_ID)
    return _bad_token(values[position], position)


def _is_integer(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, bool)


def _bad_token(token: object, position: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"token ids must be ints from 0 to {MAX_TOKEN_ID}, got {token!r} at position {position}"
    )
