"""The batched state copy as one Triton kernel: all pairs, layers and tensors in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_cache._indices import ZERO_SOURCE
from mamba_cache.states.kernels.plan import TILE_WORDS, CopyPlan

__all__ = ["copy_states"]

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_NUM_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(  # noqa: PLR0917
    segments: Any,
    tiles: Any,
    source_rows: Any,
    destination_rows: Any,
    num_tiles: Any,
    WORD: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    TILE_WORDS: tl.constexpr,  # noqa: N803
    ZERO_SOURCE: tl.constexpr,  # noqa: N803
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
        mask = words < tl.load(tile + 2)
        source = tl.load(segment) + source_row * tl.load(segment + 2) + first_byte
        destination = tl.load(segment + 1) + destination_row * tl.load(segment + 3) + first_byte
        # The tables hold plain integers: only this hint tells the compiler that wide accesses fit.
        reads = tl.multiple_of(source, ALIGNMENT).to(tl.pointer_type(WORD)) + words
        writes = tl.multiple_of(destination, ALIGNMENT).to(tl.pointer_type(WORD)) + words
        if source_row >= 0:
            tl.store(writes, tl.load(reads, mask=mask), mask=mask)
        elif source_row == ZERO_SOURCE:
            tl.store(writes, tl.zeros([TILE_WORDS], dtype=WORD), mask=mask)


def copy_states(plan: CopyPlan, source_rows: torch.Tensor, destination_rows: torch.Tensor) -> None:
    """Copies whole rows, all layers of all tensors, as ``StateCopier.copy`` describes.

    Args:
        plan: Where to read and write.
        source_rows: [n] int32 or int64, contiguous, on the plan's device.
        destination_rows: [n] int32 or int64, contiguous, on the plan's device.
    """
    num_tiles = plan.tiles.shape[0]
    grid = (num_tiles * source_rows.shape[0],)
    if grid[0]:
        _copy_kernel[grid](
            plan.segments,
            plan.tiles,
            source_rows,
            destination_rows,
            num_tiles,
            WORD=_WORDS[plan.word_bytes],
            ALIGNMENT=plan.alignment,
            TILE_WORDS=TILE_WORDS,
            ZERO_SOURCE=ZERO_SOURCE,
            num_warps=_NUM_WARPS,
        )
