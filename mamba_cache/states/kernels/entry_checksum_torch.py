"""Checksums of entries where they lie, in PyTorch: what the kernel must equal."""

from __future__ import annotations

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
    places: torch.Tensor,
    sums: torch.Tensor,
    changed: torch.Tensor | None,
    entries: slice,
    chunks: slice,
    programs: int,
) -> None:
    """Write checksums of entries, or compare them with what is there; waits for ``places``.

    Args:
        plan: Where their chunks lie.
        places: [n] int32. Where they lie.
        sums: [n, num_chunks] int64. Written, or compared.
        changed: [n] int32; becomes 1 for each that has another one than is there. None: write.
        entries: Which of the n.
        chunks: Which chunks of each.
        programs: Without meaning here.
    """
    for entry in range(entries.start, entries.stop):
        place = int(places[entry])
        layers = [layer for tensor in plan.tensors for layer in tensor[:, place]]
        found = torch.cat([_sums_of_layer(layer) for layer in layers])
        if changed is None:
            sums[entry, chunks] = found[chunks]
        else:
            changed[entry] |= (sums[entry, chunks] != found[chunks]).any()


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
