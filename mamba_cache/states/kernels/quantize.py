"""Quantise-and-store, and dequantise-and-restore, as one Triton kernel each.

A launch moves all pairs, layers and tensors: tiles of SSM states change their kind on the way, all
else is copied as it is.
"""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_cache._indices import ZERO_SOURCE
from mamba_cache.states.kernels._padding import end_of_real, entries_per_program
from mamba_cache.states.kernels.copy import WORDS, copy_tile
from mamba_cache.states.kernels.plan import WIDE_BYTES
from mamba_cache.states.kernels.quantized_plan import LARGEST_CODE, LEAST_MAGNITUDE, QuantizedPlan

__all__ = ["dequantize_states", "quantize_states", "quantize_tile", "tile_sizes"]

# A store finds the largest magnitude of each column, and warps that share columns wait for each
# other. Share of a flat copy's GB/s (one NVIDIA H200, 16 slots of 24 layers, conv [10240, 4] bf16
# and SSM [128, 64, 128], to nearest):     store, fp32   store, bf16   restore, fp32, bf16
#   4096 elements, 2 warps                 0.91          0.66          0.92  0.93
#   8192 elements, 4 warps                 0.81          0.59          0.91  0.92
#   4096 elements, 4 warps                 0.67          0.47          0.92  0.93
#   2048 elements, 2 warps                 0.71          0.48          0.92  0.94
_NUM_WARPS = 2
_TILE_ELEMENTS = 4096
_MOST_RESTORED_COLUMNS = 128
_PAIRS_IN_GRAPH = 64

_WIDE_BYTES = tl.constexpr(WIDE_BYTES)
_ZERO_SOURCE = tl.constexpr(ZERO_SOURCE)
_LARGEST_CODE = tl.constexpr(LARGEST_CODE)
_LEAST_MAGNITUDE = tl.constexpr(LEAST_MAGNITUDE)
_INFINITY = tl.constexpr(float("inf"))
_NAN_BITS = tl.constexpr(0x7FC00000)
# Added and taken away again, it leaves a float32 below 2**22 rounded, halves to even.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _chances(values, places, seed):  # type: ignore[no-untyped-def]
    """Hashes values and places to numbers in [0, 1), as the twin does."""
    keys = places.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    keys = keys ^ values.to(tl.uint32, bitcast=True)
    keys = (keys ^ (keys >> 16)) * 0x7FEB352D
    keys = (keys ^ (keys >> 15)) * 0x846CA68B
    # 24 bits: a float32 holds them all.
    return ((keys ^ (keys >> 16)) >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)


@triton.jit  # type: ignore[untyped-decorator]
def quantize_tile(  # type: ignore[no-untyped-def]
    states,
    codes,
    scales,
    source_row,
    tile,
    seed,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    """Quantises some whole columns of one head's state; zeros if ``source_row`` is negative."""
    tiles_per_head: tl.constexpr = (STATE_DIM + COLUMNS - 1) // COLUMNS
    head = tile // tiles_per_head
    columns = tile % tiles_per_head * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)[:, None]
    places = (head * HEAD_DIM + rows) * STATE_DIM + columns[None, :]
    mask = (rows < HEAD_DIM) & (columns[None, :] < STATE_DIM)
    rows_read = tl.where(source_row >= 0, HEAD_DIM, 0)
    values = tl.load(states + places, mask=mask & (rows < rows_read), other=0).to(tl.float32)
    magnitudes = tl.abs(values)
    largest = tl.max(tl.where(magnitudes < _INFINITY, magnitudes, _INFINITY), axis=0)
    is_usable = (largest >= _LEAST_MAGNITUDE) & (largest < _INFINITY)
    code = tl.full([COLUMNS], _LARGEST_CODE, tl.float32)
    scale = tl.where(is_usable, tl.div_rn(largest, code), 0.0)
    # In bits: Triton compares the constants of a kernel before each launch, and NaN is not NaN.
    nan = tl.full([COLUMNS], _NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(largest < _INFINITY, scale, nan)
    tl.store(scales + head * STATE_DIM + columns, scale, mask=columns < STATE_DIM)
    values = tl.where(is_usable[None, :], values, 0.0)
    exact = values * tl.div_rn(code, tl.where(is_usable, largest, 1.0))[None, :]
    if STOCHASTIC:
        floor = tl.floor(exact)
        rounded = floor + (_chances(values, places, seed) < exact - floor).to(tl.float32)
    else:
        rounded = (exact + _ROUNDER) - _ROUNDER
    rounded = tl.minimum(tl.maximum(rounded, -_LARGEST_CODE), _LARGEST_CODE)
    tl.store(codes + places, rounded.to(tl.int8), mask=mask)


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
    """Restores a part of one head's state; clears it if ``source_row`` is negative."""
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
    values = tl.load(codes + places, mask=mask & (columns[None, :] < columns_read), other=0).to(
        tl.float32
    )
    values = values * scale[None, :]
    tl.store(states + places, values.to(states.dtype.element_ty), mask=mask)


# Rows come at any address and in any number, as in the plain copy.
# Long: a kernel takes its tensors apart, so it has many arguments.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["source_rows", "destination_rows", "num_pairs", "num_wide", "seed"]
)
def _quantized_copy_kernel(  # type: ignore[no-untyped-def]
    chunks,
    states,
    codes,
    scales,
    source_rows,
    destination_rows,
    num_pairs,
    num_wide,
    num_state_tiles,
    tiles_per_layer,
    states_layer_stride,
    states_row_stride,
    codes_layer_stride,
    codes_row_stride,
    scales_layer_stride,
    scales_row_stride,
    seed,
    IS_STORE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
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
            scale = scales + layer * scales_layer_stride + slot * scales_row_stride
            if IS_STORE:
                quantize_tile(
                    state, code, scale, source_row, tile, seed,
                    HEAD_DIM, STATE_DIM, ROWS, COLUMNS, STOCHASTIC,
                )  # fmt: skip
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


def quantize_states(
    plan: QuantizedPlan, live_rows: torch.Tensor, slots: torch.Tensor, num_pairs: int
) -> None:
    """Stores live states in slots, as ``StateQuantizer.copy`` describes.

    Args:
        plan: Where to read and write.
        live_rows: [at least num_pairs] int32 or int64, contiguous, on the plan's device.
        slots: The same.
        num_pairs: How many of them to store.
    """
    _copy(plan, live_rows, slots, num_pairs, is_store=True)


def dequantize_states(
    plan: QuantizedPlan, slots: torch.Tensor, live_rows: torch.Tensor, num_pairs: int
) -> None:
    """Restores live states from slots, as ``StateDequantizer.copy`` describes.

    Args:
        plan: Where to read and write.
        slots: [at least num_pairs] int32 or int64, contiguous, on the plan's device.
        live_rows: The same.
        num_pairs: How many of them to restore.
    """
    _copy(plan, slots, live_rows, num_pairs, is_store=False)


def tile_sizes(head_dim: int, state_dim: int, *, is_store: bool) -> dict[str, int]:
    """Returns the constants of a tile: a scale needs whole columns, a restore only long rows."""
    rows, columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(state_dim)
    if is_store:
        columns = min(columns, max(1, _TILE_ELEMENTS // rows))
    else:
        columns = min(columns, _MOST_RESTORED_COLUMNS)
        rows = min(rows, _TILE_ELEMENTS // columns)
    return {"HEAD_DIM": head_dim, "STATE_DIM": state_dim, "ROWS": rows, "COLUMNS": columns}


# Long: it names what the kernel takes, one a line.
def _copy(
    plan: QuantizedPlan,
    source_rows: torch.Tensor,
    destination_rows: torch.Tensor,
    num_pairs: int,
    *,
    is_store: bool,
) -> None:
    num_layers, _, heads, head_dim, state_dim = plan.states.shape
    sizes: dict[str, Any] = tile_sizes(head_dim, state_dim, is_store=is_store)
    tiles_per_head = triton.cdiv(head_dim, sizes["ROWS"]) * triton.cdiv(state_dim, sizes["COLUMNS"])
    tiles_per_layer = heads * tiles_per_head
    num_state_tiles = num_layers * tiles_per_layer
    unchanged, tensors = plan.unchanged, (plan.states, plan.codes, plan.scales)
    num_programs = num_state_tiles + unchanged.num_tiles
    if not num_programs or not num_pairs:
        return
    device = source_rows.get_device()
    pairs = entries_per_program(num_pairs, on_gpu=device >= 0, captured=_PAIRS_IN_GRAPH)
    # Triton launches on the current device; -1, for the CPU, changes nothing.
    with torch.cuda.device(device):
        _quantized_copy_kernel[num_programs, triton.cdiv(num_pairs, pairs)](
            unchanged.chunks,
            *tensors,
            source_rows,
            destination_rows,
            num_pairs,
            unchanged.num_wide,
            num_state_tiles,
            tiles_per_layer,
            *(stride for tensor in tensors for stride in tensor.stride()[:2]),
            plan.hash_seed or 0,
            IS_STORE=is_store,
            STOCHASTIC=plan.hash_seed is not None,
            NARROW_WORD=WORDS[unchanged.narrow_bytes],
            TILES_PER_CHUNK=unchanged.tiles_per_chunk,
            PAIRS=pairs,
            num_warps=_NUM_WARPS,
            # The twin rounds after every operation.
            enable_fp_fusion=False,
            **sizes,
        )
