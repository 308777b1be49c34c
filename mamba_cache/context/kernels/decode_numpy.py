"""The kernels of ``decode`` in numpy: the default on the CPU, and what the kernels must equal.

They write the tensors' own memory. Of batches as small as those of decoding requests numpy is some
times faster than PyTorch, whose every operation costs as much as a step's bookkeeping may.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from mamba_cache.context.decode_rows import DecodeRows
from mamba_cache.metadata import StepMetadata

__all__ = ["advance_rows", "describe_decodes", "describe_live_rows"]


def describe_decodes(
    rows: DecodeRows, metadata: StepMetadata, drafts: torch.Tensor | None, block_size: int
) -> None:
    """Write what only the device knows of the decoding requests into a step's metadata.

    Args:
        rows: How far each request is.
        metadata: The step's; its per-request tensors are written where requests decode, and its
            per-token tensors for their tokens.
        drafts: [max_requests, k] integer tokens by request row, where the host does not know
            them; negative: none.
        block_size: Tokens of a KV block.
    """
    describe_live_rows(rows, metadata)
    array, count, total = rows.array, metadata.num_decodes, metadata.num_decode_tokens
    places = array(metadata, "request_rows")[:count].astype(np.intp)
    bounds = array(metadata, "query_start_loc")[: count + 1]
    starts = bounds[:-1]
    lengths = bounds[1:] - starts
    computed = array(rows, "num_computed")[places]
    array(metadata, "num_computed_tokens")[:count] = computed
    array(metadata, "seq_lens")[:count] = computed + lengths

    request = np.repeat(np.arange(count), lengths)
    positions = np.arange(total) + (computed - starts)[request]
    array(metadata, "positions")[:total] = positions
    blocks = positions // block_size
    slots = array(metadata, "block_tables")[request, blocks] - blocks
    slots *= block_size
    slots += positions
    array(metadata, "kv_slot_mapping")[:total] = slots
    tokens = array(metadata, "token_ids")[:total]
    if drafts is not None:
        offsets = np.arange(total) - starts[request]
        guessed = drafts.numpy()[places[request], np.maximum(offsets - 1, 0)]
        tokens[:] = np.maximum(guessed, 0)
    tokens[starts] = array(rows, "last_tokens")[places]


def describe_live_rows(rows: DecodeRows, metadata: StepMetadata) -> None:
    """Write which live state of each decoding request is current, and which ones follow.

    Args:
        rows: How far each request is.
        metadata: The step's; ``state_rows`` and ``decode_state_rows`` are written where requests
            decode.
    """
    count, ring = metadata.num_decodes, rows.ring
    # Here and below: of 64 bits, by which numpy looks up several times as fast as by others.
    places = rows.array(metadata, "request_rows")[:count].astype(np.intp)
    live = (places * ring).repeat(ring)
    live += _rings(ring).take(rows.array(rows, "cursors")[places], axis=0).ravel()
    rows.array(metadata, "state_rows")[:count] = live[::ring]
    rows.array(metadata, "decode_state_rows")[:count] = live.reshape(count, ring)


@cache
def _rings(ring: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return [ring, ring]: for each cursor the rows of the ring, from that one on."""
    columns = np.arange(ring)
    rows: np.ndarray[Any, np.dtype[np.intp]] = (columns[:, None] + columns) % ring
    return rows


def advance_rows(
    rows: DecodeRows,
    metadata: StepMetadata,
    tokens: torch.Tensor | np.ndarray[Any, Any],
    counts: torch.Tensor | np.ndarray[Any, Any],
) -> None:
    """Move each request of a step past the tokens that became part of it.

    Args:
        rows: How far each request is; written.
        metadata: The step's. ``boundary_rows`` and ``boundary_slots`` of decoding requests are
            written: the row with the state at the boundary, or padding if it was not reached.
        tokens: [num_requests, k + 1] int64 new tokens, in batch order; as an array fewer columns
            do, if nobody takes more.
        counts: [num_requests] ints. How many of them each decoding request takes.
    """
    array, count, end = rows.array, metadata.num_decodes, metadata.num_requests
    places, new_tokens = array(metadata, "request_rows")[:end].astype(np.intp), np.asarray(tokens)
    num_computed, cursors = array(rows, "num_computed"), array(rows, "cursors")
    last_tokens = array(rows, "last_tokens")
    if count:
        decoding = places[:count]
        bounds = array(metadata, "query_start_loc")
        accepted = np.minimum(np.asarray(counts)[:count], bounds[1 : count + 1] - bounds[:count])
        np.maximum(accepted, 0, out=accepted)
        computed, moved = num_computed[decoding], cursors[decoding]
        _save_boundaries(rows, metadata, decoding, accepted)
        num_computed[decoding] = computed + accepted
        moved += accepted
        moved %= rows.ring
        cursors[decoding] = moved
        # Of a request that takes none it is some token, which is not looked at.
        width = new_tokens.shape[1]
        last = new_tokens.ravel()[np.arange(-1, count * width - 1, width) + accepted]
        if np.count_nonzero(accepted) < count:
            last = np.where(accepted > 0, last, last_tokens[decoding])
        last_tokens[decoding] = last
    if end > count:
        prefilling = places[count:]
        num_computed[prefilling] = array(metadata, "seq_lens")[count:end]
        cursors[prefilling] = 0
        last_tokens[prefilling] = new_tokens[count:end, 0]


def _save_boundaries(
    rows: DecodeRows,
    metadata: StepMetadata,
    decoding: np.ndarray[tuple[int], np.dtype[np.intp]],
    accepted: np.ndarray[tuple[int], np.dtype[np.integer[Any]]],
) -> None:
    """Say which live state of each request is at its boundary, if the step has reached that."""
    array = rows.array
    entries = array(metadata, "boundary_entries")[: len(decoding)]
    is_saving = entries >= 0
    if not np.count_nonzero(is_saving):
        return
    indices = is_saving.nonzero()[0]
    places, saved = decoding[indices], entries[indices]
    ahead = array(metadata, "boundary_positions")[indices] - array(rows, "num_computed")[places]
    reached = (ahead > 0) & (ahead <= accepted[indices])
    live = places * rows.ring + (array(rows, "cursors")[places] + ahead) % rows.ring
    array(metadata, "boundary_rows")[saved] = np.where(reached, live, -1)
    slots = array(metadata, "boundary_slots")
    slots[saved] = np.where(reached, slots[saved], -1)
