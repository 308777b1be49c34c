"""The Triton kernels of align mode: two plan copies on the device, and one executes a list.

A plan is a single program for the whole batch, which writes the list of copies described in
``StateTable``. A single program can update counts and columns in place.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from mamba_cache.integrations.vllm.copies import BLOCKS_PER_GROUP, FACTS, StateTable
from mamba_cache.states.kernels.copy import WORDS

__all__ = ["copy_listed", "plan_postcopy", "plan_precopy"]

_NUM_WARPS = 4
_PROGRAMS_PER_SM = 12
_PARTS_OF_INTERPRETER = 2  # the interpreter runs programs one after another
_MIN_ROWS = 64
_TILE_BYTES = tl.constexpr(4096)
_WIDE_BYTES = tl.constexpr(16)
_NARROW_STEP_WORDS = tl.constexpr(256)
_LANES = tl.constexpr(64)
_PIECES = tl.constexpr(4)

_NUM_FACTS = tl.constexpr(len(FACTS))
_BLOCKS_PER_GROUP = tl.constexpr(BLOCKS_PER_GROUP)


@triton.jit
def _load(values, entries, mask):  # type: ignore[no-untyped-def]
    return tl.load(values + entries, mask=mask, other=0).to(tl.int32)


@triton.jit
def _load_slots(idx_mapping, rows, num_reqs):  # type: ignore[no-untyped-def]
    """Return the slots of rows, -1 for rows to skip."""
    slots = rows.to(tl.int64)
    if idx_mapping is not None:
        slots = tl.load(idx_mapping + rows, mask=rows < num_reqs, other=-1).to(tl.int64)
    return tl.where(rows < num_reqs, slots, -1)


@triton.jit  # type: ignore[untyped-decorator]
def _list_copies(  # type: ignore[no-untyped-def]
    copies, pointers, row_stride, num_groups, moves, table_rows, sources, destinations, biases
) -> None:
    """Write the list of copies: one for each row that moves."""
    counted = moves.to(tl.int32)
    tl.store(copies, tl.sum(counted, 0))
    entries = copies + tl.cumsum(counted, 0) * (1 + _BLOCKS_PER_GROUP * num_groups)
    tl.store(entries, biases, mask=moves)
    for group in range(num_groups):
        table = tl.load(pointers + group).to(tl.pointer_type(tl.int32)) + table_rows * row_stride
        blocks = entries + 1 + _BLOCKS_PER_GROUP * group
        tl.store(blocks, tl.load(table + sources, mask=moves), mask=moves)
        tl.store(blocks + 1, tl.load(table + sources + biases, mask=moves), mask=moves)
        tl.store(blocks + 2, tl.load(table + destinations, mask=moves), mask=moves)


# Without specialisation one compiled kernel serves all batch sizes and addresses.
@triton.jit(do_not_specialize=range(12))  # type: ignore[untyped-decorator]
def _precopy_kernel(  # type: ignore[no-untyped-def]
    copies,
    pointers,
    row_stride,
    num_groups,
    num_reqs,
    idx_mapping,
    state_idx,
    source_columns,
    token_bias,
    query_start_loc,
    num_computed,
    num_accepted,
    BLOCK_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    slots = _load_slots(idx_mapping, rows, num_reqs)
    is_real = slots >= 0
    columns = _load(state_idx, slots, is_real)
    if query_start_loc is None:
        sources = tl.load(source_columns + slots, mask=is_real, other=-1).to(tl.int32)
        biases = tl.maximum(_load(token_bias, slots, is_real), 0)
        moves = is_real & (sources >= 0) & (sources != columns)
    else:
        num_tokens = _load(num_computed, slots, is_real)
        num_tokens += _load(query_start_loc, rows + 1, is_real)
        num_tokens -= _load(query_start_loc, rows, is_real)
        accepted = _load(num_accepted, slots, is_real)
        sources = columns
        columns = (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
        biases = tl.maximum(accepted - 1, 0)
        moves = is_real & (sources >= 0) & (sources != columns)
        tl.debug_barrier()  # Other threads load the entries that this one stores.
        tl.store(source_columns + slots, sources, mask=is_real)
        tl.store(token_bias + slots, biases, mask=is_real)
        tl.store(state_idx + slots, columns, mask=is_real)
        tl.store(num_accepted + slots, tl.where(moves, 1, accepted), mask=is_real)
    table_rows = slots if BY_SLOT else rows.to(tl.int64)
    _list_copies(
        copies, pointers, row_stride, num_groups, moves, table_rows, sources, columns, biases
    )


@triton.jit(do_not_specialize=range(13))  # type: ignore[untyped-decorator]
def _postcopy_kernel(  # type: ignore[no-untyped-def]
    copies,
    pointers,
    row_stride,
    num_groups,
    num_reqs,
    idx_mapping,
    num_accepted,
    num_accepted_out,
    state_idx,
    num_computed,
    num_scheduled,
    num_drafts,
    num_sampled,
    BLOCK_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = tl.arange(0, ROWS)
    slots = _load_slots(idx_mapping, rows, num_reqs)
    is_real = slots >= 0
    if num_sampled is None:
        accepted = _load(num_accepted, slots, is_real)
    else:
        accepted = tl.maximum(_load(num_sampled, rows, is_real), 1)
    columns = _load(state_idx, slots, is_real)
    num_running = _load(num_computed, slots, is_real)
    if num_scheduled is None:
        num_running += 1 - accepted
    else:
        num_running += _load(num_scheduled, slots, is_real) - _load(num_drafts, slots, is_real)
    # As ``plan_alignment``.
    aligned = (num_running + accepted - 1) // BLOCK_SIZE * BLOCK_SIZE
    moves = is_real & (aligned >= num_running) & (aligned > 0)
    destinations = aligned // BLOCK_SIZE - 1
    stays = moves & (destinations == columns)
    tl.debug_barrier()  # Other threads load the entries that this one stores.
    tl.store(num_accepted_out + slots, tl.where(stays, 1, accepted), mask=is_real)
    biases = aligned - num_running
    table_rows = slots if BY_SLOT else rows.to(tl.int64)
    _list_copies(
        copies, pointers, row_stride, num_groups, moves, table_rows, columns, destinations, biases
    )


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tile(  # type: ignore[no-untyped-def]
    source,
    destination,
    size,
    tile,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STEP_WORDS: tl.constexpr,
) -> None:
    """Copy tile number ``tile`` of ``size`` bytes; source and destination do not overlap."""
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    first = tile * _TILE_BYTES
    num_bytes = tl.minimum(tl.maximum(size - first, 0), _TILE_BYTES).to(tl.int32)
    num_words = tl.multiple_of(num_bytes // word_bytes, ALIGNMENT // word_bytes)
    # The compiler uses hints on pointers, not on integers that become pointers.
    source = tl.multiple_of((source + first).to(tl.pointer_type(WORD)), ALIGNMENT)
    destination = tl.multiple_of((destination + first).to(tl.pointer_type(WORD)), ALIGNMENT)
    for step in range(0, num_words, STEP_WORDS):
        words = step + tl.arange(0, STEP_WORDS)
        mask = words < num_words
        tl.store(destination + words, tl.load(source + words, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _shift_rows(  # type: ignore[no-untyped-def]
    source,
    destination,
    size,
    num_rows,
    row_stride,
    piece_bytes,
    part,
    num_parts,
    WORD: tl.constexpr,
) -> None:
    """Shift one part of the rows to the left, in place or into another block.

    A lane is one word of a piece in one row. The program moves the pieces from first to last, a
    few at a time, and no other program touches its lanes. So every word is read before it is
    overwritten.
    """
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    source = source.to(tl.pointer_type(WORD))
    destination = destination.to(tl.pointer_type(WORD))
    # Offsets within one window have 32 bits to save registers.
    piece = (piece_bytes // word_bytes).to(tl.int32)
    row = (row_stride // word_bytes).to(tl.int32)
    num_pieces = size.to(tl.int32) // piece_bytes.to(tl.int32)
    num_lanes = num_rows.to(tl.int32) * piece
    for first in range(part.to(tl.int32) * _LANES, num_lanes, num_parts.to(tl.int32) * _LANES):
        lanes = first + tl.arange(0, _LANES)
        words = lanes // piece * row + lanes % piece
        for index in range(0, num_pieces, _PIECES):
            pieces = index + tl.arange(0, _PIECES)
            offsets = words[:, None] + pieces[None, :] * piece
            mask = (lanes < num_lanes)[:, None] & (pieces < num_pieces)[None, :]
            moved = tl.load(source + offsets, mask=mask)
            tl.debug_barrier()  # Other threads of the program store to the addresses loaded here.
            tl.store(destination + offsets, moved, mask=mask)


@triton.jit(do_not_specialize=range(3))  # type: ignore[untyped-decorator]
def _copy_kernel(facts, copies, entry_ints, WORD: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Copy this program's share of the tiles of one state, over all copies of the list."""
    facts += tl.program_id(0).to(tl.int64) * _NUM_FACTS
    base, stride, block_bytes = tl.load(facts), tl.load(facts + 1), tl.load(facts + 2)
    token_bytes, width, group = tl.load(facts + 3), tl.load(facts + 4), tl.load(facts + 5)
    row_bytes = tl.maximum(width, 1) * token_bytes
    num_tiles = tl.cdiv(block_bytes, _TILE_BYTES)
    part, num_parts = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    for ticket in range(part, tl.load(copies) * num_tiles, num_parts):
        tile = ticket % num_tiles
        entry = copies + (1 + ticket // num_tiles) * entry_ints
        bias = tl.load(entry).to(tl.int64)
        blocks = entry + 1 + _BLOCKS_PER_GROUP * group
        source_block = tl.load(blocks + tl.where(width > 0, 0, 1)).to(tl.int64)
        destination_block = tl.load(blocks + 2).to(tl.int64)
        shifted = tl.where(width > 0, bias, 0) * token_bytes
        is_real = (source_block >= 0) & (destination_block >= 0)
        if is_real & ((shifted > 0) | (source_block != destination_block)):
            source = base + source_block * stride + shifted
            destination = base + destination_block * stride
            is_one_piece = (row_bytes == block_bytes) & (source_block != destination_block)
            if (shifted > 0) & (is_one_piece == 0):
                num_rows = block_bytes // row_bytes
                size = row_bytes - shifted
                _shift_rows(
                    source, destination, size, num_rows, row_bytes, token_bytes, tile, num_tiles,
                    WORD,
                )  # fmt: skip
            else:
                size = block_bytes - shifted
                if ((source | destination | size) & (_WIDE_BYTES - 1)) == 0:
                    _copy_tile(
                        source, destination, size, tile, tl.int64, _WIDE_BYTES, _TILE_BYTES // 8
                    )
                else:
                    # In steps: a whole tile of narrow words would take too many registers.
                    alignment: tl.constexpr = WORD.primitive_bitwidth // 8
                    _copy_tile(source, destination, size, tile, WORD, alignment, _NARROW_STEP_WORDS)


def copy_listed(table: StateTable, max_copies: int) -> None:
    """Execute the list of copies, which has at most ``max_copies``, in one launch."""
    num_states = len(table.facts)
    if not num_states:
        return
    max_tiles = max_copies * triton.cdiv(table.max_block_bytes, _TILE_BYTES.value)
    parts = max(1, min(_max_parts(table.device, num_states), max_tiles))
    with torch.cuda.device(table.facts.get_device()):
        _copy_kernel[num_states, parts](
            table.facts,
            table.copies,
            table.copies.shape[1],
            WORD=WORDS[table.word_bytes],
            num_warps=_NUM_WARPS,
        )


def _plan(kernel: Any, table: StateTable, num_reqs: int, *inputs: torch.Tensor | None) -> None:
    """List copies; the inputs are those of the functions of the same name in ``copies``."""
    with torch.cuda.device(table.copies.get_device()):
        kernel[(1,)](
            table.copies,
            table.pointers,
            table.row_stride,
            table.num_groups,
            num_reqs,
            *inputs,
            BLOCK_SIZE=table.block_size,
            BY_SLOT=table.is_by_slot,
            ROWS=max(_MIN_ROWS, triton.next_power_of_2(num_reqs)),
            num_warps=_NUM_WARPS,
        )


plan_precopy = functools.partial(_plan, _precopy_kernel)
plan_postcopy = functools.partial(_plan, _postcopy_kernel)


@functools.cache
def _max_parts(device: torch.device, num_states: int) -> int:
    """Return the maximum number of programs that share the copies of one state."""
    if device.type != "cuda":
        return _PARTS_OF_INTERPRETER
    num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_SM * num_sms // num_states
