"""Quantise-and-store, and dequantise-and-restore, as one Triton kernel each.

A launch moves all pairs, layers and tensors: tiles of SSM states change their kind on the way, all
else is copied as it is.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mamba_cache._indices import ZERO_SOURCE
from mamba_cache.states.kernels._launch import Launcher, layout_of
from mamba_cache.states.kernels._padding import end_of_real, entries_per_program
from mamba_cache.states.kernels.copy import WORDS, copy_tile
from mamba_cache.states.kernels.plan import (
    CHANCE_BASE,
    CHANCE_BITS,
    INFINITY_BITS,
    LARGEST_CODE,
    LEAST_MAGNITUDE_BITS,
    MAGNITUDE_MASK,
    ONE_OVER_LARGEST_CODE,
    WIDE_BYTES,
    QuantizedPlan,
    RowCopy,
)

__all__ = [
    "STORED_CODES",
    "STORE_OPTIONS",
    "TileSizes",
    "dequantize_states",
    "quantize_states",
    "quantize_tile",
    "stored_tile_sizes",
]

# A store finds the largest magnitude of each column. One warp does so without waiting for others,
# and with few columns a thread it has few scales to work out. Share of a flat copy's GB/s (one
# NVIDIA H200, 16 slots of 24 layers, conv [10240, 4] bf16 and SSM [128, 64, 128]):
#                                        fp32, nearest, stochastic    bf16, nearest, stochastic
#   2048 elements, 1 warp,  8 codes      0.99  0.99                   0.85  0.82
#   2048 elements, 1 warp,  4 codes      0.99  0.99                   0.87  0.72
#   4096 elements, 1 warp,  8 codes      0.99  0.99                   0.79  0.70
#   1024 elements, 1 warp,  8 codes      0.59  0.61                   0.45  0.46
# Two and four warps that share columns wait for each other. A restore has 0.92 to 0.93 with
# any number of warps up to four.
_STORED_ELEMENTS = 2048
_RESTORED_ELEMENTS = 4096
_MOST_RESTORED_COLUMNS = 128
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
_CHANCE_BASE = tl.constexpr(CHANCE_BASE)
_CHANCE_BITS = tl.constexpr(CHANCE_BITS)
_NAN_BITS = tl.constexpr(0x7FC00000)
# Added to a code that is not rounded yet, it leaves a float32 whose last bits are the code, rounded
# to nearest, halves to even: no conversion, of which a GPU makes few at a time.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _mixed(keys):  # type: ignore[no-untyped-def]
    keys = (keys ^ (keys >> 16)) * 0x7FEB352D
    keys = (keys ^ (keys >> 15)) * 0x846CA68B
    return keys ^ (keys >> 16)


@triton.jit
def _chances(bits, rows, columns, seed):  # type: ignore[no-untyped-def]
    """Hash values, given in bits, and their places to ``CHANCE_BITS`` bits, as the twin does."""
    # Few columns are mixed well, and their hashes spread over all rows at one operation a value.
    keys = _mixed(columns.to(tl.uint32) * 0x85EBCA77 + seed.to(tl.uint32))
    keys = keys ^ (rows.to(tl.uint32) * 0x9E3779B1) ^ bits.to(tl.uint32, bitcast=True)
    return ((keys * 0x7FEB352D) >> (32 - _CHANCE_BITS)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_tile(  # type: ignore[no-untyped-def]
    states,
    codes,
    scales,
    tile,
    seed,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    """Quantise some whole columns of one head's state."""
    tiles_per_head: tl.constexpr = (STATE_DIM + COLUMNS - 1) // COLUMNS
    head = tile // tiles_per_head
    columns = tile % tiles_per_head * COLUMNS + tl.arange(0, COLUMNS)
    head_rows = tl.arange(0, ROWS)[:, None]
    rows = head * HEAD_DIM + head_rows
    places = rows * STATE_DIM + columns[None, :]
    mask = (head_rows < HEAD_DIM) & (columns[None, :] < STATE_DIM)
    values = tl.load(states + places, mask=mask, other=0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True)
    largest_bits = tl.maximum(tl.max(bits & _MAGNITUDE_MASK, axis=0), _LEAST_MAGNITUDE_BITS)
    largest = largest_bits.to(tl.float32, bitcast=True)
    # In bits: Triton compares the constants of a kernel before each launch, and NaN is not NaN.
    nan = tl.full([COLUMNS], _NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(largest_bits < _INFINITY_BITS, largest * _ONE_OVER_LARGEST_CODE, nan)
    tl.store(scales + head * STATE_DIM + columns, scale, mask=columns < STATE_DIM)
    exact = values * tl.div_rn(tl.full([COLUMNS], _LARGEST_CODE, tl.float32), largest)[None, :]
    if STOCHASTIC:
        with_fraction = (exact + _CHANCE_BASE).to(tl.int32, bitcast=True)
        code = (with_fraction + _chances(bits, rows, columns[None, :], seed)) >> _CHANCE_BITS
    else:
        code = (exact + _ROUNDER).to(tl.int32, bitcast=True)
    # All ones where the column is finite, else zeros: registers hold bits, but few conditions.
    kept = (largest_bits - _INFINITY_BITS) >> 31
    tl.store(codes + places, (code & kept[None, :]).to(tl.int8), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _clear_tile(  # type: ignore[no-untyped-def]
    codes,
    scales,
    tile,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write what columns of zeros become."""
    tiles_per_head: tl.constexpr = (STATE_DIM + COLUMNS - 1) // COLUMNS
    head = tile // tiles_per_head
    columns = tile % tiles_per_head * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)[:, None]
    places = (head * HEAD_DIM + rows) * STATE_DIM + columns[None, :]
    mask = (rows < HEAD_DIM) & (columns[None, :] < STATE_DIM)
    tl.store(codes + places, tl.zeros([ROWS, COLUMNS], tl.int8), mask=mask)
    least = tl.full([COLUMNS], _LEAST_MAGNITUDE_BITS, tl.int32).to(tl.float32, bitcast=True)
    scale = least * _ONE_OVER_LARGEST_CODE
    tl.store(scales + head * STATE_DIM + columns, scale, mask=columns < STATE_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_tile(  # type: ignore[no-untyped-def]
    states,
    codes,
    scales,
    source_row,
    tile,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Restore a part of one head's state; clear it if ``source_row`` is negative."""
    tiles_across: tl.constexpr = (STATE_DIM + COLUMNS - 1) // COLUMNS
    tiles_per_head: tl.constexpr = (HEAD_DIM + ROWS - 1) // ROWS * tiles_across
    head = tile // tiles_per_head
    tile = tile % tiles_per_head
    columns = tile % tiles_across * COLUMNS + tl.arange(0, COLUMNS)
    rows = (tile // tiles_across * ROWS + tl.arange(0, ROWS))[:, None]
    places = (head * HEAD_DIM + rows) * STATE_DIM + columns[None, :]
    mask = (rows < HEAD_DIM) & (columns[None, :] < STATE_DIM)
    # Without a source nothing is read, and nothing times nothing is the zero that is wanted.
    columns_read = tl.where(source_row >= 0, STATE_DIM, 0)
    scale = tl.load(scales + head * STATE_DIM + columns, mask=columns < columns_read, other=0.0)
    code = tl.load(codes + places, mask=mask & (columns[None, :] < columns_read), other=0)
    values = code.to(tl.float32) * scale[None, :]
    tl.store(states + places, values.to(states.dtype.element_ty), mask=mask)


# Rows come at any address and in any number, as in the plain copy.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "source_rows", "destination_rows", "num_pairs", "num_wide", "seed",
        "codes", "codes_layer_stride", "codes_row_stride",
    ]
)  # fmt: skip
def _quantized_copy_kernel(  # type: ignore[no-untyped-def]
    chunks,
    states,
    codes,
    scales,
    source_rows,
    destination_rows,
    num_pairs,
    num_wide,
    seed,
    num_state_tiles,
    tiles_per_layer,
    states_layer_stride,
    states_row_stride,
    codes_layer_stride,
    codes_row_stride,
    scales_layer_stride,
    scales_row_stride,
    IS_STORE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODES_ALIGNMENT: tl.constexpr,
    NARROW_WORD: tl.constexpr,
    TILES_PER_CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
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
            code = tl.multiple_of(code, CODES_ALIGNMENT)
            scale = scales + layer * scales_layer_stride + slot * scales_row_stride
            if not IS_STORE:
                _dequantize_tile(
                    state, code, scale, source_row, tile, HEAD_DIM, STATE_DIM, ROWS, COLUMNS
                )
            elif source_row == _ZERO_SOURCE:
                _clear_tile(code, scale, tile, HEAD_DIM, STATE_DIM, ROWS, COLUMNS)
            else:
                quantize_tile(
                    state, code, scale, tile, seed, HEAD_DIM, STATE_DIM, ROWS, COLUMNS, STOCHASTIC
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


class TileSizes(NamedTuple):
    """Sizes of a head's state and of the tiles that it is cut into, as kernels take them.

    Attributes:
        head_dim: Rows of a head's state.
        state_dim: Columns of it.
        rows: Rows of a tile, a power of two.
        columns: Columns of a tile, a power of two.
    """

    head_dim: int
    state_dim: int
    rows: int
    columns: int


def quantize_states(plan: QuantizedPlan) -> RowCopy:
    """Return what stores live states in slots, as ``StateQuantizer.copy`` describes.

    Args:
        plan: Where to read and write.
    """
    head_dim, state_dim = plan.states.shape[3:]
    sizes = stored_tile_sizes(head_dim, state_dim)
    return partial(_copy, _prepare(plan, sizes, STORED_CODES, is_store=True))


def dequantize_states(plan: QuantizedPlan) -> RowCopy:
    """Return what restores live states from slots, as ``StateDequantizer.copy`` describes.

    Args:
        plan: Where to read and write.
    """
    head_dim, state_dim = plan.states.shape[3:]
    rows, columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(state_dim)
    # A restore needs no whole columns, only long rows.
    columns = min(columns, _MOST_RESTORED_COLUMNS)
    sizes = TileSizes(head_dim, state_dim, min(rows, _RESTORED_ELEMENTS // columns), columns)
    return partial(_copy, _prepare(plan, sizes, _RESTORED_CODES, is_store=False))


def stored_tile_sizes(head_dim: int, state_dim: int) -> TileSizes:
    """Return the sizes of tiles that are quantised: a scale needs whole columns."""
    rows, columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(state_dim)
    return TileSizes(head_dim, state_dim, rows, min(columns, max(1, _STORED_ELEMENTS // rows)))


class _Prepared(NamedTuple):
    """What is the same in every launch of a plan.

    Attributes:
        key: What the kernel is specialised for beside the rows.
        num_programs: For each group of pairs.
        tensors: Arguments of the kernel before the rows.
        sizes: Arguments after the number of pairs.
        constants: Constants, all but the last.
        options: How to compile the kernel.
    """

    key: Hashable
    num_programs: int
    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    constants: tuple[object, ...]
    options: Mapping[str, Any]


def _prepare(plan: QuantizedPlan, tile: TileSizes, widest: int, *, is_store: bool) -> _Prepared:
    num_layers, _, heads, head_dim, state_dim = plan.states.shape
    tiles_per_head = triton.cdiv(head_dim, tile.rows) * triton.cdiv(state_dim, tile.columns)
    num_state_tiles = num_layers * heads * tiles_per_head
    unchanged, tensors = plan.unchanged, (plan.states, plan.codes, plan.scales)
    strides = tuple(stride for tensor in tensors for stride in tensor.stride()[:2])
    constants = (
        is_store,
        plan.hash_seed is not None,
        *tile,
        math.gcd(widest, plan.codes.data_ptr(), *plan.codes.stride()[:2]),
        WORDS[unchanged.narrow_bytes],
        unchanged.tiles_per_chunk,
    )
    sizes = (unchanged.num_wide, plan.hash_seed or 0, num_state_tiles, heads * tiles_per_head)
    return _Prepared(
        key=(layout_of(*tensors), *sizes, *strides, *constants),
        num_programs=num_state_tiles + unchanged.num_tiles,
        tensors=(unchanged.chunks, *tensors),
        sizes=(*sizes, *strides),
        constants=constants,
        options=STORE_OPTIONS if is_store else _RESTORE_OPTIONS,
    )


def _copy(
    prepared: _Prepared,
    source_rows: torch.Tensor,
    destination_rows: torch.Tensor,
    num_pairs: int,
) -> None:
    if not prepared.num_programs or not num_pairs:
        return
    device = source_rows.get_device()
    pairs = entries_per_program(num_pairs, on_gpu=device >= 0, captured=_PAIRS_IN_GRAPH)
    _launch(
        device,
        (prepared.key, source_rows.dtype, destination_rows.dtype, pairs),
        (prepared.num_programs, -(-num_pairs // pairs), 1),
        *prepared.tensors,
        source_rows,
        destination_rows,
        num_pairs,
        *prepared.sizes,
        *prepared.constants,
        pairs,
        **prepared.options,
    )
