"""The batched state copy in PyTorch: what the kernel of ``copy`` must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mamba_cache._torch import ZERO_SOURCE
from mamba_cache.states.kernels.plan import CopyPlan, RowCopy

__all__ = ["copy_states", "real_pairs"]


def copy_states(plan: CopyPlan) -> RowCopy:
    """Return what copies whole rows, all layers of all tensors, as ``StateCopier.copy`` describes.

    It waits for the device if the rows are on one, so it serves the CPU and as a reference.
    """
    pairs: list[tuple[Any, Any]] = list(zip(plan.sources, plan.destinations, strict=True))
    if plan.chunks.device.type == "cpu":  # the same bytes through numpy, whose calls cost a fourth
        pairs = [(source.numpy(), destination.numpy()) for source, destination in pairs]
    return partial(_copy, pairs)


def _copy(
    pairs: Sequence[tuple[Any, Any]],
    source_rows: torch.Tensor | list[int],
    destination_rows: torch.Tensor | list[int],
    num_pairs: int,
) -> None:
    for source_row, destination_row in real_pairs(source_rows, destination_rows, num_pairs):
        for source, destination in pairs:
            destination[:, destination_row] = source[:, source_row] if source_row >= 0 else 0


def real_pairs(source_rows: Any, destination_rows: Any, num_pairs: int) -> list[tuple[int, int]]:
    """Return the pairs of rows that are not to be skipped; it waits for rows on a device."""
    if isinstance(source_rows, list):  # and so are the others
        return list(zip(source_rows, destination_rows, strict=True))
    both = source_rows[:num_pairs].tolist(), destination_rows[:num_pairs].tolist()
    return [
        (source, destination)
        for source, destination in zip(*both, strict=True)
        if destination >= 0 and (source >= 0 or source == ZERO_SOURCE)
    ]
