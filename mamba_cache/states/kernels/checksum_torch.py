"""Checksums of tensors and entries: their plan, and the kernel of ``checksum`` in numpy."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import defaultdict
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
    "checksum",
    "fetch_checksums",
    "plan_checksums",
]

LANES = 512
"""Number of 8-byte words that one round reads. Each lane mixes its words in order into 64 bits."""

UNROLLED_ROUNDS = 4
"""Number of rounds in a group, whose loads are in flight together."""

ROUND_BYTES = 8 * LANES
CHUNK_BYTES = 16 * ROUND_BYTES

SEED = 0x1E3779B97F4A7C15
"""Lane i begins with (i + 1) * SEED."""

MULTIPLIER = 0x2545F4914F6CDD1D
"""Odd, so that multiplying by it modulo 2**64 loses no information."""

_WIDE_BYTES = 16
_CHUNKS_AT_ONCE = 16
"""Number of chunks whose operands fit into a core's cache."""


@dataclass(frozen=True, slots=True)
class ChecksumPlan:
    """The chunks of entries; an entry is the same place of each part.

    A chunk is ``CHUNK_BYTES`` of one part, or the rest at the part's end. The table has addresses,
    so the plan keeps the parts alive.
    """

    parts: tuple[torch.Tensor, ...]  # [places, bytes] uint8 each, all on one device
    chunks: torch.Tensor  # [chunks, 4] int64: address, stride of places, bytes, is wide
    bounds: tuple[int, ...]  # number of each part's first chunk, then the number of all chunks
    sums_start: int  # offset of the checksums in an entry's row

    @property
    def num_chunks(self) -> int:
        """Number of chunks of an entry."""
        return self.chunks.shape[0]


def plan_checksums(parts: Sequence[torch.Tensor], *, sums_start: int = 0) -> ChecksumPlan:
    """Return the plan of checksums of parts, with their chunks part by part."""
    device = parts[0].device if parts else torch.device("cpu")
    tables = [np.empty((0, 4), dtype=np.int64)]
    for part in parts:
        starts = np.arange(0, part.shape[1], CHUNK_BYTES, dtype=np.int64)
        table = np.empty((len(starts), 4), dtype=np.int64)
        table[:, 0] = part.data_ptr() + starts
        table[:, 1] = part.stride(0) if len(part) > 1 else 0
        table[:, 2] = np.minimum(part.shape[1] - starts, CHUNK_BYTES)
        table[:, 3] = (table[:, :3] % _WIDE_BYTES == 0).all(axis=1)
        tables.append(table)
    bounds = tuple(np.cumsum([len(table) for table in tables]).tolist())
    chunks = to_device(torch.from_numpy(np.concatenate(tables)), device)
    return ChecksumPlan(tuple(parts), chunks, bounds, sums_start)


def checksum(  # noqa: PLR0917 - the kernel's signature
    plan: ChecksumPlan,
    entries: torch.Tensor,
    changed: torch.Tensor | None,
    which: slice,
    num_heads: int,
    others: range,
    programs: int,
) -> None:
    """Write checksums of entries to their rows, or with ``changed`` compare with the stored ones.

    Each of ``entries[which]`` is a place in the parts and the address of a row on the host. The
    chunks are the first ``num_heads`` and ``others``. ``programs`` is not used here. Parts on a GPU
    are copied to the host.
    """
    numbers = [*range(num_heads), *others]
    for entry in range(which.start, which.stop):
        place, row = entries[entry].tolist()
        found = torch.from_numpy(_sums_of(plan, place, numbers))
        sums = _memory(row + plan.sums_start, 8 * plan.num_chunks).view(torch.int64)
        if changed is None:
            sums[numbers] = found
        else:
            changed[entry] |= (sums[numbers] != found).any().item()


def _sums_of(plan: ChecksumPlan, place: int, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the checksums of some chunks of one entry."""
    # By number of rounds: index in the result, and bytes, of each chunk.
    by_rounds: dict[int, list[tuple[int, npt.NDArray[np.uint8]]]] = defaultdict(list)
    for index, number in enumerate(numbers):
        part = bisect_right(plan.bounds, number) - 1
        start = (number - plan.bounds[part]) * CHUNK_BYTES
        chunk = plan.parts[part][place, start : start + CHUNK_BYTES].cpu().numpy()
        num_rounds = -(-len(chunk) // (UNROLLED_ROUNDS * ROUND_BYTES)) * UNROLLED_ROUNDS
        by_rounds[num_rounds].append((index, chunk))
    sums = np.empty(len(numbers), np.int64)
    for num_rounds, chunks in by_rounds.items():
        for begin in range(0, len(chunks), _CHUNKS_AT_ONCE):
            some = chunks[begin : begin + _CHUNKS_AT_ONCE]
            filled = np.zeros((len(some), num_rounds * ROUND_BYTES), np.uint8)
            for row, (_, chunk) in zip(filled, some, strict=True):
                row[: len(chunk)] = chunk
            words = filled.view(np.uint64).reshape(len(some), num_rounds, LANES)
            sums[[index for index, _ in some]] = _mixed(words).view(np.int64)
    return sums


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the checksums of chunks [chunks, rounds, LANES]."""
    seed, multiplier = np.uint64(SEED), np.uint64(MULTIPLIER)
    lanes = np.repeat((np.arange(1, LANES + 1, dtype=np.uint64) * seed)[None], len(words), axis=0)
    high = np.empty_like(lanes)
    for number in range(words.shape[1]):
        lanes ^= words[:, number]
        lanes ^= np.right_shift(lanes, np.uint64(32), out=high)
        lanes *= multiplier
    for bits, factor in ((33, multiplier), (29, seed)):
        lanes ^= np.right_shift(lanes, np.uint64(bits), out=high)
        lanes *= factor
    lanes ^= np.right_shift(lanes, np.uint64(32), out=high)
    sums: npt.NDArray[np.uint64] = lanes.sum(axis=1)
    return sums


def fetch_checksums(
    plan: ChecksumPlan, entries: torch.Tensor, sums: torch.Tensor, which: slice
) -> None:
    """Copy checksums of entries from their rows."""
    for found, (_, row) in zip(sums, entries[which].tolist(), strict=True):
        found.copy_(_memory(row + plan.sums_start, 8 * len(found)).view(torch.int64))


def _memory(address: int, num_bytes: int) -> torch.Tensor:
    """Return a view of host memory, [num_bytes] uint8."""
    content = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(content))
