"""The batched state copy as one Triton kernel: all pairs, layers and tensors in one launch."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mamba_cache._indices import ZERO_SOURCE
from mamba_cache.states.kernels.plan import TILE_WORDS, CopyPlan

__all__ = ["copy_states"]

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_NUM_WARPS = 8


# Rows come at any address and in any number: one compiled kernel must do for all of them.
@triton.jit(do_not_specialize=["source_rows", "destination_rows", "num_tiles"])  # type: ignore[untyped-decorator]
def _copy_kernel(  # type: ignore[no-untyped-def]
    segments,
    tiles,
    source_rows,
    destination_rows,
    num_tiles,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WORDS_PER_ACCESS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    ZERO_SOURCE: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    pair = program // num_tiles
    tile = tiles + (program % num_tiles) * 3
    source_row = tl.load(source_rows + pair).to(tl.int64)
    destination_row = tl.load(destination_rows + pair).to(tl.int64)
    if destination_row >= 0:
        segment = segments + tl.load(tile) * 4
        first_byte = tl.load(tile + 1)
        words = tl.arange(0, TILE_WORDS)
        mask = words < tl.multiple_of(tl.load(tile + 2), WORDS_PER_ACCESS)
        source = tl.load(segment) + source_row * tl.load(segment + 2) + first_byte
        destination = tl.load(segment + 1) + destination_row * tl.load(segment + 3) + first_byte
        # The tables hold plain integers: only hints tell the compiler that wide accesses fit. It
        # heeds them on pointers, not on integers that become pointers.
        source = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGNMENT)
        destination = tl.multiple_of(destination.to(tl.pointer_type(WORD)), ALIGNMENT)
        if source_row >= 0:
            tl.store(destination + words, tl.load(source + words, mask=mask), mask=mask)
        elif source_row == ZERO_SOURCE:
            tl.store(destination + words, tl.zeros([TILE_WORDS], dtype=WORD), mask=mask)


def copy_states(plan: CopyPlan, source_rows: torch.Tensor, destination_rows: torch.Tensor) -> None:
    """Copies whole rows, all layers of all tensors, as ``StateCopier.copy`` describes.

    Args:
        plan: Where to read and write.
        source_rows: [n] int32 or int64, contiguous, on the plan's device.
        destination_rows: [n] int32 or int64, contiguous, on the plan's device.
    """
    num_tiles = plan.tiles.shape[0]
    grid = (num_tiles * source_rows.shape[0],)
    if not grid[0]:
        return
    # Triton launches on the current device; -1, for the CPU, changes nothing.
    with torch.cuda.device(source_rows.get_device()):
        _copy_kernel[grid](
            plan.segments,
            plan.tiles,
            source_rows,
            destination_rows,
            num_tiles,
            WORD=_WORDS[plan.word_bytes],
            ALIGNMENT=plan.alignment,
            WORDS_PER_ACCESS=plan.alignment // plan.word_bytes,
            TILE_WORDS=TILE_WORDS,
            ZERO_SOURCE=ZERO_SOURCE,
            num_warps=_NUM_WARPS,
        )
