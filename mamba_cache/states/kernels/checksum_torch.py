"""Checksums of tensors and entries: where they read, and the kernel of ``checksum`` in PyTorch."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
_CHUNKS_AT_ONCE = 64
"""What one operation reads and writes should fit into a core's cache."""


@dataclass(frozen=True, slots=True)
class ChecksumPlan:
    """Where the chunks of an entry lie: one place of each of its parts.

    A chunk is ``CHUNK_BYTES`` of one part counted from its start, or what is left at its end. The
    table holds addresses, so the plan keeps the parts alive.
    """

    parts: tuple[torch.Tensor, ...]  # [places, bytes] uint8 each, all on one device
    chunks: torch.Tensor  # [chunks, 4] int64: address, distance of places, bytes, is wide
    bounds: tuple[int, ...]  # the number of each part's first chunk, then how many there are
    sums_start: int  # where the checksums begin in an entry's row
    sums: torch.Tensor | None  # the only row, where it is no host memory

    @property
    def num_chunks(self) -> int:
        """Chunks of an entry."""
        return self.chunks.shape[0]


def plan_checksums(
    parts: Sequence[torch.Tensor], *, sums_start: int = 0, heads_first: bool = False
) -> ChecksumPlan:
    """Plan checksums of parts, whose chunks follow each other part by part.

    With ``heads_first`` the first chunks of all are parts of their own before all others, and the
    plan has one row, on the device.
    """
    device = parts[0].device if parts else torch.device("cpu")
    if heads_first:
        heads = [part[:, :CHUNK_BYTES] for part in parts]
        parts = heads + [part[:, CHUNK_BYTES:] for part in parts]
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
    sums = torch.zeros(len(chunks), dtype=torch.int64, device=device) if heads_first else None
    return ChecksumPlan(tuple(parts), chunks, bounds, sums_start, sums)


def checksum(  # noqa: PLR0917 - the kernel's signature
    plan: ChecksumPlan,
    entries: torch.Tensor,
    changed: torch.Tensor | None,
    which: slice,
    num_heads: int,
    others: range,
    programs: int,
) -> None:
    """Write checksums of entries to their rows, or with ``changed`` compare with those there.

    Of each of ``entries[which]`` (its place in the parts, and the address of its row) the chunks
    are the first ``num_heads`` and ``others``. ``programs`` is without meaning here.
    """
    for entry in range(which.start, which.stop):
        place, row = entries[entry].tolist()
        numbers, found = _measure(plan, place, num_heads, others)
        sums = plan.sums
        if sums is None:
            found = found.cpu()
            sums = _memory(row + plan.sums_start, 8 * plan.num_chunks).view(torch.int64)
        if changed is None:
            sums[numbers] = found
        else:
            changed[entry] |= (sums[numbers] != found).any()


def _measure(
    plan: ChecksumPlan, place: int, num_heads: int, others: range
) -> tuple[list[int], torch.Tensor]:
    """Return the numbers of the chunks of one entry, and their checksums."""
    numbers: list[int] = []
    sums = [torch.empty(0, dtype=torch.int64, device=plan.chunks.device)]
    ends: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for part, first, stop in zip(plan.parts, plan.bounds[:-1], plan.bounds[1:], strict=True):
        chosen = range(first, stop)
        if first >= num_heads:
            start, end = (-(-max(n - others.start, 0) // others.step) for n in (first, stop))
            chosen = others[start:end]
        if not chosen:
            continue
        content = part[place]
        num_full, size = divmod(content.numel(), CHUNK_BYTES)
        if size and chosen[-1] == stop - 1:
            num_rounds = -(-size // (UNROLLED_ROUNDS * ROUND_BYTES)) * UNROLLED_ROUNDS
            ends[num_rounds].append((stop - 1, content[num_full * CHUNK_BYTES :]))
            chosen = chosen[:-1]
        if chosen:
            full = _as_words(content[: num_full * CHUNK_BYTES]).view(num_full, -1, LANES)
            numbers += chosen
            sums.append(_sums_of(full[chosen[0] - first : chosen[-1] - first + 1 : chosen.step]))
    for num_rounds, items in ends.items():
        for begin in range(0, len(items), _CHUNKS_AT_ONCE):
            some = items[begin : begin + _CHUNKS_AT_ONCE]
            numbers += [number for number, _ in some]
            sums.append(_sums_of_ends([content for _, content in some], num_rounds))
    return numbers, torch.cat(sums)


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Read bytes as words of 8, copied if their address does not allow it."""
    if tensor.storage_offset() % 8 or tensor.data_ptr() % 8:
        tensor = tensor.clone()
    return tensor.view(torch.int64)


def _sums_of_ends(ends: Sequence[torch.Tensor], num_rounds: int) -> torch.Tensor:
    """Measure chunks that are not full, filled up with zeros."""
    filled = ends[0].new_zeros((len(ends), num_rounds * ROUND_BYTES))
    for row, end in zip(filled, ends, strict=True):
        row[: end.numel()] = end
    return _sums_of(filled.view(torch.int64).view(len(ends), num_rounds, LANES))


def _sums_of(words: torch.Tensor) -> torch.Tensor:
    """Measure chunks, [chunks, rounds, LANES] int64."""
    return torch.cat([_sums_of_few(part) for part in torch.split(words, _CHUNKS_AT_ONCE)])


def _sums_of_few(words: torch.Tensor) -> torch.Tensor:
    seeds = torch.arange(1, LANES + 1, device=words.device) * SEED
    lanes = seeds.repeat(words.shape[0], 1)
    high = torch.empty_like(lanes)
    for number in range(words.shape[1]):
        lanes ^= words[:, number]
        _xor_shifted(lanes, 32, high)
        lanes *= MULTIPLIER
    for bits, factor in ((33, MULTIPLIER), (29, SEED)):
        _xor_shifted(lanes, bits, high)
        lanes *= factor
    _xor_shifted(lanes, 32, high)
    return lanes.sum(dim=1)


def _xor_shifted(lanes: torch.Tensor, bits: int, high: torch.Tensor) -> None:
    """Xor words in place with themselves shifted to the right, zeros coming in."""
    torch.bitwise_right_shift(lanes, bits, out=high)
    high &= (1 << (64 - bits)) - 1
    lanes ^= high


def fetch_checksums(
    plan: ChecksumPlan, entries: torch.Tensor, sums: torch.Tensor, which: slice
) -> None:
    """Copy checksums of entries from their rows."""
    for found, (_, row) in zip(sums, entries[which].tolist(), strict=True):
        found.copy_(_memory(row + plan.sums_start, 8 * len(found)).view(torch.int64))


def _memory(address: int, num_bytes: int) -> torch.Tensor:
    """Return host memory, [num_bytes] uint8."""
    content = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(content))
