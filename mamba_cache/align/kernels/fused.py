"""Copies between columns as Triton kernels, which decide what they copy.

Every program of a fused kernel makes the same decisions for the whole batch, then takes its share
of the tiles of all moves. So a step in which nothing moves costs a launch of few programs, and a
single move is spread over the whole chip.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from mamba_cache.align.kernels.moving import NUM_WARPS, WORDS, copy_moves
from mamba_cache.align.table import StateTable

__all__ = [
    "accept_tokens",
    "advance_columns",
    "gather_accepted",
    "postcopy_columns",
    "postcopy_resident",
    "precopy_columns",
]

# As many as are resident at once with up to 80 registers a thread: the share of a program that had
# to wait for another to end would be copied last, by few programs.
_PROGRAMS_PER_SM = 6
# Batches are of any size, and tables at any address: one compiled kernel must do for all of them.
_FEWEST_ROWS = 64
_ANY_VALUE = [
    "block_size",
    "idx_mapping",
    "num_accepted",
    "num_accepted_by_row",
    "num_accepted_out",
    "num_computed",
    "num_drafts",
    "num_padded",
    "num_reqs",
    "num_sampled",
    "num_scheduled",
    "num_tiles",
    "query_start_loc",
    "source_columns",
    "state_idx",
    "table_stride",
    "token_bias",
]
_PROGRAMS_OF_INTERPRETER = 2  # which runs them one after the other


@triton.jit
def _align(  # type: ignore[no-untyped-def]
    num_running, num_accepted, is_real, block_size
):
    """Decides as ``plan_alignment``: which rows move, to which column, by how many drafts."""
    aligned = (num_running + num_accepted - 1) // block_size * block_size
    moves = is_real & (aligned >= num_running) & (aligned > 0)
    return moves, aligned // block_size - 1, aligned - num_running


@triton.jit
def _load(values, entries, mask):  # type: ignore[no-untyped-def]
    return tl.load(values + entries, mask=mask, other=0).to(tl.int64)


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _precopy_kernel(  # type: ignore[no-untyped-def]
    state_idx,
    source_columns,
    token_bias,
    idx_mapping,
    num_reqs,
    block_size,
    states,
    tiles,
    num_tiles,
    block_tables,
    table_stride,
    IS_MAPPED: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    slots = tl.arange(0, ROWS).to(tl.int64)
    is_real = slots < num_reqs
    if IS_MAPPED:
        slots = tl.load(idx_mapping + slots, mask=is_real, other=-1).to(tl.int64)
        is_real = slots >= 0
    sources = tl.load(source_columns + slots, mask=is_real, other=-1).to(tl.int64)
    columns = _load(state_idx, slots, is_real)
    bias = tl.maximum(_load(token_bias, slots, is_real), 0)
    moves = (sources >= 0) & (sources != columns)
    copy_moves(
        moves, sources, columns, bias, states, tiles, num_tiles, block_tables, table_stride,
        WORD, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _postcopy_kernel(  # type: ignore[no-untyped-def]
    num_accepted,
    state_idx,
    num_scheduled,
    num_computed,
    num_drafts,
    num_accepted_out,
    num_reqs,
    block_size,
    states,
    tiles,
    num_tiles,
    block_tables,
    table_stride,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    is_real = rows < num_reqs
    accepted, columns = _load(num_accepted, rows, is_real), _load(state_idx, rows, is_real)
    num_running = _load(num_computed, rows, is_real) + _load(num_scheduled, rows, is_real)
    num_running -= _load(num_drafts, rows, is_real)
    moves, destinations, bias = _align(num_running, accepted, is_real, block_size)
    stays = moves & (destinations == columns)
    if tl.program_id(0) == 0:
        tl.store(num_accepted_out + rows, tl.where(stays, 1, accepted), mask=is_real)
    moves = moves & ((destinations != columns) | (bias > 0))
    copy_moves(
        moves, columns, destinations, bias, states, tiles, num_tiles, block_tables, table_stride,
        WORD, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _resident_kernel(  # type: ignore[no-untyped-def]
    idx_mapping,
    num_sampled,
    num_accepted,
    state_idx,
    num_computed,
    num_reqs,
    block_size,
    states,
    tiles,
    num_tiles,
    block_tables,
    table_stride,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    slots = tl.load(idx_mapping + rows, mask=rows < num_reqs, other=-1).to(tl.int64)
    is_real = slots >= 0
    # Decisions rest on the samples, which nobody writes: programs that run late decide alike.
    accepted = tl.maximum(_load(num_sampled, rows, is_real), 1)
    columns = _load(state_idx, slots, is_real)
    num_running = _load(num_computed, slots, is_real) - accepted + 1
    moves, destinations, bias = _align(num_running, accepted, is_real, block_size)
    stays = moves & (destinations == columns)
    if tl.program_id(0) == 0:
        tl.store(num_accepted + slots, tl.where(stays, 1, accepted), mask=is_real)
    moves = moves & ((destinations != columns) | (bias > 0))
    copy_moves(
        moves, columns, destinations, bias, states, tiles, num_tiles, block_tables, table_stride,
        WORD, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _accept_kernel(  # type: ignore[no-untyped-def]
    idx_mapping, num_sampled, num_accepted, num_reqs, ROWS: tl.constexpr
) -> None:
    rows = tl.arange(0, ROWS)
    slots = tl.load(idx_mapping + rows, mask=rows < num_reqs, other=-1).to(tl.int64)
    is_real = slots >= 0
    accepted = tl.maximum(_load(num_sampled, rows, is_real), 1)
    tl.store(num_accepted + slots, accepted, mask=is_real)


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    idx_mapping, num_accepted, num_accepted_by_row, num_reqs, num_padded, ROWS: tl.constexpr
) -> None:
    rows = tl.arange(0, ROWS)
    slots = tl.load(idx_mapping + rows, mask=rows < num_reqs, other=-1).to(tl.int64)
    accepted = tl.load(num_accepted + slots, mask=slots >= 0, other=1)
    tl.store(num_accepted_by_row + rows, accepted, mask=rows < num_padded)


@triton.jit(do_not_specialize=_ANY_VALUE)  # type: ignore[untyped-decorator]
def _advance_kernel(  # type: ignore[no-untyped-def]
    idx_mapping,
    query_start_loc,
    num_computed,
    num_accepted,
    state_idx,
    source_columns,
    token_bias,
    num_reqs,
    block_size,
    ROWS: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    slots = tl.load(idx_mapping + rows, mask=rows < num_reqs, other=-1).to(tl.int64)
    is_real = slots >= 0
    num_tokens = _load(num_computed, slots, is_real)
    num_tokens += _load(query_start_loc, rows + 1, is_real) - _load(query_start_loc, rows, is_real)
    previous = _load(state_idx, slots, is_real)
    current = (num_tokens + block_size - 1) // block_size - 1
    accepted = _load(num_accepted, slots, is_real)
    tl.store(source_columns + slots, previous, mask=is_real)
    tl.store(token_bias + slots, tl.maximum(accepted - 1, 0), mask=is_real)
    tl.store(state_idx + slots, current, mask=is_real)
    has_moved = is_real & (previous >= 0) & (previous != current)
    tl.store(num_accepted + slots, 1, mask=has_moved)


def precopy_columns(
    table: StateTable,
    num_reqs: int,
    state_idx: torch.Tensor,
    source_columns: torch.Tensor,
    token_bias: torch.Tensor,
    idx_mapping: torch.Tensor | None,
) -> None:
    """Copies as ``MambaSpecDecodeGPUContext.run_fused_precopy`` describes."""
    inputs = (state_idx, source_columns, token_bias)
    mapping = state_idx if idx_mapping is None else idx_mapping
    is_mapped = idx_mapping is not None
    _launch(_precopy_kernel, table, num_reqs, (*inputs, mapping), IS_MAPPED=is_mapped)


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
    """Copies as ``MambaSpecDecodeGPUContext.run_fused_postprocess`` describes."""
    if num_accepted.data_ptr() == num_accepted_out.data_ptr():
        # Programs that run late must not read what the first one has written.
        num_accepted = num_accepted.clone()
    inputs = (num_accepted, state_idx, num_scheduled, num_computed, num_drafts, num_accepted_out)
    _launch(_postcopy_kernel, table, num_reqs, inputs)


def postcopy_resident(
    table: StateTable,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    num_computed: torch.Tensor,
) -> None:
    """Copies as ``MambaSpecDecodeGPUContext.run_resident_postprocess`` describes."""
    if num_sampled.data_ptr() == num_accepted.data_ptr():
        num_sampled = num_sampled.clone()
    inputs = (idx_mapping, num_sampled, num_accepted, state_idx, num_computed)
    _launch(_resident_kernel, table, len(idx_mapping), inputs)


def accept_tokens(
    idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    """Writes ``max(num_sampled, 1)`` of each row to its slot of ``num_accepted``."""
    rows = _num_rows(len(idx_mapping))
    with torch.cuda.device(idx_mapping.get_device()):
        _accept_kernel[(1,)](idx_mapping, num_sampled, num_accepted, len(idx_mapping), ROWS=rows)


def gather_accepted(
    idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_accepted_by_row: torch.Tensor
) -> None:
    """Fills the rows with the counts of their slots, and with 1 where there is no request."""
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


def advance_columns(
    num_reqs: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    source_columns: torch.Tensor,
    token_bias: torch.Tensor,
    block_size: int,
) -> None:
    """Moves the running columns to this step, as ``MambaHybridModelState`` describes."""
    with torch.cuda.device(idx_mapping.get_device()):
        _advance_kernel[(1,)](
            idx_mapping,
            query_start_loc,
            num_computed,
            num_accepted,
            state_idx,
            source_columns,
            token_bias,
            num_reqs,
            block_size,
            ROWS=_num_rows(num_reqs),
        )


def _launch(
    kernel: Any,
    table: StateTable,
    num_reqs: int,
    inputs: tuple[torch.Tensor, ...],
    **constants: int,
) -> None:
    num_tiles = len(table.tiles)
    programs = max(1, min(num_reqs * num_tiles, _most_programs(table.device)))
    with torch.cuda.device(table.states.get_device()):
        kernel[(programs,)](
            *inputs,
            num_reqs,
            table.block_size,
            table.states,
            table.tiles,
            num_tiles,
            table.block_table_ptrs,
            table.block_table_stride,
            WORD=WORDS[table.word_bytes],
            ROWS=_num_rows(num_reqs),
            num_warps=NUM_WARPS,
            **constants,
        )


def _num_rows(num_reqs: int) -> int:
    rows: int = max(_FEWEST_ROWS, triton.next_power_of_2(num_reqs))
    return rows


@functools.cache
def _most_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_OF_INTERPRETER
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
