"""Triton functions that quantise a tile of a state to int8, and that restore one."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mamba_cache.states.kernels.twins import (
    INFINITY_BITS,
    LARGEST_CODE,
    LEAST_MAGNITUDE_BITS,
    MAGNITUDE_MASK,
    ONE_OVER_LARGEST_CODE,
)

__all__ = [
    "RESTORED_CODES",
    "RESTORE_OPTIONS",
    "STORED_CODES",
    "STORE_OPTIONS",
    "dequantize_tile",
    "quantize_tile",
    "restored_tile_sizes",
    "stored_tile_sizes",
]

# A store finds the largest magnitude of each column. A single warp need not wait for other warps,
# and with few columns a thread computes few scales. Share of a flat copy's GB/s (one NVIDIA H200,
# 16 slots of 24 layers, conv [10240, 4] bf16 and SSM [128, 64, 128]):
#                                        fp32    bf16
#   2048 elements, 1 warp,  8 codes      0.99    0.85
#   2048 elements, 1 warp,  4 codes      0.99    0.87
#   4096 elements, 1 warp,  8 codes      0.99    0.79
#   1024 elements, 1 warp,  8 codes      0.59    0.45
# Two or four warps that share columns wait for each other. A restore has a share of 0.92 to 0.93
# with any number of warps up to four.
_STORED_ELEMENTS = 2048
_RESTORED_ELEMENTS = 4096
_MAX_RESTORED_COLUMNS = 128

STORED_CODES = 8
"""Number of codes that a thread writes at a time, if their alignment allows it."""

RESTORED_CODES = 16
"""Number of codes that a thread reads at a time."""

# No fusion: the twin rounds after every operation.
STORE_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
"""Compile options of a kernel that quantises."""

RESTORE_OPTIONS: dict[str, Any] = {"num_warps": 2, "enable_fp_fusion": False}
"""Compile options of a kernel that restores."""

_LARGEST_CODE = tl.constexpr(LARGEST_CODE)
_ONE_OVER_LARGEST_CODE = tl.constexpr(ONE_OVER_LARGEST_CODE)
_MAGNITUDE_MASK = tl.constexpr(MAGNITUDE_MASK)
_INFINITY_BITS = tl.constexpr(INFINITY_BITS)
_MIN_MAGNITUDE_BITS = tl.constexpr(LEAST_MAGNITUDE_BITS)
_NAN_BITS = tl.constexpr(0x7FC00000)
# Adding it to an unrounded code gives a float32 whose last bits are the code, rounded to nearest,
# halves to even. So no conversion is needed, of which a GPU makes few at a time.
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
    largest_bits = tl.maximum(tl.max(bits & _MAGNITUDE_MASK, axis=0), _MIN_MAGNITUDE_BITS)
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
def dequantize_tile(  # type: ignore[no-untyped-def]
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


def stored_tile_sizes(head_dim: int, state_dim: int) -> tuple[int, int]:
    """Return rows and columns of a tile to quantise: a scale needs whole columns."""
    rows, columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(state_dim)
    return rows, min(columns, max(1, _STORED_ELEMENTS // rows))


def restored_tile_sizes(head_dim: int, state_dim: int) -> tuple[int, int]:
    """Return rows and columns of a tile to restore: long rows, but no whole columns."""
    rows, columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(state_dim)
    columns = min(columns, _MAX_RESTORED_COLUMNS)
    return min(rows, _RESTORED_ELEMENTS // columns), columns
