"""Metadata for a step's kernels: the step's tensors, and chunks of packed sequences.

A *chunk* of the Mamba2 (SSD) kernels has at most ``chunk_size`` tokens of one sequence. Chunks are
numbered over the whole packed batch, in batch order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from mamba_cache._checks import INT32_MAX, check_int
from mamba_cache.errors import InvalidArgumentError

__all__ = [
    "StepMetadata",
    "compute_chunk_metadata",
    "compute_varlen_chunk_metadata",
    "cut_into_chunks",
]

_IntArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_Int32Array: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"

_FEW = 8
"""Up to this many sequences are cut one by one: array operations have a higher fixed cost."""


@dataclass(slots=True, eq=False)  # created at each step: a frozen one takes three times as long
class StepMetadata:
    """Metadata of one step for the model's layers.

    The batch is packed without padding: the tokens of each decoding request (the last sampled one
    and its drafts), then the prefill chunks, one after another. Row ``i`` of every per-request
    tensor is the batch's ``i``-th request; rows past ``num_requests`` are padding. Every tensor
    keeps its address and its size from step to step, so that a captured CUDA graph can read it.

    Attributes:
        num_decodes: Requests that decode; first in the batch.
        num_prefills: Requests that compute a chunk of their prompt; last in the batch.
        num_tokens: Tokens of the whole batch.
        num_decode_tokens: Tokens of the decoding part: one for each request, plus its drafts.
        max_decode_len: Maximum number of tokens of a decoding request.
        num_chunks: SSM chunks of the prefill part.
        chunk_size: Maximum number of tokens of an SSM chunk.
        num_checkpoints: Checkpoints inside this step's prefill chunks.
        max_seq_len: Maximum of ``seq_lens``; an upper bound while the number of accepted drafts of
            the last step is known on the device only.
        token_ids: [max_tokens] int64. Input tokens; padding is 0.
        positions: [max_tokens] int64. Position of each token in its sequence; padding is 0.
        kv_slot_mapping: [max_tokens] int64. Destination of a token's key and value, as block id *
            block size + offset. ``PAD_SLOT_ID``: not written, because the block is shared and
            already filled, or the row is padding.
        query_start_loc: [max_requests + 1] int32. First packed token of each request; padding
            repeats ``num_tokens``.
        num_computed_tokens: [max_requests] int32. Tokens that the live state contains before this
            step; padding is 0.
        seq_lens: [max_requests] int32. ``num_computed_tokens`` plus this step's tokens.
        request_rows: [max_requests] int32. Row of each request in the context's tables; padding is
            ``PAD_SLOT_ID``.
        state_rows: [max_requests] int32. Live-state row of each request, which the step reads and a
            prefill also writes; padding is ``PAD_SLOT_ID``.
        decode_state_rows: [max_requests, 1 + maximum tokens of a decode] int32. For each decoding
            request the live-state row to read, then for each of its tokens the row to write the
            state after this token to. All columns can be written. Without speculation both columns
            are the same row. Other requests and padding: ``PAD_SLOT_ID``.
        cu_chunk_seqlens: [max_chunks + 1] int32. First token of each SSM chunk, counted from the
            prefill part's first token; padding repeats the number of prefill tokens.
        chunk_seq_idx: [max_chunks] int32. Index of the chunk's prefill request (0 = first prefill);
            padding is -1.
        last_chunk_indices: [max_requests] int32. Last chunk of each prefill request; padding is -1.
        checkpoint_chunks: [max_checkpoints] int32. The chunk whose end state is saved; padding: -1.
        checkpoint_conv_ends: [max_checkpoints] int32. The packed prefill token after the
            checkpoint; the saved conv window is the inputs before this token. Padding is -1.
        checkpoint_seq_starts: [max_checkpoints] int32. The first packed prefill token of the same
            request; earlier inputs come from the live conv state. Padding is -1.
        checkpoint_rows: [max_checkpoints] int32. The request's live-state row; padding is
            ``PAD_SLOT_ID``.
        checkpoint_slots: [max_checkpoints] int32. The reserved slot; padding is ``PAD_SLOT_ID``.
        restore_sources: [max_requests] int32. Slots to restore from in this step; ``ZERO_SOURCE``
            of ``mamba_cache.states`` zeroes the state instead; padding is ``PAD_SLOT_ID``.
        restore_rows: [max_requests] int32. Live-state rows to restore into; padding is
            ``PAD_SLOT_ID``.
        boundary_rows: [max_requests] int32. Live-state rows that are saved at commit; padding is
            ``PAD_SLOT_ID``. With speculation commit determines the rows of decoding requests.
        boundary_slots: [max_requests] int32. The reserved slots that these rows are saved to.
        boundary_entries: [max_requests] int32. A request's index in these two tensors; none: -1.
        boundary_positions: [max_requests] int32. The boundary of each request, in tokens from the
            sequence's start; none: -1.
        block_tables: [max_requests, max_blocks] int32. KV block ids of each request; entries past
            a request's last block are the dummy block. Rows past ``num_requests`` keep old
            values, so a kernel must skip them by ``state_rows`` or ``seq_lens``.
    """

    num_decodes: int
    num_prefills: int
    num_tokens: int
    num_decode_tokens: int
    max_decode_len: int
    num_chunks: int
    chunk_size: int
    num_checkpoints: int
    max_seq_len: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    num_computed_tokens: torch.Tensor
    seq_lens: torch.Tensor
    request_rows: torch.Tensor
    state_rows: torch.Tensor
    decode_state_rows: torch.Tensor
    cu_chunk_seqlens: torch.Tensor
    chunk_seq_idx: torch.Tensor
    last_chunk_indices: torch.Tensor
    checkpoint_chunks: torch.Tensor
    checkpoint_conv_ends: torch.Tensor
    checkpoint_seq_starts: torch.Tensor
    checkpoint_rows: torch.Tensor
    checkpoint_slots: torch.Tensor
    restore_sources: torch.Tensor
    restore_rows: torch.Tensor
    boundary_rows: torch.Tensor
    boundary_slots: torch.Tensor
    boundary_entries: torch.Tensor
    boundary_positions: torch.Tensor
    block_tables: torch.Tensor

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return self.num_decodes + self.num_prefills

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefill part."""
        return self.num_tokens - self.num_decode_tokens


def compute_chunk_metadata(
    query_start_loc: _IntArray, num_computed_tokens: _IntArray, chunk_size: int
) -> tuple[_Int32Array, _Int32Array, _Int32Array]:
    """Cut sequences at multiples of ``chunk_size``, counted from each sequence's start.

    A sequence that resumes inside a chunk first finishes this chunk, so chunks do not depend on
    where earlier steps stopped.

    Args:
        query_start_loc: [B + 1] int. First packed token of each sequence, then the number of
            tokens; starts at 0, non-decreasing.
        num_computed_tokens: [B] int. Tokens of each sequence before its packed tokens.
        chunk_size: Maximum number of tokens in a chunk.

    Returns:
        ``cu_chunk_seqlens`` [num_chunks + 1] int32, packed start of each chunk, then the number of
        tokens; ``chunk_seq_idx`` [num_chunks] int32, sequence of each chunk;
        ``last_chunk_indices`` [B] int32, last chunk of each sequence, -1 for an empty one.

    Raises:
        InvalidArgumentError: An argument is not as described.
    """
    starts = _check_query_start_loc(query_start_loc)
    computed = _check_int_array("num_computed_tokens", num_computed_tokens)
    if len(computed) != len(starts) - 1 or (computed < 0).any():
        raise InvalidArgumentError(
            f"num_computed_tokens must be {len(starts) - 1} ints >= 0, one for each sequence, "
            f"got {len(computed)}, the least {computed.min(initial=0)}"
        )
    chunk_size = check_int("chunk_size", chunk_size, minimum=1, maximum=INT32_MAX)
    max_chunks = starts.item(-1) // chunk_size + 2 * len(computed)
    sizes = max_chunks + 1, max_chunks
    cu_chunk_seqlens, chunk_seq_idx = (np.empty(size, np.int32) for size in sizes)
    last_chunk_indices = np.empty(len(computed), np.int32)
    out = cu_chunk_seqlens, chunk_seq_idx, last_chunk_indices
    num_chunks = cut_into_chunks(starts, computed % chunk_size, chunk_size, out)
    return cu_chunk_seqlens[: num_chunks + 1], chunk_seq_idx[:num_chunks], last_chunk_indices


def compute_varlen_chunk_metadata(
    query_start_loc: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut sequences at multiples of ``chunk_size`` of the packed position.

    This waits for a tensor on a device, because the number of chunks depends on its values.

    Args:
        query_start_loc: [B + 1] int. First packed token of each sequence, then the number of
            tokens; starts at 0, non-decreasing.
        chunk_size: Maximum number of tokens in a chunk.

    Returns:
        All int32 on the same device: ``cu_chunk_seqlens`` [num_chunks + 1], packed start of each
        chunk, then the number of tokens; ``last_chunk_indices`` [B], last chunk of each sequence,
        -1 for an empty one; ``seq_idx_chunks`` [num_chunks], sequence of each chunk.

    Raises:
        InvalidArgumentError: An argument is not as described.
    """
    try:
        starts = _check_query_start_loc(query_start_loc.detach().cpu().numpy())
    except (AttributeError, TypeError, NotImplementedError) as error:
        raise InvalidArgumentError(
            f"query_start_loc must be a 1-D tensor of ints with data, got {query_start_loc!r}"
        ) from error
    # Passing packed starts as computed tokens counts chunks by packed position.
    cu_chunk_seqlens, chunk_seq_idx, last_chunk_indices = compute_chunk_metadata(
        starts, starts[:-1], chunk_size
    )
    device = query_start_loc.device
    return (
        torch.from_numpy(cu_chunk_seqlens).to(device),
        torch.from_numpy(last_chunk_indices).to(device),
        torch.from_numpy(chunk_seq_idx).to(device),
    )


def cut_into_chunks(
    starts: Sequence[int] | _IntArray,
    phases: Sequence[int] | _IntArray,
    chunk_size: int,
    out: tuple[_Int32Array, _Int32Array, _Int32Array],
) -> int:
    """Cut sequences whose first chunks already have ``phases`` tokens; write to ``out``.

    Like ``compute_chunk_metadata``, with unchecked arguments. Returns the number of chunks.
    """
    if len(phases) <= _FEW:
        return _cut_few(starts, phases, chunk_size, out)
    cu_chunk_seqlens, chunk_seq_idx, last_chunk_indices = out
    starts, phases = np.asarray(starts), np.asarray(phases)
    lengths = starts[1:] - starts[:-1]
    num_chunks = (phases + lengths + (chunk_size - 1)) // chunk_size
    num_chunks[lengths == 0] = 0
    chunks_through = num_chunks.cumsum()
    which = np.arange(len(lengths)).repeat(num_chunks)
    count = len(which)
    # Index of each chunk in its sequence; chunk 0 may be partly computed already.
    ordinals = np.arange(count) - (chunks_through - num_chunks)[which]
    offsets = np.maximum(ordinals * chunk_size - phases[which], 0)
    cu_chunk_seqlens[:count] = starts[which] + offsets
    cu_chunk_seqlens[count] = starts[-1]
    chunk_seq_idx[:count] = which
    last_chunk_indices[: len(lengths)] = np.where(num_chunks > 0, chunks_through - 1, -1)
    return count


def _cut_few(
    starts: Sequence[int] | _IntArray,
    phases: Sequence[int] | _IntArray,
    chunk_size: int,
    out: tuple[_Int32Array, _Int32Array, _Int32Array],
) -> int:
    """Cut few sequences one after another, at less cost than array operations."""
    cu_chunk_seqlens, chunk_seq_idx, last_chunk_indices = out
    start = first = 0
    for index, phase in enumerate(phases):
        bound = int(starts[index + 1])
        last_chunk_indices[index] = -1
        if bound > start:
            bounds = np.arange(start - int(phase), bound, chunk_size)
            end = first + len(bounds)
            cu_chunk_seqlens[first:end] = bounds
            cu_chunk_seqlens[first] = start
            chunk_seq_idx[first:end] = index
            last_chunk_indices[index] = end - 1
            start, first = bound, end
    cu_chunk_seqlens[first] = start
    return first


def _check_query_start_loc(query_start_loc: _IntArray) -> _IntArray:
    starts = _check_int_array("query_start_loc", query_start_loc)
    if not len(starts) or starts[0] != 0 or (np.diff(starts) < 0).any():
        raise InvalidArgumentError(
            f"query_start_loc must start at 0 and not decrease, got {query_start_loc}"
        )
    if starts[-1] > INT32_MAX:
        raise InvalidArgumentError(
            f"a batch may have at most {INT32_MAX} tokens, got {int(starts[-1])}"
        )
    return starts


def _check_int_array(name: str, array: _IntArray) -> _IntArray:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        dtype = getattr(array, "dtype", type(array).__name__)
        shape = tuple(getattr(array, "shape", ()))
        raise InvalidArgumentError(
            f"{name} must be a 1-D numpy array of ints, got {dtype}, shape {shape}"
        )
    return array.astype(np.int64)
