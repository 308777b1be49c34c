"""Checksums of entries where they lie, in PyTorch: what the kernel must equal."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from mamba_cache.states.kernels.checksum_plan import (
    CHUNK_BYTES,
    LANES,
    ROUND_BYTES,
    UNROLLED_ROUNDS,
    EntryPlan,
)
from mamba_cache.states.kernels.checksum_torch import as_words, measure_ends, sums_of

__all__ = ["entry_checksums"]


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

    Args:
        plan: Where their chunks lie.
        compares: Whether to compare.
        entries: [n, 2] int64. The place of each, and the address of its row.
        changed: [n] int32; becomes 1 for each that has another checksum than stands in its row.
        which: Which of the n.
        chunks: Which chunks of each.
        programs: Without meaning here.
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


def _memory(address: int, num_bytes: int) -> torch.Tensor:
    """Return host memory, [num_bytes] uint8."""
    content = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(content))


def _sums_of_layer(layer: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each chunk of [bytes] uint8."""
    num_full, size = divmod(layer.numel(), CHUNK_BYTES)
    sums = torch.empty(num_full + bool(size), dtype=torch.int64, device=layer.device)
    if num_full:
        full = as_words(layer[: num_full * CHUNK_BYTES]).view(num_full, -1, LANES)
        sums[:num_full] = sums_of(full)
    if size:
        num_rounds = -(-size // (UNROLLED_ROUNDS * ROUND_BYTES)) * UNROLLED_ROUNDS
        measure_ends([(num_full, layer[num_full * CHUNK_BYTES :])], num_rounds, sums)
    return sums
