"""The batched state copy in PyTorch: what the kernel of ``copy`` must equal, bit for bit."""

from __future__ import annotations

from functools import partial

import torch

from mamba_cache._indices import ZERO_SOURCE
from mamba_cache.states.kernels.plan import CopyPlan, RowCopy

__all__ = ["copy_states", "is_padding"]


def copy_states(plan: CopyPlan) -> RowCopy:
    """Return what copies whole rows, all layers of all tensors, as ``StateCopier.copy`` describes.

    It waits for the device if the rows are on one, so it serves the CPU and as a reference.

    Args:
        plan: Where to read and write.
    """
    return partial(_copy, plan)


def _copy(
    plan: CopyPlan, source_rows: torch.Tensor, destination_rows: torch.Tensor, num_pairs: int
) -> None:
    sources, destinations = source_rows[:num_pairs], destination_rows[:num_pairs]
    for source_row, destination_row in zip(sources.tolist(), destinations.tolist(), strict=True):
        if is_padding(source_row, destination_row):
            continue
        for source, destination in zip(plan.sources, plan.destinations, strict=True):
            if source_row >= 0:
                destination[:, destination_row].copy_(source[:, source_row])
            else:
                destination[:, destination_row].zero_()


def is_padding(source_row: int, destination_row: int) -> bool:
    """Say whether a pair of rows is to be skipped."""
    return destination_row < 0 or (source_row < 0 and source_row != ZERO_SOURCE)
