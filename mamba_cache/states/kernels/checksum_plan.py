"""Where checksums of many tensors read: worked out once, used at every measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._torch import to_device

__all__ = [
    "CHUNK_BYTES",
    "LANES",
    "MULTIPLIER",
    "ROUND_BYTES",
    "SEED",
    "UNROLLED_ROUNDS",
    "ChecksumPlan",
    "EntryPlan",
    "entry_chunks",
    "num_entry_chunks",
    "plan_checksums",
    "plan_entries",
]

LANES = 512
"""Words of 8 bytes that one round reads. Each lane mixes its words in order into 64 bits."""

UNROLLED_ROUNDS = 4
"""Rounds come in groups of so many, so that their loads are in flight together."""

ROUND_BYTES = 8 * LANES
CHUNK_BYTES = 16 * ROUND_BYTES

SEED = 0x1E3779B97F4A7C15
"""Lane i begins with (i + 1) times this."""

MULTIPLIER = 0x2545F4914F6CDD1D
"""Odd, so that multiplying by it modulo 2**64 loses nothing."""

_WIDE_BYTES = 16


@dataclass(frozen=True, slots=True)
class ChecksumPlan:
    """Tensors as bytes, cut into chunks, and the table that the kernel finds them by.

    A chunk is ``CHUNK_BYTES`` of one tensor counted from its start, or what is left at its end. The
    first chunk of every tensor comes first in the table (they are the *heads*), the others follow
    tensor by tensor. The table holds addresses, so the plan keeps the tensors alive.
    """

    tensors: tuple[torch.Tensor, ...]  # [bytes] uint8 each, none empty, all on one device
    chunks: torch.Tensor
    rest_starts: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        """First chunks, one for each tensor."""
        return len(self.tensors)

    @property
    def num_chunks(self) -> int:
        """Chunks of all tensors."""
        return self.chunks.shape[0]

    def num_programs(self, stride: int, phase: int) -> int:
        """Count the chunks of a sample: all heads, and each ``stride``-th of the others."""
        return self.num_heads + len(range(self.num_heads + phase, self.num_chunks, stride))


@dataclass(frozen=True, slots=True)
class EntryPlan:
    """Where the chunks of an entry lie: ``CHUNK_BYTES`` of one layer of one tensor each."""

    tensors: tuple[torch.Tensor, ...]
    sums_start: int  # where the checksums begin in a row
    chunks: torch.Tensor


def plan_entries(tensors: Sequence[torch.Tensor], sums_start: int) -> EntryPlan:
    """Plan checksums of entries: one row of ``tensors``, each [num_layers, places, *inner]."""
    parts = tuple(tensor.unsqueeze(-1).view(torch.uint8).flatten(2) for tensor in tensors)
    chunks = to_device(torch.from_numpy(entry_chunks(tensors)), tensors[0].device)
    return EntryPlan(parts, sums_start, chunks)


def entry_chunks(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Return ``EntryPlan.chunks`` as an array."""
    tables = [np.empty((0, 4), dtype=np.int64)]
    for tensor in tensors:
        size = tensor.element_size()
        num_bytes = math.prod(tensor.shape[2:]) * size
        starts = np.arange(0, num_bytes, CHUNK_BYTES, dtype=np.int64)
        for layer in range(tensor.shape[0]):
            table = np.empty((len(starts), 4), dtype=np.int64)
            table[:, 0] = tensor.data_ptr() + layer * tensor.stride(0) * size + starts
            table[:, 1] = tensor.stride(1) * size
            table[:, 2] = np.minimum(num_bytes - starts, CHUNK_BYTES)
            table[:, 3] = (table[:, :3] % _WIDE_BYTES == 0).all(axis=1)
            tables.append(table)
    return np.concatenate(tables)


def num_entry_chunks(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many chunks an entry of such tensors has."""
    return sum(
        tensor.shape[0] * -(-math.prod(tensor.shape[2:]) * tensor.element_size() // CHUNK_BYTES)
        for tensor in tensors
    )


def plan_checksums(tensors: Sequence[torch.Tensor]) -> ChecksumPlan:
    """Plan checksums of ``tensors``, [bytes] uint8 each, none empty, all on one device."""
    rows = np.empty((len(tensors), 2), dtype=np.int64)
    for index, tensor in enumerate(tensors):
        rows[index] = tensor.data_ptr(), tensor.numel()
    heads, rests, rest_starts = _chunks(rows[:, 0], np.minimum(rows[:, 1], CHUNK_BYTES)), [], []
    end = len(rows)
    for address, num_bytes in rows.tolist():
        starts = np.arange(CHUNK_BYTES, num_bytes, CHUNK_BYTES, dtype=np.int64)
        rests.append(_chunks(address + starts, np.minimum(num_bytes - starts, CHUNK_BYTES)))
        rest_starts.append(end)
        end += len(starts)
    chunks = torch.from_numpy(np.concatenate([heads, *rests]))
    return ChecksumPlan(tuple(tensors), to_device(chunks, tensors[0].device), tuple(rest_starts))


def _chunks(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    is_wide = (addresses % _WIDE_BYTES == 0) & (sizes % _WIDE_BYTES == 0)
    return np.stack([addresses, sizes, is_wide.astype(np.int64)], axis=1)
