"""Where a batched state copy reads and writes: worked out once, used at every copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["TILE_WORDS", "CopyPlan", "plan_copy"]

TILE_WORDS = 4096
"""Words that one program of the kernel moves: 32 KiB at the widest word. A power of two."""

_WIDEST_ACCESS = 16
_WIDEST_WORD = 8


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The tensors of a copy as bytes, and the tables that the kernel finds them by.

    A *segment* is one layer of one pair of tensors; a *tile* is at most ``TILE_WORDS`` words of one
    row of a segment. The tables hold addresses, so the plan keeps the tensors alive.

    Attributes:
        sources: For each pair, [num_layers, source rows, ..., bytes] uint8.
        destinations: For each pair, [num_layers, destination rows, ..., bytes] uint8.
        segments: [num_segments, 4] int64 on the tensors' device: source address, destination
            address, and the distances between rows of the source and of the destination, in bytes.
        tiles: [num_tiles, 3] int64 on the same device: segment, first byte in the row, words.
        alignment: Bytes that every address, distance and row size is a multiple of: 1 to 16.
    """

    sources: tuple[torch.Tensor, ...]
    destinations: tuple[torch.Tensor, ...]
    segments: torch.Tensor
    tiles: torch.Tensor
    alignment: int

    @property
    def word_bytes(self) -> int:
        """Bytes of the integers that the kernel moves; it reaches 16 bytes by moving two."""
        return min(self.alignment, _WIDEST_WORD)


def plan_copy(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> CopyPlan:
    """Plans copies from rows of ``sources`` to rows of ``destinations``, which are paired in order.

    Args:
        sources: Each [num_layers, source rows, *inner], any dtype, inner axes contiguous.
        destinations: Each [num_layers, destination rows, *inner] of its source's dtype.
    """
    pairs = [
        (_as_bytes(source), _as_bytes(destination))
        for source, destination in zip(sources, destinations, strict=True)
        if destination.numel()
    ]
    segments = [segment for pair in pairs for segment in _segments(*pair)]
    sizes = [math.prod(source.shape[2:]) for source, _ in pairs for _ in range(source.shape[0])]
    alignment = math.gcd(_WIDEST_ACCESS, *sizes, *(value for row in segments for value in row))
    device = sources[0].device
    return CopyPlan(
        sources=tuple(source for source, _ in pairs),
        destinations=tuple(destination for _, destination in pairs),
        segments=torch.tensor(segments, dtype=torch.int64).reshape(-1, 4).to(device),
        tiles=torch.from_numpy(_tiles(sizes, min(alignment, _WIDEST_WORD))).to(device),
        alignment=alignment,
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(-1).view(torch.uint8)


def _segments(
    source: torch.Tensor, destination: torch.Tensor
) -> Iterator[tuple[int, int, int, int]]:
    for layer in range(source.shape[0]):
        yield (
            source.data_ptr() + layer * source.stride(0),
            destination.data_ptr() + layer * destination.stride(0),
            source.stride(1),
            destination.stride(1),
        )


def _tiles(sizes: Sequence[int], word_bytes: int) -> np.ndarray:
    """Cuts a row of each segment, ``sizes`` bytes long, into tiles."""
    tables = [np.empty((0, 3), dtype=np.int64)]
    for segment, size in enumerate(sizes):
        first_bytes = np.arange(0, size, TILE_WORDS * word_bytes, dtype=np.int64)
        words = np.minimum((size - first_bytes) // word_bytes, TILE_WORDS)
        tables.append(np.stack([np.full_like(words, segment), first_bytes, words], axis=1))
    return np.concatenate(tables)
