"""How programs of a kernel copy bytes, and one state of one request: what the kernels share."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from mamba_cache.align.table import STATE_FIELDS, TILE_BYTES

__all__ = ["NUM_WARPS", "WORDS", "copy_bytes", "copy_moves", "shift_rows"]

NUM_WARPS = 4
"""Warps of a program that copies."""

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Types of the words that are moved, by bytes."""

_TILE_BYTES = tl.constexpr(TILE_BYTES)
_WIDE_BYTES = tl.constexpr(16)
_STEP_WORDS = tl.constexpr(1024)
_LANES = tl.constexpr(256)

_NUM_FIELDS = tl.constexpr(len(STATE_FIELDS))
_BASE_ADDRESS = tl.constexpr(STATE_FIELDS.index("base_address"))
_BLOCK_STRIDE = tl.constexpr(STATE_FIELDS.index("block_stride"))
_CONV_WIDTH = tl.constexpr(STATE_FIELDS.index("conv_width"))
_GROUP = tl.constexpr(STATE_FIELDS.index("group"))
_BLOCK_BYTES = tl.constexpr(STATE_FIELDS.index("block_bytes"))
_TOKEN_BYTES = tl.constexpr(STATE_FIELDS.index("token_bytes"))
_NUM_PARTS = tl.constexpr(STATE_FIELDS.index("num_parts"))


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tile(  # type: ignore[no-untyped-def]
    source, destination, size, tile, WORD: tl.constexpr, ALIGNMENT: tl.constexpr
) -> None:
    """Copies the tile of that number of bytes that do not overlap."""
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    tile_words: tl.constexpr = _TILE_BYTES // word_bytes
    num_words = tl.multiple_of(size // word_bytes, ALIGNMENT // word_bytes)
    # The compiler heeds hints on pointers, not on integers that become pointers.
    source = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGNMENT)
    destination = tl.multiple_of(destination.to(tl.pointer_type(WORD)), ALIGNMENT)
    # In steps, because a whole tile of narrow words would take too many registers.
    for step in range(0, tile_words, _STEP_WORDS):
        words = tile * tile_words + step + tl.arange(0, _STEP_WORDS)
        mask = words < num_words
        tl.store(destination + words, tl.load(source + words, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def copy_bytes(  # type: ignore[no-untyped-def]
    source, destination, size, tile, WORD: tl.constexpr
) -> None:
    """Copies the tile of that number of bytes that do not overlap, by the widest words that fit."""
    if ((source | destination | size) & (_WIDE_BYTES - 1)) == 0:
        _copy_tile(source, destination, size, tile, tl.int64, _WIDE_BYTES)
    else:
        _copy_tile(source, destination, size, tile, WORD, WORD.primitive_bitwidth // 8)


@triton.jit  # type: ignore[untyped-decorator]
def shift_rows(  # type: ignore[no-untyped-def]
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
    """Moves one part of rows to the left, onto themselves or elsewhere.

    A lane is one word of a piece in one row. It walks through the pieces from first to last, and no
    other lane touches its words: so nothing is overwritten before it is read.
    """
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    source = source.to(tl.pointer_type(WORD))
    destination = destination.to(tl.pointer_type(WORD))
    piece = piece_bytes // word_bytes
    num_lanes = num_rows * piece
    lanes_per_part = tl.cdiv(num_lanes, num_parts)
    end = tl.minimum((part + 1) * lanes_per_part, num_lanes)
    for first in range(part * lanes_per_part, end, _LANES):
        lanes = first + tl.arange(0, _LANES)
        words = lanes // piece * (row_stride // word_bytes) + lanes % piece
        for index in range(size // piece_bytes):
            moved = tl.load(source + words + index * piece, mask=lanes < end)
            tl.store(destination + words + index * piece, moved, mask=lanes < end)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_part(  # type: ignore[no-untyped-def]
    state,
    part,
    row,
    source_column,
    destination_column,
    bias,
    block_tables,
    table_stride,
    WORD: tl.constexpr,
) -> None:
    """Copies one part of one state of the request in one row."""
    conv_width = tl.load(state + _CONV_WIDTH)
    block_table = tl.load(block_tables + tl.load(state + _GROUP)).to(tl.pointer_type(tl.int32))
    block_table += row * table_stride
    shift = tl.where(conv_width > 0, bias, 0)
    source_block = tl.load(block_table + source_column + bias - shift).to(tl.int64)
    destination_block = tl.load(block_table + destination_column).to(tl.int64)
    if (source_block >= 0) & (destination_block >= 0):
        base, stride = tl.load(state + _BASE_ADDRESS), tl.load(state + _BLOCK_STRIDE)
        block_bytes, token_bytes = tl.load(state + _BLOCK_BYTES), tl.load(state + _TOKEN_BYTES)
        source = base + source_block * stride + shift * token_bytes
        destination = base + destination_block * stride
        if shift == 0:
            copy_bytes(source, destination, block_bytes, part, WORD)
        else:
            row_bytes = conv_width * token_bytes
            shift_rows(
                source,
                destination,
                row_bytes - shift * token_bytes,
                block_bytes // row_bytes,
                row_bytes,
                token_bytes,
                part,
                tl.load(state + _NUM_PARTS),
                WORD,
            )


@triton.jit  # type: ignore[untyped-decorator]
def copy_moves(  # type: ignore[no-untyped-def]
    moves,
    sources,
    destinations,
    biases,
    states,
    tiles,
    num_tiles,
    block_tables,
    table_stride,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Copies this program's share: the tiles of all moves are dealt out to the programs in turn."""
    num_moves = tl.sum(moves.to(tl.int32), 0)
    if num_moves > 0:
        rows = tl.arange(0, ROWS).to(tl.int64)
        ordinals = tl.cumsum(moves.to(tl.int32), 0)
        num_programs = tl.num_programs(0)
        first = tl.program_id(0)
        for move in range(num_moves):
            chosen = moves & (ordinals == move + 1)
            row = tl.sum(tl.where(chosen, rows, 0), 0)
            source = tl.sum(tl.where(chosen, sources, 0), 0)
            destination = tl.sum(tl.where(chosen, destinations, 0), 0)
            bias = tl.sum(tl.where(chosen, biases, 0), 0)
            for tile in range(first, num_tiles, num_programs):
                state = states + tl.load(tiles + 2 * tile).to(tl.int64) * _NUM_FIELDS
                part = tl.load(tiles + 2 * tile + 1).to(tl.int64)
                _copy_part(
                    state, part, row, source, destination, bias, block_tables, table_stride, WORD
                )
            # The turn goes on where this move's tiles end, so that programs are equally busy.
            taken = tl.maximum(tl.cdiv(num_tiles - first, num_programs), 0)
            first += taken * num_programs - num_tiles
