"""The copy of a list of regions as one Triton kernel."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from mamba_cache.integrations.vllm.copy_buffers import MambaCopyBuffers
from mamba_cache.integrations.vllm.kernels.copy_states import WORDS, copy_bytes, shift_rows
from mamba_cache.integrations.vllm.state_table import TILE_BYTES

__all__ = ["copy_regions"]

_PROGRAMS_PER_REGION = 64
_NUM_WARPS = 4
_PROGRAMS_OF_INTERPRETER = 2  # which runs them one after the other
_TILE_BYTES = tl.constexpr(TILE_BYTES)


@triton.jit  # type: ignore[untyped-decorator]
def _regions_kernel(  # type: ignore[no-untyped-def]
    sources, destinations, sizes, num_rows, row_strides, piece_bytes, WORD: tl.constexpr
) -> None:
    entry, part, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    source, destination = tl.load(sources + entry), tl.load(destinations + entry)
    size, piece = tl.load(sizes + entry), tl.load(piece_bytes + entry)
    if piece > 0:
        rows, row_stride = tl.load(num_rows + entry), tl.load(row_strides + entry)
        shift_rows(source, destination, size, rows, row_stride, piece, part, num_parts, WORD)
    else:
        for tile in range(part, tl.cdiv(size, _TILE_BYTES), num_parts):
            copy_bytes(source, destination, size, tile, WORD)


def copy_regions(buffers: MambaCopyBuffers) -> None:
    """Copy the first ``offset`` regions of ``buffers`` in one launch."""
    count = buffers.offset
    values = np.concatenate([buffer.np[:count] for buffer in buffers.columns])
    word_bytes = math.gcd(8, int(np.gcd.reduce(values)))
    columns = [buffer.copy_to_gpu(count) for buffer in buffers.columns]
    programs = _PROGRAMS_PER_REGION if columns[0].is_cuda else _PROGRAMS_OF_INTERPRETER
    with torch.cuda.device(columns[0].get_device()):
        _regions_kernel[count, programs](*columns, WORD=WORDS[word_bytes], num_warps=_NUM_WARPS)
