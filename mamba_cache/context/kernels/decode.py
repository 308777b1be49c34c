"""Kernels between two steps with drafts: one launch when a step begins, one when it is committed.

``decode_numpy`` describes the functions and their arguments.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mamba_cache.context.kernels.decode_numpy import DecodeRows
from mamba_cache.metadata import StepMetadata

__all__ = ["advance_rows", "describe_decodes"]


def describe_decodes(
    rows: DecodeRows, metadata: StepMetadata, drafts: torch.Tensor | None, block_size: int
) -> None:
    """Write positions, lengths, tokens and rows of decoding requests into a step's metadata."""
    _describe[(metadata.num_decodes,)](
        rows.num_computed,
        rows.cursors,
        rows.last_tokens,
        metadata.request_rows,
        metadata.query_start_loc,
        metadata.block_tables,
        # Without drafts any tensor: the kernel does not read it.
        metadata.token_ids if drafts is None else drafts,
        metadata.num_computed_tokens,
        metadata.seq_lens,
        metadata.state_rows,
        metadata.decode_state_rows,
        metadata.token_ids,
        metadata.positions,
        metadata.kv_slot_mapping,
        metadata.block_tables.shape[1],
        block_size,
        HAS_DRAFTS=drafts is not None,
        RING=rows.ring,
        BLOCK=triton.next_power_of_2(rows.ring),
        num_warps=1,
    )


def advance_rows(
    rows: DecodeRows, metadata: StepMetadata, tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """Advance each request of a step by its new tokens."""
    _advance[(metadata.num_requests,)](
        rows.num_computed,
        rows.cursors,
        rows.last_tokens,
        metadata.request_rows,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.boundary_entries,
        metadata.boundary_positions,
        metadata.boundary_rows,
        metadata.boundary_slots,
        tokens,
        counts,
        metadata.num_decodes,
        RING=rows.ring,
        num_warps=1,
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["table_width"]
)
def _describe(  # type: ignore[no-untyped-def]
    num_computed,
    cursors,
    last_tokens,
    request_rows,
    query_start_loc,
    block_tables,
    drafts,
    num_computed_tokens,
    seq_lens,
    state_rows,
    decode_state_rows,
    token_ids,
    positions,
    kv_slot_mapping,
    table_width,
    block_size,
    HAS_DRAFTS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.load(request_rows + request).to(tl.int64)
    start = tl.load(query_start_loc + request)
    length = tl.load(query_start_loc + request + 1) - start
    computed = tl.load(num_computed + row)
    cursor = tl.load(cursors + row)
    tl.store(num_computed_tokens + request, computed)
    tl.store(seq_lens + request, computed + length)
    tl.store(state_rows + request, (row * RING + cursor).to(tl.int32))

    columns = tl.arange(0, BLOCK)
    live = row * RING + (cursor + columns) % RING
    places = decode_state_rows + request * RING + columns
    tl.store(places, live.to(tl.int32), mask=columns < RING)

    real = columns < length
    at = computed + columns
    table = block_tables + request.to(tl.int64) * table_width
    block = tl.load(table + at // block_size, mask=real, other=0).to(tl.int64)
    tl.store(positions + start + columns, at.to(tl.int64), mask=real)
    tl.store(kv_slot_mapping + start + columns, block * block_size + at % block_size, mask=real)
    tl.store(token_ids + start, tl.load(last_tokens + row))
    if HAS_DRAFTS:
        is_draft = real & (columns > 0)
        # One column fewer than the tokens of a decode, which are one fewer than the ring's rows.
        given = tl.load(drafts + row * (RING - 2) + columns - 1, mask=is_draft, other=0)
        tl.store(token_ids + start + columns, tl.maximum(given, 0).to(tl.int64), mask=is_draft)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_decodes"]
)
def _advance(  # type: ignore[no-untyped-def]
    num_computed,
    cursors,
    last_tokens,
    request_rows,
    query_start_loc,
    seq_lens,
    boundary_entries,
    boundary_positions,
    boundary_rows,
    boundary_slots,
    tokens,
    counts,
    num_decodes,
    RING: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.load(request_rows + request).to(tl.int64)
    new_tokens = tokens + request.to(tl.int64) * (RING - 1)
    if request >= num_decodes:
        tl.store(num_computed + row, tl.load(seq_lens + request))
        tl.store(cursors + row, 0)
        tl.store(last_tokens + row, tl.load(new_tokens))
    else:
        length = tl.load(query_start_loc + request + 1) - tl.load(query_start_loc + request)
        accepted = tl.minimum(tl.maximum(tl.load(counts + request), 0), length)
        computed = tl.load(num_computed + row)
        cursor = tl.load(cursors + row)
        entry = tl.load(boundary_entries + request)
        ahead = tl.load(boundary_positions + request) - computed
        reached = (ahead > 0) & (ahead <= accepted)
        if entry >= 0:
            live = row * RING + (cursor + ahead) % RING
            tl.store(boundary_rows + entry, tl.where(reached, live, -1).to(tl.int32))
            tl.store(boundary_slots + entry, -1, mask=not reached)
        tl.store(num_computed + row, computed + accepted)
        tl.store(cursors + row, (cursor + accepted) % RING)
        if accepted > 0:
            tl.store(last_tokens + row, tl.load(new_tokens + accepted - 1))
