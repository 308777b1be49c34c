"""The batched state copy as one Triton kernel: all pairs, layers and tensors in one launch."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from mamba_cache._torch import ZERO_SOURCE
from mamba_cache.states.kernels._launch import Launcher, end_of_real, entries_per_program
from mamba_cache.states.kernels.copy_torch import TILE_WORDS, WIDE_BYTES, CopyPlan, RowCopy

__all__ = ["WORDS", "copy_states", "copy_tile"]

# 128 threads with two 16-byte loads each, 4 KiB a program, measured on one NVIDIA H200 against a
# flat copy of as many bytes (24 layers, conv [10240, 4] bf16 and SSM [128, 64, 128]; time ratio):
#                          fp32 SSM, 1, 4, 16 slots    bf16 SSM, 1, 4, 16 slots
#   4 KiB, 4 warps         1.04  1.02  1.02            1.07  1.04  1.03
#   2 KiB, 2 warps         1.04  1.02  1.02            1.08  1.04  1.03
#   8 KiB, 8 warps         1.06  1.04  1.04            1.07  1.06  1.06
#   16 KiB, 4 warps        1.10  1.09                  1.12  1.09
#   persistent, 4 KiB      1.06  1.06  1.07            1.08  1.06  1.08
# The hardware starts programs in order, so small ones keep what is in flight close together in
# memory; docs/how-to/kernels.md has the rest of the search.
_NUM_WARPS = 4
_PAIRS_IN_GRAPH = 64

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""Types of words by their bytes."""

_TILE_WORDS = tl.constexpr(TILE_WORDS)
_WIDE_BYTES = tl.constexpr(WIDE_BYTES)
_ZERO_SOURCE = tl.constexpr(ZERO_SOURCE)


@triton.jit  # type: ignore[untyped-decorator]
def copy_tile(  # type: ignore[no-untyped-def]
    chunk, tile, source_row, destination_row, WORD: tl.constexpr, ALIGNMENT: tl.constexpr
) -> None:
    """Copy a tile of one chunk of ``CopyPlan.chunks``, or clear it."""
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


# Rows come at any address and in any number: one compiled kernel must do for all of them. The
# table of chunks is always aligned.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["source_rows", "destination_rows", "num_pairs", "num_wide"]
)
def _copy_kernel(  # type: ignore[no-untyped-def]
    chunks,
    source_rows,
    destination_rows,
    num_pairs,
    num_wide,
    NARROW_WORD: tl.constexpr,
    TILES_PER_CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    index = tl.program_id(0) // TILES_PER_CHUNK
    tile = tl.program_id(0) % TILES_PER_CHUNK
    chunk = chunks + index * 5
    first = tl.program_id(1) * PAIRS
    end = first + 1
    if PAIRS > 1:
        end = end_of_real(destination_rows, first, num_pairs, PAIRS)
    for pair in range(first, end):
        source_row = tl.load(source_rows + pair).to(tl.int64)
        destination_row = tl.load(destination_rows + pair).to(tl.int64)
        is_real = (destination_row >= 0) & ((source_row >= 0) | (source_row == _ZERO_SOURCE))
        if is_real & (index < num_wide):
            copy_tile(chunk, tile, source_row, destination_row, tl.int64, _WIDE_BYTES)
        elif is_real:
            alignment: tl.constexpr = NARROW_WORD.primitive_bitwidth // 8
            copy_tile(chunk, tile, source_row, destination_row, NARROW_WORD, alignment)


_launch = Launcher(_copy_kernel)


def copy_states(plan: CopyPlan) -> RowCopy:
    """Return a copy of whole rows, all layers of all tensors, as in ``StateCopier.copy``."""
    return partial(_copy, plan)


def _copy(
    plan: CopyPlan, source_rows: torch.Tensor, destination_rows: torch.Tensor, num_pairs: int
) -> None:
    if not plan.num_tiles or not num_pairs:
        return
    device = source_rows.get_device()
    pairs = entries_per_program(num_pairs, on_gpu=device >= 0, captured=_PAIRS_IN_GRAPH)
    constants = (plan.narrow_bytes, plan.tiles_per_chunk, pairs)
    _launch(
        device,
        (source_rows.dtype, destination_rows.dtype, constants),
        (plan.num_tiles, -(-num_pairs // pairs), 1),
        plan.chunks,
        source_rows,
        destination_rows,
        num_pairs,
        plan.num_wide,
        WORDS[plan.narrow_bytes],
        plan.tiles_per_chunk,
        pairs,
        num_warps=_NUM_WARPS,
    )
