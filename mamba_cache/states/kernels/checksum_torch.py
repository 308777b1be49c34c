"""Checksums of many tensors in PyTorch: what the kernel of ``checksum`` must equal."""

from __future__ import annotations

from collections import defaultdict

import torch

from mamba_cache.states.kernels.checksum_plan import (
    CHUNK_BYTES,
    LANES,
    MULTIPLIER,
    ROUND_BYTES,
    SEED,
    UNROLLED_ROUNDS,
    ChecksumPlan,
)

__all__ = ["as_words", "checksum", "measure_ends", "sums_of"]

_CHUNKS_AT_ONCE = 64
"""What one operation reads and writes should fit into a core's cache."""


def checksum(  # noqa: PLR0917 - the kernel's signature
    plan: ChecksumPlan,
    expected: torch.Tensor,
    sums: torch.Tensor,
    changed: torch.Tensor,
    stride: int,
    phase: int,
) -> None:
    """Measure chunks, and tell whether any is another than expected. It does not wait.

    Args:
        plan: The chunks.
        expected: [num_chunks] int64, contiguous as the others.
        sums: [num_chunks] int64; those of the measured chunks are written.
        changed: [1] int32; becomes 1 if one of them is not as expected.
        stride: Only each so-many-th chunk is measured, but all heads.
        phase: Which ones, 0 <= phase < stride.
    """
    ends: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for head, (tensor, rest) in enumerate(zip(plan.tensors, plan.rest_starts, strict=True)):
        num_full, size = tensor.numel() // CHUNK_BYTES, tensor.numel()
        first = 1 + (phase + plan.num_heads - rest) % stride
        if num_full:
            full = as_words(tensor[: num_full * CHUNK_BYTES]).view(num_full, -1, LANES)
            sums[head : head + 1] = sums_of(full[:1])
            if first < num_full:
                sums[rest + first - 1 : rest + num_full - 1 : stride] = sums_of(full[first::stride])
        is_measured = num_full == 0 or (num_full - first) % stride == 0
        if size % CHUNK_BYTES and is_measured:
            end = tensor[num_full * CHUNK_BYTES :]
            num_rounds = -(-end.numel() // (UNROLLED_ROUNDS * ROUND_BYTES)) * UNROLLED_ROUNDS
            ends[num_rounds].append((rest + num_full - 1 if num_full else head, end))
    for num_rounds, items in ends.items():
        for first in range(0, len(items), _CHUNKS_AT_ONCE):
            measure_ends(items[first : first + _CHUNKS_AT_ONCE], num_rounds, sums)
    for part in (slice(plan.num_heads), slice(plan.num_heads + phase, None, stride)):
        changed |= (sums[part] != expected[part]).any()


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Read bytes as words of 8, copied if their address does not allow it."""
    if tensor.storage_offset() % 8 or tensor.data_ptr() % 8:
        tensor = tensor.clone()
    return tensor.view(torch.int64)


def measure_ends(
    items: list[tuple[int, torch.Tensor]], num_rounds: int, sums: torch.Tensor
) -> None:
    """Measure chunks that are not full, filled up with zeros."""
    filled = sums.new_zeros((len(items), num_rounds * ROUND_BYTES), dtype=torch.uint8)
    for row, (_, end) in enumerate(items):
        filled[row, : end.numel()] = end
    totals = sums_of(filled.view(torch.int64).view(len(items), num_rounds, LANES))
    for row, (index, _) in enumerate(items):
        sums[index] = totals[row]


def sums_of(words: torch.Tensor) -> torch.Tensor:
    """Measure chunks, [chunks, rounds, LANES] int64."""
    parts = torch.split(words, _CHUNKS_AT_ONCE)
    return (
        torch.cat([_sums_of_few(part) for part in parts]) if len(parts) > 1 else _sums_of_few(words)
    )


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
