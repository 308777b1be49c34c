"""The kernels of ``decode`` in PyTorch: the default on the CPU, and what the kernels must equal."""

from __future__ import annotations

import torch

from mamba_cache.context.decode_rows import DecodeRows
from mamba_cache.metadata import StepMetadata

__all__ = ["advance_rows", "describe_decodes"]


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
    count, total = metadata.num_decodes, metadata.num_decode_tokens
    places = metadata.request_rows[:count].long()
    starts, ends = metadata.query_start_loc[: count + 1].long().unfold(0, 2, 1).unbind(1)
    computed, cursors = rows.num_computed[places], rows.cursors[places]
    metadata.num_computed_tokens[:count] = computed
    metadata.seq_lens[:count] = computed + (ends - starts)
    columns = torch.arange(rows.ring, device=places.device)
    live = places[:, None] * rows.ring + (cursors[:, None] + columns) % rows.ring
    metadata.state_rows[:count] = live[:, 0]
    metadata.decode_state_rows[:count] = live

    index = torch.arange(count, device=places.device)
    request = index.repeat_interleave(ends - starts, output_size=total)
    offsets = torch.arange(total, device=places.device) - starts[request]
    positions = computed[request] + offsets
    metadata.positions[:total] = positions
    blocks = metadata.block_tables[request, positions // block_size].long()
    metadata.kv_slot_mapping[:total] = blocks * block_size + positions % block_size
    tokens = metadata.token_ids[:total]
    if drafts is not None:
        tokens[:] = drafts[places[request], (offsets - 1).clamp(min=0)].clamp(min=0)
    tokens[starts] = rows.last_tokens[places]


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
    _save_boundaries(rows, metadata, counts)
    places = metadata.request_rows[:end].long()
    decoding, prefilling = places[:count], places[count:]
    accepted = _accepted(metadata, counts)
    rows.num_computed[decoding] += accepted
    rows.cursors[decoding] = (rows.cursors[decoding] + accepted) % rows.ring
    last = tokens[:count].gather(1, (accepted - 1).clamp(min=0).long()[:, None])[:, 0]
    rows.last_tokens[decoding] = torch.where(accepted > 0, last, rows.last_tokens[decoding])
    rows.num_computed[prefilling] = metadata.seq_lens[count:end]
    rows.cursors[prefilling] = 0
    rows.last_tokens[prefilling] = tokens[count:end, 0]


def _accepted(metadata: StepMetadata, counts: torch.Tensor) -> torch.Tensor:
    """Return the counts of decoding requests, cut to the tokens that they computed."""
    bounds = metadata.query_start_loc[: metadata.num_decodes + 1]
    return counts[: metadata.num_decodes].clamp(min=0).minimum(bounds.diff())


def _save_boundaries(rows: DecodeRows, metadata: StepMetadata, counts: torch.Tensor) -> None:
    count = metadata.num_decodes
    places = metadata.request_rows[:count].long()
    entries, positions = metadata.boundary_entries[:count], metadata.boundary_positions[:count]
    ahead = positions - rows.num_computed[places]
    reached = (entries >= 0) & (ahead > 0) & (ahead <= _accepted(metadata, counts))
    live = places * rows.ring + (rows.cursors[places] + ahead) % rows.ring
    saved = entries[entries >= 0].long()
    metadata.boundary_rows[saved] = torch.where(reached, live, -1)[entries >= 0].int()
    slots = metadata.boundary_slots[saved]
    metadata.boundary_slots[saved] = torch.where(reached[entries >= 0], slots, -1)
