"""The Triton kernels of align mode: they copy what the host lists, or decide and copy themselves.

Every program of a fused kernel makes the same decisions for the whole batch, then takes its share
of the tiles of all moves. So a step in which nothing moves costs a launch of few programs, and a
single move is spread over the whole chip.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from mamba_cache.integrations.vllm.copy_buffers import MambaCopyBuffers
from mamba_cache.integrations.vllm.kernels.copy_states import (
    NUM_TURNS,
    copy_bytes,
    copy_moves,
    shift_rows,
)
from mamba_cache.integrations.vllm.state_table import TILE_BYTES, BlockTables, StateTable
from mamba_cache.states.kernels.copy import WORDS

__all__ = [
    "accept_tokens",
    "aligned_blocks",
    "copy_regions",
    "gather_accepted",
    "postcopy_columns",
    "postcopy_resident",
    "precopy_columns",
    "precopy_resident",
]

_PROGRAMS_PER_SM = 12
_NUM_WARPS = 1
_PROGRAMS_PER_REGION = 64
_ROWS_OF_LOOKUP = 32
_REGION_WARPS = 4
_TILE_BYTES = tl.constexpr(TILE_BYTES)
# Batches are of any size, and tables at any address: one compiled kernel must do for all of them.
_FEWEST_ROWS = 64
_ANY_VALUE = [
    "accepted_by_row",
    "block_tables",
    "blocks",
    "group_stride",
    "idx_mapping",
    "num_accepted",
    "num_accepted_by_row",
    "num_accepted_out",
    "num_chunks",
    "num_computed",
    "num_drafts",
    "num_groups",
    "num_padded",
    "num_reqs",
    "num_sampled",
    "num_scheduled",
    "num_tokens",
    "query_start_loc",
    "row_stride",
    "source_columns",
    "state_idx",
    "table_stride",
    "token_bias",
]
_PROGRAMS_OF_INTERPRETER = 2  # which runs them one after the other
_TURNS_OF_INTERPRETER = 2


@triton.jit  # type: ignore[untyped-decorator]
def _regions_kernel(  # type: ignore[no-untyped-def]
    sources, destinations, sizes, num_rows, row_strides, piece_bytes, WORD: tl.constexpr
) -> None:
    entry, part, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    source, destination = tl.load(sources + entry), tl.load(destinations + entry)
    size, piece = tl.load(sizes + entry), tl.load(piece_bytes + entry)
    if piece > 0:
        rows, row_stride = tl.load(num_rows + entry), tl.load(row_strides + entry)
        shift_rows(source, destination, size, rows, row_stride, piece, part, num_parts, WORD)
    else:
        for tile in range(part, tl.cdiv(size, _TILE_BYTES), num_parts):
            copy_bytes(source, destination, size, tile, WORD)


@triton.jit  # type: ignore[untyped-decorator]
def _align(  # type: ignore[no-untyped-def]
    num_running, num_accepted, is_real, BLOCK_SIZE: tl.constexpr
):
    """Decide as ``plan_alignment``: which rows move, to which column, by how many drafts."""
    aligned = (num_running + num_accepted - 1) // BLOCK_SIZE * BLOCK_SIZE
    moves = is_real & (aligned >= num_running) & (aligned > 0)
    return moves, aligned // BLOCK_SIZE - 1, aligned - num_running


@triton.jit
def _load(values, entries, mask):  # type: ignore[no-untyped-def]
    return tl.load(values + entries, mask=mask, other=0).to(tl.int32)


@triton.jit
def _load_slots(idx_mapping, rows, num_reqs):  # type: ignore[no-untyped-def]
    """Return the slots of rows, -1 for rows to skip."""
    return tl.load(idx_mapping + rows, mask=rows < num_reqs, other=-1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _table_rows(rows, slots, BY_SLOT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where each row of the batch has its blocks in the block tables."""
    return slots.to(tl.int32) if BY_SLOT else rows


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _precopy_kernel(  # type: ignore[no-untyped-def]
    state_idx,
    source_columns,
    token_bias,
    idx_mapping,
    num_reqs,
    chunks,
    num_chunks,
    counters,
    block_tables,
    table_stride,
    BY_SLOT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_PER_CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
    IS_MAPPED: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    slots = rows.to(tl.int64)
    is_real = rows < num_reqs
    if IS_MAPPED:
        slots = _load_slots(idx_mapping, rows, num_reqs)
        is_real = slots >= 0
    sources = tl.load(source_columns + slots, mask=is_real, other=-1).to(tl.int32)
    columns = _load(state_idx, slots, is_real)
    bias = tl.maximum(_load(token_bias, slots, is_real), 0)
    moves = (sources >= 0) & (sources != columns)
    copy_moves(
        moves, sources, columns, bias, _table_rows(rows, slots, BY_SLOT), chunks,
        num_chunks, counters, block_tables, table_stride, WORD, ROWS, TILES_PER_CHUNK, TURNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _precopy_resident_kernel(  # type: ignore[no-untyped-def]
    idx_mapping,
    query_start_loc,
    num_computed,
    num_accepted,
    state_idx,
    source_columns,
    token_bias,
    accepted_by_row,
    num_padded,
    num_reqs,
    chunks,
    num_chunks,
    counters,
    block_tables,
    table_stride,
    BY_SLOT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_PER_CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    slots = _load_slots(idx_mapping, rows, num_reqs)
    is_real = slots >= 0
    num_tokens = _load(num_computed, slots, is_real)
    num_tokens += _load(query_start_loc, rows + 1, is_real) - _load(query_start_loc, rows, is_real)
    previous = _load(state_idx, slots, is_real)
    accepted = tl.load(num_accepted + slots, mask=is_real, other=1).to(tl.int32)
    current = (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
    moves = is_real & (previous >= 0) & (previous != current)
    bias = tl.maximum(accepted - 1, 0)
    is_writer = copy_moves(
        moves, previous, current, bias, _table_rows(rows, slots, BY_SLOT), chunks,
        num_chunks, counters, block_tables, table_stride, WORD, ROWS, TILES_PER_CHUNK, TURNS,
    )  # fmt: skip
    if is_writer:
        accepted = tl.where(moves, 1, accepted)
        tl.store(source_columns + slots, previous, mask=is_real)
        tl.store(token_bias + slots, bias, mask=is_real)
        tl.store(state_idx + slots, current, mask=is_real)
        tl.store(num_accepted + slots, accepted, mask=is_real)
        tl.store(accepted_by_row + rows, accepted, mask=rows < num_padded)


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _postcopy_kernel(  # type: ignore[no-untyped-def]
    num_accepted,
    state_idx,
    num_scheduled,
    num_computed,
    num_drafts,
    num_accepted_out,
    num_reqs,
    chunks,
    num_chunks,
    counters,
    block_tables,
    table_stride,
    BY_SLOT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_PER_CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    is_real = rows < num_reqs
    accepted, columns = _load(num_accepted, rows, is_real), _load(state_idx, rows, is_real)
    num_running = _load(num_computed, rows, is_real) + _load(num_scheduled, rows, is_real)
    num_running -= _load(num_drafts, rows, is_real)
    crosses, destinations, bias = _align(num_running, accepted, is_real, BLOCK_SIZE)
    stays = crosses & (destinations == columns)
    moves = crosses & ((destinations != columns) | (bias > 0))
    is_writer = copy_moves(
        moves, columns, destinations, bias, rows, chunks, num_chunks, counters, block_tables,
        table_stride, WORD, ROWS, TILES_PER_CHUNK, TURNS,
    )  # fmt: skip
    if is_writer:
        tl.store(num_accepted_out + rows, tl.where(stays, 1, accepted), mask=is_real)


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _postcopy_resident_kernel(  # type: ignore[no-untyped-def]
    idx_mapping,
    num_sampled,
    num_accepted,
    state_idx,
    num_computed,
    num_reqs,
    chunks,
    num_chunks,
    counters,
    block_tables,
    table_stride,
    BY_SLOT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_PER_CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    slots = _load_slots(idx_mapping, rows, num_reqs)
    is_real = slots >= 0
    if IS_SAMPLED:
        accepted = tl.maximum(_load(num_sampled, rows, is_real), 1)
    else:
        accepted = _load(num_accepted, slots, is_real)
    columns = _load(state_idx, slots, is_real)
    num_running = _load(num_computed, slots, is_real) - accepted + 1
    crosses, destinations, bias = _align(num_running, accepted, is_real, BLOCK_SIZE)
    stays = crosses & (destinations == columns)
    moves = crosses & ((destinations != columns) | (bias > 0))
    is_writer = copy_moves(
        moves, columns, destinations, bias, _table_rows(rows, slots, BY_SLOT), chunks,
        num_chunks, counters, block_tables, table_stride, WORD, ROWS, TILES_PER_CHUNK, TURNS,
    )  # fmt: skip
    if is_writer:
        tl.store(num_accepted + slots, tl.where(stays, 1, accepted), mask=is_real)


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _accept_kernel(  # type: ignore[no-untyped-def]
    idx_mapping, num_sampled, num_accepted, num_reqs, ROWS: tl.constexpr
) -> None:
    rows = tl.arange(0, ROWS)
    slots = _load_slots(idx_mapping, rows, num_reqs)
    is_real = slots >= 0
    accepted = tl.maximum(_load(num_sampled, rows, is_real), 1)
    tl.store(num_accepted + slots, accepted, mask=is_real)


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    idx_mapping, num_accepted, num_accepted_by_row, num_reqs, num_padded, ROWS: tl.constexpr
) -> None:
    rows = tl.arange(0, ROWS)
    slots = _load_slots(idx_mapping, rows, num_reqs)
    accepted = tl.load(num_accepted + slots, mask=slots >= 0, other=1)
    tl.store(num_accepted_by_row + rows, accepted, mask=rows < num_padded)


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _aligned_blocks_kernel(  # type: ignore[no-untyped-def]
    block_tables,
    table_stride,
    num_tokens,
    blocks,
    row_stride,
    group_stride,
    num_reqs,
    num_groups,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_real = rows < num_reqs
    first = tl.maximum((_load(num_tokens, rows, is_real) - 1) // BLOCK_SIZE, 0)
    columns = tl.arange(0, PADDED_COLUMNS)
    mask = is_real[:, None] & (columns < COLUMNS)[None, :]
    for group in range(num_groups):
        table = tl.load(block_tables + group).to(tl.pointer_type(tl.int32))
        entries = rows[:, None] * table_stride + first[:, None] + columns[None, :]
        found = tl.load(table + entries, mask=mask)
        written = group_stride.to(tl.int64) * group + rows[:, None] * row_stride + columns[None, :]
        tl.store(blocks + written, found, mask=mask)


def copy_regions(buffers: MambaCopyBuffers) -> None:
    """Copy the first ``offset`` regions of ``buffers`` in one launch."""
    count = buffers.offset
    values = np.concatenate([buffer.np[:count] for buffer in buffers.columns])
    word_bytes = math.gcd(8, int(np.gcd.reduce(values)))
    columns = [buffer.copy_to_gpu(count) for buffer in buffers.columns]
    programs = _PROGRAMS_PER_REGION if columns[0].is_cuda else _PROGRAMS_OF_INTERPRETER
    with torch.cuda.device(columns[0].get_device()):
        _regions_kernel[count, programs](*columns, WORD=WORDS[word_bytes], num_warps=_REGION_WARPS)


def precopy_columns(
    table: StateTable,
    num_reqs: int,
    state_idx: torch.Tensor,
    source_columns: torch.Tensor,
    token_bias: torch.Tensor,
    idx_mapping: torch.Tensor | None,
) -> None:
    """Copy as ``MambaSpecDecodeGPUContext.run_fused_precopy`` describes."""
    inputs = (state_idx, source_columns, token_bias)
    mapping = state_idx if idx_mapping is None else idx_mapping
    is_mapped = idx_mapping is not None
    _launch(_precopy_kernel, table, num_reqs, (*inputs, mapping), IS_MAPPED=is_mapped)


def precopy_resident(
    table: StateTable,
    num_reqs: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    source_columns: torch.Tensor,
    token_bias: torch.Tensor,
    accepted_by_row: torch.Tensor | None,
) -> None:
    """Copy as ``MambaSpecDecodeGPUContext.run_resident_precopy`` describes."""
    by_slot = (num_computed, num_accepted, state_idx, source_columns, token_bias)
    num_padded = 0 if accepted_by_row is None else len(accepted_by_row)
    by_row = num_accepted if accepted_by_row is None else accepted_by_row
    inputs = (idx_mapping, query_start_loc, *by_slot, by_row, num_padded)
    _launch(_precopy_resident_kernel, table, num_reqs, inputs, num_padded)


def postcopy_columns(
    table: StateTable,
    num_reqs: int,
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    num_scheduled: torch.Tensor,
    num_computed: torch.Tensor,
    num_drafts: torch.Tensor,
    num_accepted_out: torch.Tensor,
) -> None:
    """Copy as ``MambaSpecDecodeGPUContext.run_fused_postprocess`` describes."""
    inputs = (num_accepted, state_idx, num_scheduled, num_computed, num_drafts, num_accepted_out)
    _launch(_postcopy_kernel, table, num_reqs, inputs)


def postcopy_resident(
    table: StateTable,
    num_reqs: int,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor | None,
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    num_computed: torch.Tensor,
) -> None:
    """Copy as ``MambaSpecDecodeGPUContext.run_resident_postprocess`` describes."""
    is_sampled = num_sampled is not None
    if num_sampled is None:
        num_sampled = num_accepted
    elif num_sampled.data_ptr() == num_accepted.data_ptr():
        # Rows are not slots: what is written for one row would be read for another.
        num_sampled = num_sampled.clone()
    inputs = (idx_mapping, num_sampled, num_accepted, state_idx, num_computed)
    _launch(_postcopy_resident_kernel, table, num_reqs, inputs, IS_SAMPLED=is_sampled)


def accept_tokens(
    idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    """Write ``max(num_sampled, 1)`` of each row to its slot of ``num_accepted``."""
    rows = _num_rows(len(idx_mapping))
    with torch.cuda.device(idx_mapping.get_device()):
        _accept_kernel[(1,)](idx_mapping, num_sampled, num_accepted, len(idx_mapping), ROWS=rows)


def gather_accepted(
    idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_accepted_by_row: torch.Tensor
) -> None:
    """Fill the rows with the counts of their slots, and with 1 where there is no request."""
    num_padded = len(num_accepted_by_row)
    with torch.cuda.device(num_accepted.get_device()):
        _gather_kernel[(1,)](
            idx_mapping,
            num_accepted,
            num_accepted_by_row,
            len(idx_mapping),
            num_padded,
            ROWS=_num_rows(num_padded),
        )


def aligned_blocks(
    tables: BlockTables, num_reqs: int, num_tokens: torch.Tensor, block_size: int, out: torch.Tensor
) -> None:
    """Look up as ``MambaSpecDecodeGPUContext.compute_aligned_state_indices`` describes."""
    with torch.cuda.device(out.get_device()):
        _aligned_blocks_kernel[(triton.cdiv(num_reqs, _ROWS_OF_LOOKUP),)](
            tables.pointers,
            tables.stride,
            num_tokens,
            out,
            out.stride(1),
            out.stride(0),
            num_reqs,
            len(out),
            BLOCK_SIZE=block_size,
            COLUMNS=out.shape[2],
            ROWS=_ROWS_OF_LOOKUP,
            PADDED_COLUMNS=triton.next_power_of_2(out.shape[2]),
            num_warps=_NUM_WARPS,
        )


def _launch(
    kernel: Any,
    table: StateTable,
    num_reqs: int,
    inputs: tuple[torch.Tensor | int, ...],
    num_rows: int = 0,
    **constants: int,
) -> None:
    most_programs, turns = _shares(table.device)
    programs = min(-(-num_reqs * table.num_tiles // turns) * turns, most_programs)
    with torch.cuda.device(table.chunks.get_device()):
        kernel[(programs,)](
            *inputs,
            num_reqs,
            table.chunks,
            len(table.chunks),
            table.counters,
            table.block_tables.pointers,
            table.block_tables.stride,
            BY_SLOT=table.is_by_slot,
            BLOCK_SIZE=table.block_size,
            WORD=WORDS[table.word_bytes],
            ROWS=_num_rows(max(num_reqs, num_rows)),
            TILES_PER_CHUNK=table.tiles_per_chunk,
            TURNS=turns,
            num_warps=_NUM_WARPS,
            **constants,
        )


def _num_rows(num_reqs: int) -> int:
    rows: int = max(_FEWEST_ROWS, triton.next_power_of_2(num_reqs))
    return rows


@functools.cache
def _shares(device: torch.device) -> tuple[int, int]:
    """Return the most programs of a launch, and the counters that they take turns at."""
    if device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER, _TURNS_OF_INTERPRETER
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_SM * num_sms // NUM_TURNS * NUM_TURNS, NUM_TURNS
