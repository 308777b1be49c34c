"""Checksums of tensors and entries in PyTorch: what the kernels of ``checksum`` must equal."""

from __future__ import annotations

import ctypes
from collections import defaultdict

import numpy as np
import torch

from mamba_cache.states.kernels.checksum_plan import (
    CHUNK_BYTES,
    LANES,
    MULTIPLIER,
    ROUND_BYTES,
    SEED,
    UNROLLED_ROUNDS,
    ChecksumPlan,
    EntryPlan,
)

__all__ = ["checksum", "entry_checksums", "fetch_checksums"]

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
    """Measure chunks, and tell whether any is another than expected. It does not wait."""
    ends: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for head, (tensor, rest) in enumerate(zip(plan.tensors, plan.rest_starts, strict=True)):
        num_full, size = tensor.numel() // CHUNK_BYTES, tensor.numel()
        first = 1 + (phase + plan.num_heads - rest) % stride
        if num_full:
            full = _as_words(tensor[: num_full * CHUNK_BYTES]).view(num_full, -1, LANES)
            sums[head : head + 1] = _sums_of(full[:1])
            if first < num_full:
                sums[rest + first - 1 : rest + num_full - 1 : stride] = _sums_of(
                    full[first::stride]
                )
        is_measured = num_full == 0 or (num_full - first) % stride == 0
        if size % CHUNK_BYTES and is_measured:
            end = tensor[num_full * CHUNK_BYTES :]
            num_rounds = -(-end.numel() // (UNROLLED_ROUNDS * ROUND_BYTES)) * UNROLLED_ROUNDS
            ends[num_rounds].append((rest + num_full - 1 if num_full else head, end))
    for num_rounds, items in ends.items():
        for first in range(0, len(items), _CHUNKS_AT_ONCE):
            _measure_ends(items[first : first + _CHUNKS_AT_ONCE], num_rounds, sums)
    for part in (slice(plan.num_heads), slice(plan.num_heads + phase, None, stride)):
        changed |= (sums[part] != expected[part]).any()


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Read bytes as words of 8, copied if their address does not allow it."""
    if tensor.storage_offset() % 8 or tensor.data_ptr() % 8:
        tensor = tensor.clone()
    return tensor.view(torch.int64)


def _measure_ends(
    items: list[tuple[int, torch.Tensor]], num_rounds: int, sums: torch.Tensor
) -> None:
    """Measure chunks that are not full, filled up with zeros."""
    filled = sums.new_zeros((len(items), num_rounds * ROUND_BYTES), dtype=torch.uint8)
    for row, (_, end) in enumerate(items):
        filled[row, : end.numel()] = end
    totals = _sums_of(filled.view(torch.int64).view(len(items), num_rounds, LANES))
    for row, (index, _) in enumerate(items):
        sums[index] = totals[row]


def _sums_of(words: torch.Tensor) -> torch.Tensor:
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


def entry_checksums(  # noqa: PLR0917 - the kernel's signature
    plan: EntryPlan,
    compares: bool,
    entries: torch.Tensor,
    changed: torch.Tensor,
    which: slice,
    chunks: slice,
    programs: int,
) -> None:
    """Write checksums of entries to their rows, or compare with those there.

    ``programs`` is without meaning here.
    """
    for entry in range(which.start, which.stop):
        place, row = entries[entry].tolist()
        layers = [layer for tensor in plan.tensors for layer in tensor[:, place]]
        found = torch.cat([_sums_of_layer(layer) for layer in layers]).cpu()
        sums = _memory(row + plan.sums_start, 8 * len(found)).view(torch.int64)
        if compares:
            changed[entry] |= int((sums[chunks] != found[chunks]).any())
        else:
            sums[chunks] = found[chunks]


def fetch_checksums(
    plan: EntryPlan, entries: torch.Tensor, sums: torch.Tensor, which: slice
) -> None:
    """Copy checksums of entries from their rows."""
    for found, (_, row) in zip(sums, entries[which].tolist(), strict=True):
        found.copy_(_memory(row + plan.sums_start, 8 * len(found)).view(torch.int64))


def _memory(address: int, num_bytes: int) -> torch.Tensor:
    """Return host memory, [num_bytes] uint8."""
    content = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(content))


def _sums_of_layer(layer: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each chunk of [bytes] uint8."""
    num_full, size = divmod(layer.numel(), CHUNK_BYTES)
    sums = torch.empty(num_full + bool(size), dtype=torch.int64, device=layer.device)
    if num_full:
        full = _as_words(layer[: num_full * CHUNK_BYTES]).view(num_full, -1, LANES)
        sums[:num_full] = _sums_of(full)
    if size:
        num_rounds = -(-size // (UNROLLED_ROUNDS * ROUND_BYTES)) * UNROLLED_ROUNDS
        _measure_ends([(num_full, layer[num_full * CHUNK_BYTES :])], num_rounds, sums)
    return sums
