"""Device functions that copy states, shared out over all programs of a kernel."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from mamba_cache.integrations.vllm.state_table import CHUNK_FIELDS, NUM_COUNTERS, TILE_BYTES

__all__ = ["NUM_TURNS", "copy_bytes", "copy_moves", "shift_rows"]

NUM_TURNS = NUM_COUNTERS - 1
"""Counters that tickets are drawn from. One alone serves 400 tickets in a microsecond, too few."""

_TILE_BYTES = tl.constexpr(TILE_BYTES)
_WIDE_BYTES = tl.constexpr(16)
_STEP_WORDS = tl.constexpr(256)
_LANES = tl.constexpr(64)
_PIECES = tl.constexpr(4)
_LINE_INTS = tl.constexpr(32)
_COUNTERS = tl.constexpr(triton.next_power_of_2(NUM_COUNTERS))
_NUM_COUNTERS = tl.constexpr(NUM_COUNTERS)
_ENDED = tl.constexpr(NUM_TURNS)

_NUM_FIELDS = tl.constexpr(len(CHUNK_FIELDS))
_BASE_ADDRESS = tl.constexpr(CHUNK_FIELDS.index("base_address"))
_BLOCK_STRIDE = tl.constexpr(CHUNK_FIELDS.index("block_stride"))
_BLOCK_BYTES = tl.constexpr(CHUNK_FIELDS.index("block_bytes"))
_TOKEN_BYTES = tl.constexpr(CHUNK_FIELDS.index("token_bytes"))
_CONV_WIDTH = tl.constexpr(CHUNK_FIELDS.index("conv_width"))
_GROUP = tl.constexpr(CHUNK_FIELDS.index("group"))
_FIRST_TILE = tl.constexpr(CHUNK_FIELDS.index("first_tile"))
_NUM_TILES = tl.constexpr(CHUNK_FIELDS.index("num_tiles"))


@triton.jit  # type: ignore[untyped-decorator]
def _words_from(  # type: ignore[no-untyped-def]
    first, size, WORD_BYTES: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Return how many of ``size`` bytes are in the tile that begins at ``first``, in words."""
    num_bytes = tl.minimum(tl.maximum(size - first, 0), _TILE_BYTES).to(tl.int32)
    return tl.multiple_of(num_bytes // WORD_BYTES, ALIGNMENT // WORD_BYTES)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tile(  # type: ignore[no-untyped-def]
    source, destination, size, tile, WORD: tl.constexpr, ALIGNMENT: tl.constexpr
) -> None:
    """Copy the tile of that number of bytes that do not overlap."""
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    first = tile * _TILE_BYTES
    num_words = _words_from(first, size, word_bytes, ALIGNMENT)
    # The compiler heeds hints on pointers, not on integers that become pointers.
    source = tl.multiple_of((source + first).to(tl.pointer_type(WORD)), ALIGNMENT)
    destination = tl.multiple_of((destination + first).to(tl.pointer_type(WORD)), ALIGNMENT)
    # In steps, because a whole tile of narrow words would take too many registers.
    for step in range(0, num_words, _STEP_WORDS):
        words = step + tl.arange(0, _STEP_WORDS)
        mask = words < num_words
        tl.store(destination + words, tl.load(source + words, mask=mask), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def copy_bytes(  # type: ignore[no-untyped-def]
    source, destination, size, tile, WORD: tl.constexpr
) -> None:
    """Copy the tile of that number of bytes that do not overlap, by the widest words that fit."""
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
    """Move one part of rows to the left, onto themselves or elsewhere.

    A lane is one word of a piece in one row. The program walks through the pieces from first to
    last, a few at a time, and no other program touches its lanes: so nothing is overwritten before
    it is read.
    """
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    source = source.to(tl.pointer_type(WORD))
    destination = destination.to(tl.pointer_type(WORD))
    # Offsets within one window have 32 bits, so that few registers hold many of them.
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
            # Other threads of the program store where these loads read.
            tl.debug_barrier()
            tl.store(destination + offsets, moved, mask=mask)


@triton.jit
def _copy_wide_and_draw(source, destination, size, tile, counter):  # type: ignore[no-untyped-def]
    """Copy a tile by accesses of 16 bytes, and draw a ticket while they are on their way."""
    first = tile * _TILE_BYTES
    source = tl.multiple_of((source + first).to(tl.pointer_type(tl.int64)), _WIDE_BYTES)
    destination = tl.multiple_of((destination + first).to(tl.pointer_type(tl.int64)), _WIDE_BYTES)
    words = tl.arange(0, _TILE_BYTES // 8)
    mask = words < _words_from(first, size, 8, _WIDE_BYTES)
    moved = tl.load(source + words, mask=mask)
    ticket = tl.atomic_add(counter, 1, sem="relaxed")
    tl.store(destination + words, moved, mask=mask)
    return ticket


@triton.jit  # type: ignore[untyped-decorator]
def _copy_and_draw(  # type: ignore[no-untyped-def]
    source, destination, size, tile, counter, WORD: tl.constexpr
):
    """As ``copy_bytes``; also draws a ticket."""
    if ((source | destination | size) & (_WIDE_BYTES - 1)) == 0:
        ticket = _copy_wide_and_draw(source, destination, size, tile, counter)
    else:
        _copy_tile(source, destination, size, tile, WORD, WORD.primitive_bitwidth // 8)
        ticket = tl.atomic_add(counter, 1, sem="relaxed")
    return ticket


@triton.jit
def _load_chunk(chunks, index):  # type: ignore[no-untyped-def]
    """Return the fields of a chunk, in their order."""
    chunk = chunks + index.to(tl.int64) * _NUM_FIELDS
    return (
        tl.load(chunk + _BASE_ADDRESS),
        tl.load(chunk + _BLOCK_STRIDE),
        tl.load(chunk + _BLOCK_BYTES),
        tl.load(chunk + _TOKEN_BYTES),
        tl.load(chunk + _CONV_WIDTH),
        tl.load(chunk + _GROUP),
        tl.load(chunk + _FIRST_TILE),
        tl.load(chunk + _NUM_TILES),
    )


@triton.jit
def _is_last(counters):  # type: ignore[no-untyped-def]
    """Return whether all other programs have come here, and if so clears the counters."""
    # Relaxed, because what comes before it are this program's reads, whose values led here.
    ended = tl.atomic_add(counters + _ENDED * _LINE_INTS, 1, sem="relaxed")
    is_last = ended == tl.num_programs(0) - 1
    if is_last:
        indices = tl.arange(0, _COUNTERS)
        tl.store(counters + indices * _LINE_INTS, 0, mask=indices < _NUM_COUNTERS)
    return is_last


@triton.jit  # type: ignore[untyped-decorator]
def _move_tile(  # type: ignore[no-untyped-def]
    source_block,
    destination_block,
    shift,
    base,
    stride,
    block_bytes,
    token_bytes,
    row_bytes,
    tile,
    num_tiles,
    counter,
    WORD: tl.constexpr,
):
    """Copy one tile of one state from block to block, and draw a ticket."""
    source = base + source_block * stride + shift * token_bytes
    destination = base + destination_block * stride
    is_real = (source_block >= 0) & (destination_block >= 0)
    is_one_piece = (row_bytes == block_bytes) & (source_block != destination_block)
    if (shift == 0) | is_one_piece:
        size = tl.where(is_real, block_bytes - shift * token_bytes, 0)
        ticket = _copy_and_draw(source, destination, size, tile, counter, WORD)
    else:
        if is_real & (tile < num_tiles):
            size = row_bytes - shift * token_bytes
            num_rows = block_bytes.to(tl.int32) // row_bytes.to(tl.int32)
            shift_rows(
                source, destination, size, num_rows, row_bytes, token_bytes, tile, num_tiles, WORD
            )
        ticket = tl.atomic_add(counter, 1, sem="relaxed")
    return ticket


@triton.jit  # type: ignore[untyped-decorator]
def copy_moves(  # type: ignore[no-untyped-def]
    moves,
    sources,
    destinations,
    biases,
    table_rows,
    chunks,
    num_chunks,
    counters,
    block_tables,
    table_stride,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_PER_CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Copy this program's share of the tiles of all moves, numbered through: its tickets.

    The first ticket is the program's number, the others are drawn; so what is in flight stays close
    together in memory. Programs take turns at ``TURNS`` counters, which divide their number.

    A row of the batch has its blocks in row ``table_rows`` of the block tables.

    Returns:
        Whether this program shall write what later steps decide by. Where something is copied, it
        is the last program, when no other decides any more. Else it is the first, provided that
        what it writes makes no row move.
    """
    program = tl.program_id(0)
    ticket = program
    # Before it is known whether anything moves: the first load of a line takes long.
    base, stride, block_bytes, token_bytes, width, group, first_tile, num_tiles = _load_chunk(
        chunks, ticket // TILES_PER_CHUNK % num_chunks
    )
    rows = tl.arange(0, ROWS)
    row = tl.min(tl.where(moves, rows, ROWS), 0)
    is_writer = program == 0
    if row < ROWS:
        turn = program % TURNS
        counter = counters + turn * _LINE_INTS
        end = 0
        while row < ROWS:
            source_column = tl.sum(tl.where(rows == row, sources, 0), 0)
            destination_column = tl.sum(tl.where(rows == row, destinations, 0), 0)
            bias = tl.sum(tl.where(rows == row, biases, 0), 0)
            table_row = tl.sum(tl.where(rows == row, table_rows, 0), 0).to(tl.int64)
            end += num_chunks * TILES_PER_CHUNK
            while ticket < end:
                shift = tl.where(width > 0, bias, 0)
                block_table = tl.load(block_tables + group).to(tl.pointer_type(tl.int32))
                block_table += table_row * table_stride
                drawn = _move_tile(
                    tl.load(block_table + source_column + bias - shift).to(tl.int64),
                    tl.load(block_table + destination_column).to(tl.int64),
                    shift,
                    base,
                    stride,
                    block_bytes,
                    token_bytes,
                    width * token_bytes,
                    first_tile + ticket % TILES_PER_CHUNK,
                    num_tiles,
                    counter,
                    WORD,
                )
                ticket = tl.num_programs(0) + turn + TURNS * drawn
                base, stride, block_bytes, token_bytes, width, group, first_tile, num_tiles = (
                    _load_chunk(chunks, ticket // TILES_PER_CHUNK % num_chunks)
                )
            row = tl.min(tl.where(moves & (rows > row), rows, ROWS), 0)
        is_writer = _is_last(counters)
    return is_writer
