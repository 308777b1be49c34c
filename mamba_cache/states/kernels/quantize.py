"""Copies between live states and int8 slots, in either direction, as one Triton kernel.

A launch moves all pairs, layers and tensors: tiles of SSM states change their dtype on the way, all
else is copied as it is.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from mamba_cache._torch import ZERO_SOURCE
from mamba_cache.states.kernels._launch import Launcher, end_of_real, entries_per_program, layout_of
from mamba_cache.states.kernels.copy import WORDS, copy_tile
from mamba_cache.states.kernels.copy_torch import WIDE_BYTES, CopyPlan, RowCopy
from mamba_cache.states.kernels.quantize_torch import (
    INFINITY_BITS,
    LARGEST_CODE,
    LEAST_MAGNITUDE_BITS,
    MAGNITUDE_MASK,
    ONE_OVER_LARGEST_CODE,
)

__all__ = [
    "STORED_CODES",
    "STORE_OPTIONS",
    "copy_quantized",
    "quantize_tile",
    "stored_tile_sizes",
]

# A store finds the largest magnitude of each column. One warp does so without waiting for others,
# and with few columns a thread it has few scales to work out. Share of a flat copy's GB/s (one
# NVIDIA H200, 16 slots of 24 layers, conv [10240, 4] bf16 and SSM [128, 64, 128]):
#                                        fp32    bf16
#   2048 elements, 1 warp,  8 codes      0.99    0.85
#   2048 elements, 1 warp,  4 codes      0.99    0.87
#   4096 elements, 1 warp,  8 codes      0.99    0.79
#   1024 elements, 1 warp,  8 codes      0.59    0.45
# Two and four warps that share columns wait for each other. A restore has 0.92 to 0.93 with
# any number of warps up to four.
_STORED_ELEMENTS = 2048
_RESTORED_ELEMENTS = 4096
_MAX_RESTORED_COLUMNS = 128
_RESTORED_CODES = 16

STORED_CODES = 8
"""Codes that a thread writes at a time, where they are aligned for it."""

# The twin rounds after every operation.
STORE_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
"""How to compile a kernel that quantises."""

_RESTORE_OPTIONS: dict[str, Any] = {"num_warps": 2, "enable_fp_fusion": False}
_PAIRS_IN_GRAPH = 64

_WIDE_BYTES = tl.constexpr(WIDE_BYTES)
_ZERO_SOURCE = tl.constexpr(ZERO_SOURCE)
_LARGEST_CODE = tl.constexpr(LARGEST_CODE)
_ONE_OVER_LARGEST_CODE = tl.constexpr(ONE_OVER_LARGEST_CODE)
_MAGNITUDE_MASK = tl.constexpr(MAGNITUDE_MASK)
_INFINITY_BITS = tl.constexpr(INFINITY_BITS)
_LEAST_MAGNITUDE_BITS = tl.constexpr(LEAST_MAGNITUDE_BITS)
_NAN_BITS = tl.constexpr(0x7FC00000)
# Added to a code that is not rounded yet, it leaves a float32 whose last bits are the code, rounded
# to nearest, halves to even: no conversion, of which a GPU makes few at a time.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.jit  # type: ignore[untyped-decorator]
def _places(  # type: ignore[no-untyped-def]
    tile,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return places and masks of a tile's codes, and of its scales."""
    tiles_across: tl.constexpr = (STATE_DIM + COLUMNS - 1) // COLUMNS
    tiles_per_head: tl.constexpr = (HEAD_DIM + ROWS - 1) // ROWS * tiles_across
    head = tile // tiles_per_head
    tile = tile % tiles_per_head
    columns = tile % tiles_across * COLUMNS + tl.arange(0, COLUMNS)
    rows = (tile // tiles_across * ROWS + tl.arange(0, ROWS))[:, None]
    places = (head * HEAD_DIM + rows) * STATE_DIM + columns[None, :]
    mask = (rows < HEAD_DIM) & (columns[None, :] < STATE_DIM)
    return places, mask, head * STATE_DIM + columns, columns < STATE_DIM


@triton.jit  # type: ignore[untyped-decorator]
def quantize_tile(  # type: ignore[no-untyped-def]
    states, codes, scales, source_row, tile,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Quantise some whole columns of one head's state, or zeros if ``source_row`` is negative."""
    places, mask, scale_places, scale_mask = _places(tile, HEAD_DIM, STATE_DIM, ROWS, COLUMNS)
    values = tl.load(states + places, mask=mask & (source_row >= 0), other=0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True)
    largest_bits = tl.maximum(tl.max(bits & _MAGNITUDE_MASK, axis=0), _LEAST_MAGNITUDE_BITS)
    largest = largest_bits.to(tl.float32, bitcast=True)
    # In bits: Triton compares the constants of a kernel before each launch, and NaN is not NaN.
    nan = tl.full([COLUMNS], _NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(largest_bits < _INFINITY_BITS, largest * _ONE_OVER_LARGEST_CODE, nan)
    tl.store(scales + scale_places, scale, mask=scale_mask)
    exact = values * tl.div_rn(tl.full([COLUMNS], _LARGEST_CODE, tl.float32), largest)[None, :]
    code = (exact + _ROUNDER).to(tl.int32, bitcast=True)
    # All ones where the column is finite, else zeros: registers hold bits, but few conditions.
    kept = (largest_bits - _INFINITY_BITS) >> 31
    tl.store(codes + places, (code & kept[None, :]).to(tl.int8), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_tile(  # type: ignore[no-untyped-def]
    states, codes, scales, source_row, tile,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Restore a part of one head's state; clear it if ``source_row`` is negative."""
    places, mask, scale_places, scale_mask = _places(tile, HEAD_DIM, STATE_DIM, ROWS, COLUMNS)
    # A code and a scale that are not read are zeros.
    is_read = source_row >= 0
    scale = tl.load(scales + scale_places, mask=scale_mask & is_read, other=0.0)
    code = tl.load(codes + places, mask=mask & is_read, other=0)
    values = code.to(tl.float32) * scale[None, :]
    tl.store(states + places, values.to(states.dtype.element_ty), mask=mask)


# Rows come at any address and in any number, as in the plain copy.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "source_rows", "destination_rows", "num_pairs", "num_wide",
        "codes", "codes_layer_stride", "codes_row_stride",
    ]
)  # fmt: skip
def _quantized_copy_kernel(  # type: ignore[no-untyped-def]
    chunks, states, codes, scales, source_rows, destination_rows, num_pairs,
    num_wide, num_state_tiles, tiles_per_layer,
    states_layer_stride, states_row_stride, codes_layer_stride, codes_row_stride,
    scales_layer_stride, scales_row_stride,
    IS_STORE: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CODES_ALIGNMENT: tl.constexpr,
    NARROW_WORD: tl.constexpr, TILES_PER_CHUNK: tl.constexpr, PAIRS: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    first = tl.program_id(1) * PAIRS
    end = first + 1
    if PAIRS > 1:
        end = end_of_real(destination_rows, first, num_pairs, PAIRS)
    for pair in range(first, end):
        source_row = tl.load(source_rows + pair).to(tl.int64)
        destination_row = tl.load(destination_rows + pair).to(tl.int64)
        is_real = (destination_row >= 0) & ((source_row >= 0) | (source_row == _ZERO_SOURCE))
        if is_real & (program < num_state_tiles):
            layer = (program // tiles_per_layer).to(tl.int64)
            tile = program % tiles_per_layer
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
                _dequantize_tile(
                    state, code, scale, source_row, tile, HEAD_DIM, STATE_DIM, ROWS, COLUMNS
                )
        elif is_real:
            index = (program - num_state_tiles) // TILES_PER_CHUNK
            chunk, tile = chunks + index * 5, (program - num_state_tiles) % TILES_PER_CHUNK
            if index < num_wide:
                copy_tile(chunk, tile, source_row, destination_row, tl.int64, _WIDE_BYTES)
            else:
                alignment: tl.constexpr = NARROW_WORD.primitive_bitwidth // 8
                copy_tile(chunk, tile, source_row, destination_row, NARROW_WORD, alignment)


_launch = Launcher(_quantized_copy_kernel)


def stored_tile_sizes(head_dim: int, state_dim: int) -> tuple[int, int]:
    """Return rows and columns of tiles that are quantised: a scale needs whole columns."""
    rows, columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(state_dim)
    return rows, min(columns, max(1, _STORED_ELEMENTS // rows))


def _restored_tile_sizes(head_dim: int, state_dim: int) -> tuple[int, int]:
    """Return the same of tiles that are restored, which need no whole columns, only long rows."""
    rows, columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(state_dim)
    columns = min(columns, _MAX_RESTORED_COLUMNS)
    return min(rows, _RESTORED_ELEMENTS // columns), columns


def copy_quantized(
    unchanged: CopyPlan,
    states: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    is_store: bool,
) -> RowCopy:
    """Return what stores live states in slots, or restores them."""
    num_layers, _, heads, head_dim, state_dim = states.shape
    tile_sizes = stored_tile_sizes if is_store else _restored_tile_sizes
    rows, columns = tile_sizes(head_dim, state_dim)
    tiles_per_head = triton.cdiv(head_dim, rows) * triton.cdiv(state_dim, columns)
    num_state_tiles = num_layers * heads * tiles_per_head
    num_programs = num_state_tiles + unchanged.num_tiles
    tensors = (states, codes, scales)
    strides = (stride for tensor in tensors for stride in tensor.stride()[:2])
    sizes = (unchanged.num_wide, num_state_tiles, heads * tiles_per_head, *strides)
    widest = STORED_CODES if is_store else _RESTORED_CODES
    constants = (
        is_store,
        head_dim,
        state_dim,
        rows,
        columns,
        math.gcd(widest, codes.data_ptr(), *codes.stride()[:2]),
        WORDS[unchanged.narrow_bytes],
        unchanged.tiles_per_chunk,
    )
    key = (layout_of(*tensors), *sizes, *constants)
    options = STORE_OPTIONS if is_store else _RESTORE_OPTIONS

    def copy(source_rows: torch.Tensor, destination_rows: torch.Tensor, num_pairs: int) -> None:
        if not num_programs or not num_pairs:
            return
        device = source_rows.get_device()
        pairs = entries_per_program(num_pairs, on_gpu=device >= 0, captured=_PAIRS_IN_GRAPH)
        _launch(
            device,
            (key, source_rows.dtype, destination_rows.dtype, pairs),
            (num_programs, -(-num_pairs // pairs), 1),
            unchanged.chunks,
            *tensors,
            source_rows,
            destination_rows,
            num_pairs,
            *sizes,
            *constants,
            pairs,
            **options,
        )

    return copy
