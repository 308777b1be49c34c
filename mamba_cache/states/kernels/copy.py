"""The batched state copy as one Triton kernel: all pairs, layers and tensors in one launch.

Tiles of quantised states change their dtype in the copy; all other tensors are copied unchanged.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from mamba_cache._torch import ZERO_SOURCE, to_device
from mamba_cache.states.kernels._launch import (
    WIDE_BYTES,
    Launcher,
    end_of_real,
    entries_per_program,
)
from mamba_cache.states.kernels.quantize import (
    RESTORE_OPTIONS,
    RESTORED_CODES,
    STORE_OPTIONS,
    STORED_CODES,
    dequantize_tile,
    quantize_tile,
    restored_tile_sizes,
    stored_tile_sizes,
)
from mamba_cache.states.kernels.twins import Pairs, Quantized, RowCopy, as_bytes

__all__ = ["WORDS", "copy_states"]

# 128 threads with two 16-byte loads each, 4 KiB a program. Time ratio to a flat copy of equally
# many bytes on one NVIDIA H200 (24 layers, conv [10240, 4] bf16 and SSM [128, 64, 128]):
#                          fp32 SSM, 1, 4, 16 slots    bf16 SSM, 1, 4, 16 slots
#   4 KiB, 4 warps         1.04  1.02  1.02            1.07  1.04  1.03
#   2 KiB, 2 warps         1.04  1.02  1.02            1.08  1.04  1.03
#   8 KiB, 8 warps         1.06  1.04  1.04            1.07  1.06  1.06
#   16 KiB, 4 warps        1.10  1.09                  1.12  1.09
#   persistent, 4 KiB      1.06  1.06  1.07            1.08  1.06  1.08
# The hardware starts programs in order, so the accesses of small programs in flight are close
# together in memory. docs/how-to/kernels.md has the other measurements.
_COPY_OPTIONS: dict[str, Any] = {"num_warps": 4}
_PAIRS_IN_GRAPH = 64
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Types of words by their size in bytes."""

_WIDEST_WORD_BYTES = 8
_MAX_TILES_PER_CHUNK = 16
_TILE_WORDS = tl.constexpr(512)
_WIDE_BYTES = tl.constexpr(WIDE_BYTES)
_ZERO_SOURCE = tl.constexpr(ZERO_SOURCE)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tile(  # type: ignore[no-untyped-def]
    chunk, tile, source_row, destination_row, WORD: tl.constexpr, ALIGNMENT: tl.constexpr
) -> None:
    """Copy a tile of one chunk of the table, or clear it."""
    source = tl.load(chunk) + source_row * tl.load(chunk + 2)
    destination = tl.load(chunk + 1) + destination_row * tl.load(chunk + 3)
    words = tile * _TILE_WORDS + tl.arange(0, _TILE_WORDS)
    words_per_access: tl.constexpr = ALIGNMENT * 8 // WORD.primitive_bitwidth
    mask = words < tl.multiple_of(tl.load(chunk + 4), words_per_access)
    # The table holds plain integers: only hints tell the compiler that wide accesses fit. It heeds
    # them on pointers, not on integers that become pointers.
    source = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGNMENT)
    destination = tl.multiple_of(destination.to(tl.pointer_type(WORD)), ALIGNMENT)
    if source_row == _ZERO_SOURCE:
        tl.store(destination + words, tl.zeros([_TILE_WORDS], dtype=WORD), mask=mask)
    else:
        tl.store(destination + words, tl.load(source + words, mask=mask), mask=mask)


# One compiled kernel must work for any address and number of rows. The table of chunks is always
# aligned; the alignment of codes is a constant of the kernel.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "source_rows", "destination_rows", "num_pairs", "num_wide",
        "codes", "codes_layer_stride", "codes_row_stride",
    ]
)  # fmt: skip
def _copy_kernel(  # type: ignore[no-untyped-def]
    chunks, states, codes, scales, source_rows, destination_rows, num_pairs, num_wide,
    states_layer_stride, states_row_stride, codes_layer_stride, codes_row_stride,
    scales_layer_stride, scales_row_stride,
    NUM_STATE_TILES: tl.constexpr, TILES_PER_LAYER: tl.constexpr, IS_STORE: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CODES_ALIGNMENT: tl.constexpr,
    NARROW_WORD: tl.constexpr, TILES_PER_CHUNK: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    index = (program - NUM_STATE_TILES) // TILES_PER_CHUNK
    chunk, chunk_tile = chunks + index * 5, (program - NUM_STATE_TILES) % TILES_PER_CHUNK
    first = tl.program_id(1) * PAIRS
    end = first + 1
    if PAIRS > 1:
        end = end_of_real(destination_rows, first, num_pairs, PAIRS)
    for pair in range(first, end):
        source_row = tl.load(source_rows + pair).to(tl.int64)
        destination_row = tl.load(destination_rows + pair).to(tl.int64)
        is_real = (destination_row >= 0) & ((source_row >= 0) | (source_row == _ZERO_SOURCE))
        if is_real & (program < NUM_STATE_TILES):
            if states is not None:
                layer = (program // TILES_PER_LAYER).to(tl.int64)
                tile = program % TILES_PER_LAYER
                row, slot = destination_row, source_row
                if IS_STORE:
                    row, slot = source_row, destination_row
                state = states + layer * states_layer_stride + row * states_row_stride
                code = codes + layer * codes_layer_stride + slot * codes_row_stride
                code = tl.multiple_of(code, CODES_ALIGNMENT)
                scale = scales + layer * scales_layer_stride + slot * scales_row_stride
                if IS_STORE:
                    quantize_tile(
                        state, code, scale, source_row, tile, HEAD_DIM, STATE_DIM, ROWS, COLUMNS
                    )
                else:
                    dequantize_tile(
                        state, code, scale, source_row, tile, HEAD_DIM, STATE_DIM, ROWS, COLUMNS
                    )
        elif is_real:
            if index < num_wide:
                _copy_tile(chunk, chunk_tile, source_row, destination_row, tl.int64, _WIDE_BYTES)
            else:
                width: tl.constexpr = NARROW_WORD.primitive_bitwidth // 8
                _copy_tile(chunk, chunk_tile, source_row, destination_row, NARROW_WORD, width)


def _plan_chunks(pairs: Pairs) -> tuple[np.ndarray, int, int, int]:
    """Return the kernel's table of chunks, and its properties.

    A *segment* is one layer of one pair of tensors. A row of a segment is cut into *chunks*, which
    the kernel cuts into tiles. A segment is *wide* if all its addresses, strides and sizes are
    multiples of ``WIDE_BYTES``. The table does not keep the tensors alive.

    Returns:
        [chunks, 5] int64: addresses of source and destination, their row strides, number of words;
        wide chunks come first. The number of wide chunks. Bytes of a word in other chunks: 1, 2, 4
        or 8. The number of tiles of the largest chunk, a power of two.
    """
    segments = [
        (
            source.data_ptr() + layer * source.stride(0),
            destination.data_ptr() + layer * destination.stride(0),
            source.stride(1),
            destination.stride(1),
            math.prod(source.shape[2:]),
        )
        for source, destination in ((as_bytes(a), as_bytes(b)) for a, b in pairs if b.numel())
        for layer in range(source.shape[0])
    ]
    wide = [segment for segment in segments if math.gcd(WIDE_BYTES, *segment) == WIDE_BYTES]
    narrow = [segment for segment in segments if math.gcd(WIDE_BYTES, *segment) < WIDE_BYTES]
    narrow_bytes = math.gcd(_WIDEST_WORD_BYTES, *(value for segment in narrow for value in segment))
    kinds = ((wide, _WIDEST_WORD_BYTES), (narrow, narrow_bytes))
    max_words = max((size // word for group, word in kinds for *_, size in group), default=0)
    max_tiles = triton.next_power_of_2(max(triton.cdiv(max_words, _TILE_WORDS.value), 1))
    tiles_per_chunk = min(_MAX_TILES_PER_CHUNK, max_tiles)
    chunk_words = tiles_per_chunk * _TILE_WORDS.value
    tables = [np.empty((0, 5), dtype=np.int64)]
    for group, word_bytes in kinds:
        for source, destination, source_stride, destination_stride, size in group:
            first_bytes = np.arange(0, size, chunk_words * word_bytes, dtype=np.int64)
            table = np.empty((len(first_bytes), 5), dtype=np.int64)
            table[:, 0] = source + first_bytes
            table[:, 1] = destination + first_bytes
            table[:, 2:4] = source_stride, destination_stride
            table[:, 4] = np.minimum((size - first_bytes) // word_bytes, chunk_words)
            tables.append(table)
    num_wide = sum(map(len, tables[: 1 + len(wide)]))
    return np.concatenate(tables), num_wide, narrow_bytes, tiles_per_chunk


def copy_states(pairs: Pairs, quantized: Quantized | None, device: torch.device) -> RowCopy:
    """Return a copy of whole rows, all layers of all tensors, as in ``StateCopier.copy``.

    The caller keeps the tensors alive.
    """
    table, num_wide, narrow_bytes, tiles_per_chunk = _plan_chunks(pairs)
    chunks = to_device(torch.from_numpy(table), device)
    tensors: tuple[torch.Tensor | None, ...] = (None,) * 3
    num_state_tiles, strides = 0, [0] * 6
    quantizing: tuple[int, ...] = (1, False, 1, 1, 1, 1, 1)
    options = _COPY_OPTIONS
    if quantized is not None:
        states, codes, scales, is_store = quantized
        tensors = (states, codes, scales)
        num_layers, _, heads, head_dim, state_dim = states.shape
        tile_sizes = stored_tile_sizes if is_store else restored_tile_sizes
        rows, columns = tile_sizes(head_dim, state_dim)
        tiles_per_head = triton.cdiv(head_dim, rows) * triton.cdiv(state_dim, columns)
        tiles_per_layer = heads * tiles_per_head
        num_state_tiles = num_layers * tiles_per_layer
        strides = [*states.stride()[:2], *codes.stride()[:2], *scales.stride()[:2]]
        widest = STORED_CODES if is_store else RESTORED_CODES
        alignment = math.gcd(widest, codes.data_ptr(), *codes.stride()[:2])
        quantizing = (tiles_per_layer, is_store, head_dim, state_dim, rows, columns, alignment)
        options = STORE_OPTIONS if is_store else RESTORE_OPTIONS
    num_programs = num_state_tiles + len(table) * tiles_per_chunk
    words = (WORDS[narrow_bytes], tiles_per_chunk)
    launch = Launcher(_copy_kernel)

    def copy(source_rows: torch.Tensor, destination_rows: torch.Tensor, num_pairs: int) -> None:
        if not num_programs or not num_pairs:
            return
        index = source_rows.get_device()
        pairs = entries_per_program(num_pairs, on_gpu=index >= 0, captured=_PAIRS_IN_GRAPH)
        launch(
            index,
            (source_rows.dtype, destination_rows.dtype, pairs),
            (num_programs, -(-num_pairs // pairs), 1),
            chunks,
            *tensors,
            source_rows,
            destination_rows,
            num_pairs,
            num_wide,
            *strides,
            num_state_tiles,
            *quantizing,
            *words,
            pairs,
            **options,
        )

    return copy
