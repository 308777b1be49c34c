"""Where copies of states read and write, and the kernel of ``copy`` in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from mamba_cache._torch import ZERO_SOURCE, to_device
from mamba_cache.states.kernels.quantize_torch import dequantize_states, quantize_states

__all__ = [
    "TILE_WORDS",
    "WIDE_BYTES",
    "CopyPlan",
    "Quantized",
    "RowCopy",
    "copy_states",
    "plan_copy",
]

RowCopy: TypeAlias = Callable[[Any, Any, int], None]
"""Copies n rows, given the sources, the destinations, and n.

Rows are [at least n] int32 or int64, contiguous, on the device of what is copied. The kernels'
twins also take lists of n ints, none of which is to be skipped.
"""

Quantized: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]
"""States, their codes and scales, and whether the states are stored so, or restored from them."""

TILE_WORDS = 512
"""Words that one program of the kernel moves at a time. A power of two."""

WIDE_BYTES = 16
"""The widest access that a GPU has."""

_WIDEST_WORD_BYTES = 8
_MOST_TILES_PER_CHUNK = 16


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The tensors of a copy as bytes, and the table that the kernel finds them by.

    A *segment* is one layer of one pair of tensors. One row of it is cut into *chunks*, and the
    kernel cuts these into tiles of ``TILE_WORDS`` words. A segment is *wide* if all its addresses,
    distances and sizes are multiples of ``WIDE_BYTES``. The plan keeps the tensors alive.
    """

    sources: tuple[torch.Tensor, ...]  # for each pair, [num_layers, source rows, ..., bytes] uint8
    destinations: tuple[torch.Tensor, ...]
    chunks: torch.Tensor
    num_wide: int  # wide chunks
    narrow_bytes: int  # bytes of the other chunks' words: 1, 2, 4 or 8
    tiles_per_chunk: int  # tiles of the largest chunk: 1 to 16, a power of two
    num_tiles: int  # tiles of one row, some of them empty where a chunk is smaller than the largest


_Segment: TypeAlias = tuple[int, int, int, int, int]
"""Addresses of the source and of the destination, their strides, and the bytes of one row."""


def plan_copy(
    tensors: Sequence[tuple[torch.Tensor, torch.Tensor]], *, device: torch.device
) -> CopyPlan:
    """Plan copies from rows of the first of each pair of tensors to rows of the second."""
    pairs = [
        (_as_bytes(source), _as_bytes(destination))
        for source, destination in tensors
        if destination.numel()
    ]
    segments = [segment for pair in pairs for segment in _segments(*pair)]
    wide = [segment for segment in segments if math.gcd(WIDE_BYTES, *segment) == WIDE_BYTES]
    narrow = [segment for segment in segments if math.gcd(WIDE_BYTES, *segment) < WIDE_BYTES]
    narrow_bytes = math.gcd(_WIDEST_WORD_BYTES, *(value for segment in narrow for value in segment))
    most_words = max(
        [size // _WIDEST_WORD_BYTES for *_, size in wide]
        + [size // narrow_bytes for *_, size in narrow],
        default=0,
    )
    tiles_per_chunk = min(_MOST_TILES_PER_CHUNK, _power_of_2(-(-most_words // TILE_WORDS)))
    wide_chunks = _chunks(wide, _WIDEST_WORD_BYTES, tiles_per_chunk)
    table = np.concatenate([wide_chunks, _chunks(narrow, narrow_bytes, tiles_per_chunk)])
    return CopyPlan(
        sources=tuple(source for source, _ in pairs),
        destinations=tuple(destination for _, destination in pairs),
        chunks=to_device(torch.from_numpy(table), device),
        num_wide=len(wide_chunks),
        narrow_bytes=narrow_bytes,
        tiles_per_chunk=tiles_per_chunk,
        num_tiles=len(table) * tiles_per_chunk,
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(-1).view(torch.uint8)


def _segments(source: torch.Tensor, destination: torch.Tensor) -> Iterator[_Segment]:
    for layer in range(source.shape[0]):
        yield (
            source.data_ptr() + layer * source.stride(0),
            destination.data_ptr() + layer * destination.stride(0),
            source.stride(1),
            destination.stride(1),
            math.prod(source.shape[2:]),
        )


def _power_of_2(count: int) -> int:
    """Return the least power of two that is not below ``count``, nor below 1."""
    return 1 << max(count - 1, 0).bit_length()


def _chunks(segments: Sequence[_Segment], word_bytes: int, tiles_per_chunk: int) -> np.ndarray:
    """Cut a row of each segment into chunks: ``CopyPlan.chunks``."""
    chunk_words = tiles_per_chunk * TILE_WORDS
    tables = [np.empty((0, 5), dtype=np.int64)]
    for source, destination, source_stride, destination_stride, size in segments:
        first_bytes = np.arange(0, size, chunk_words * word_bytes, dtype=np.int64)
        table = np.empty((len(first_bytes), 5), dtype=np.int64)
        table[:, 0] = source + first_bytes
        table[:, 1] = destination + first_bytes
        table[:, 2:4] = source_stride, destination_stride
        table[:, 4] = np.minimum((size - first_bytes) // word_bytes, chunk_words)
        tables.append(table)
    return np.concatenate(tables)


def copy_states(plan: CopyPlan, quantized: Quantized | None = None) -> RowCopy:
    """Return what copies whole rows, all layers of all tensors, as ``StateCopier.copy`` describes.

    It waits for the device if the rows are on one, so it serves the CPU and as a reference.
    """
    tensors: list[tuple[Any, Any]] = list(zip(plan.sources, plan.destinations, strict=True))
    if plan.chunks.device.type == "cpu":  # the same bytes through numpy, whose calls cost a fourth
        tensors = [(source.numpy(), destination.numpy()) for source, destination in tensors]

    def copy(source_rows: Any, destination_rows: Any, num_pairs: int) -> None:
        for source_row, destination_row in _real_pairs(source_rows, destination_rows, num_pairs):
            for source, destination in tensors:
                destination[:, destination_row] = source[:, source_row] if source_row >= 0 else 0
            if quantized is not None:
                _copy_quantized(quantized, source_row, destination_row)

    return copy


def _copy_quantized(quantized: Quantized, source: int, target: int) -> None:
    states, codes, scales, is_store = quantized
    if is_store:
        given = torch.zeros_like(codes[:, target]) if source < 0 else states[:, source]
        codes[:, target], scales[:, target] = quantize_states(given)
    elif source < 0:
        states[:, target] = 0
    else:
        states[:, target] = dequantize_states(codes[:, source], scales[:, source], states.dtype)


def _real_pairs(source_rows: Any, destination_rows: Any, num_pairs: int) -> list[tuple[int, int]]:
    """Return the pairs of rows that are not to be skipped; it waits for rows on a device."""
    if isinstance(source_rows, list):  # and so are the others
        return list(zip(source_rows, destination_rows, strict=True))
    both = source_rows[:num_pairs].tolist(), destination_rows[:num_pairs].tolist()
    return [
        (source, destination)
        for source, destination in zip(*both, strict=True)
        if destination >= 0 and (source >= 0 or source == ZERO_SOURCE)
    ]
