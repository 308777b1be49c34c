"""The kernels of ``decode`` in numpy: the default on the CPU, and what the kernels must equal.

They write the tensors' own memory. Of batches as small as those of decoding requests numpy is some
times faster than PyTorch, whose every operation costs as much as a step's bookkeeping may.
"""

from __future__ import annotations

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
    count, total = metadata.num_decodes, metadata.num_decode_tokens
    places = metadata.request_rows.numpy()[:count]
    bounds = metadata.query_start_loc.numpy()[: count + 1]
    starts = bounds[:-1]
    lengths = bounds[1:] - starts
    computed = rows.num_computed.numpy()[places]
    metadata.num_computed_tokens.numpy()[:count] = computed
    metadata.seq_lens.numpy()[:count] = computed + lengths

    request = np.repeat(np.arange(count), lengths)
    positions = np.arange(total) + (computed - starts)[request]
    metadata.positions.numpy()[:total] = positions
    blocks = positions // block_size
    slots = metadata.block_tables.numpy()[request, blocks] - blocks
    slots *= block_size
    slots += positions
    metadata.kv_slot_mapping.numpy()[:total] = slots
    tokens = metadata.token_ids.numpy()[:total]
    if drafts is not None:
        offsets = np.arange(total) - starts[request]
        guessed = drafts.numpy()[places[request], np.maximum(offsets - 1, 0)]
        tokens[:] = np.maximum(guessed, 0)
    tokens[starts] = rows.last_tokens.numpy()[places]


def describe_live_rows(rows: DecodeRows, metadata: StepMetadata) -> None:
    """Write which live state of each decoding request is current, and which ones follow.

    Args:
        rows: How far each request is.
        metadata: The step's; ``state_rows`` and ``decode_state_rows`` are written where requests
            decode.
    """
    count, ring = metadata.num_decodes, rows.ring
    places = metadata.request_rows.numpy()[:count]
    live = rows.cursors.numpy()[places][:, None] + np.arange(ring, dtype=np.int32)
    live %= ring
    live += (places * ring)[:, None]
    metadata.state_rows.numpy()[:count] = live[:, 0]
    metadata.decode_state_rows.numpy()[:count] = live


def advance_rows(
    rows: DecodeRows, metadata: StepMetadata, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """Move each request of a step past the tokens that became part of it.

    Args:
        rows: How far each request is; written.
        metadata: The step's. ``boundary_rows`` and ``boundary_slots`` of decoding requests are
            written: the row with the state at the boundary, or padding if it was not reached.
        tokens: [num_requests, k + 1] int64 new tokens, in batch order.
        counts: [num_requests] int32. How many of them each decoding request takes.
    """
    count, end = metadata.num_decodes, metadata.num_requests
    places, new_tokens = metadata.request_rows.numpy()[:end], tokens.numpy()
    num_computed, cursors = rows.num_computed.numpy(), rows.cursors.numpy()
    last_tokens = rows.last_tokens.numpy()
    if count:
        decoding = places[:count]
        bounds = metadata.query_start_loc.numpy()[: count + 1]
        accepted = np.maximum(counts.numpy()[:count], 0)
        np.minimum(accepted, bounds[1:] - bounds[:-1], out=accepted)
        _save_boundaries(rows, metadata, decoding, accepted)
        num_computed[decoding] += accepted
        cursors[decoding] = (cursors[decoding] + accepted) % rows.ring
        # Of a request that takes none the last column, which is not looked at.
        last = new_tokens[np.arange(count), accepted - 1]
        last_tokens[decoding] = np.where(accepted > 0, last, last_tokens[decoding])
    if end > count:
        prefilling = places[count:]
        num_computed[prefilling] = metadata.seq_lens.numpy()[count:end]
        cursors[prefilling] = 0
        last_tokens[prefilling] = new_tokens[count:end, 0]


def _save_boundaries(
    rows: DecodeRows,
    metadata: StepMetadata,
    decoding: np.ndarray[tuple[int], np.dtype[np.int32]],
    accepted: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> None:
    """Say which live state of each request is at its boundary, if the step has reached that."""
    indices = (metadata.boundary_entries.numpy()[: len(decoding)] >= 0).nonzero()[0]
    if not len(indices):
        return
    places, saved = decoding[indices], metadata.boundary_entries.numpy()[indices]
    ahead = metadata.boundary_positions.numpy()[indices] - rows.num_computed.numpy()[places]
    reached = (ahead > 0) & (ahead <= accepted[indices])
    live = places * rows.ring + (rows.cursors.numpy()[places] + ahead) % rows.ring
    metadata.boundary_rows.numpy()[saved] = np.where(reached, live, -1)
    slots = metadata.boundary_slots.numpy()
    slots[saved] = np.where(reached, slots[saved], -1)
