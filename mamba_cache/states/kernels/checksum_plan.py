"""Where checksums of many tensors read: worked out once, used at every measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = [
    "CHUNK_BYTES",
    "LANES",
    "MULTIPLIER",
    "ROUND_BYTES",
    "SEED",
    "UNROLLED_ROUNDS",
    "ChecksumPlan",
    "plan_checksums",
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

    Attributes:
        tensors: [bytes] uint8 each, none empty, all on one device.
        chunks: [num_chunks, 3] int64 on that device: address, bytes, and whether both are multiples
            of 16.
        rest_starts: For each tensor the number of its second chunk, whether it has one or not.
    """

    tensors: tuple[torch.Tensor, ...]
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
    device = tensors[0].device
    table = torch.from_numpy(np.concatenate([heads, *rests]))
    if device.type == "cuda":
        # From pageable memory the transfer would wait for the work queued before it.
        table = table.pin_memory()
    return ChecksumPlan(tuple(tensors), table.to(device, non_blocking=True), tuple(rest_starts))


def _chunks(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    is_wide = (addresses % _WIDE_BYTES == 0) & (sizes % _WIDE_BYTES == 0)
    return np.stack([addresses, sizes, is_wide.astype(np.int64)], axis=1)
