"""Plans and copies: Triton kernels, and in ``plain`` their twins in plain Python."""

from __future__ import annotations

from typing import Any

import torch

from mamba_cache import states
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.copies import StateTable
from mamba_cache.integrations.vllm.kernels import plain
from mamba_cache.states import CopyBackend

__all__ = ["kernels_for", "run_plan"]

_KERNELS = "mamba_cache.integrations.vllm.kernels.align_columns"


def kernels_for(backend: CopyBackend, device: torch.device) -> Any:
    """Return what decides and copies for tensors on ``device``: ``plain`` or ``align_columns``.

    Raises:
        InvalidArgumentError: The backend is unknown, or not for the device.
        MissingExtraError: The kernels are asked for and Triton is not installed.
    """
    if backend == "torch" and device.type == "cuda":
        raise InvalidArgumentError(
            f"backend 'torch' decides on the CPU and needs tensors there, got {device}"
        )
    return states.kernels_for(backend, device, kernels=_KERNELS, twins=plain)


def run_plan(
    plan: str,
    backend: CopyBackend,
    table: StateTable,
    num_reqs: int,
    idx_mapping: torch.Tensor | None,
    *inputs: torch.Tensor | None,
) -> None:
    """List copies on the device by the plan of that name, and carry the list out.

    Raises:
        InvalidArgumentError: There are too many requests, or without a GPU a column or block is out
            of range. Nothing was changed.
    """
    max_num_reqs = len(table.copies) - 1
    # No slot comes twice, so never more rows move than there are slots.
    if idx_mapping is None and num_reqs > max_num_reqs:
        raise InvalidArgumentError(f"num_reqs must be at most {max_num_reqs}, got {num_reqs}")
    kernels = kernels_for(backend, table.device)
    getattr(kernels, plan)(table, num_reqs, idx_mapping, *inputs)
    kernels.copy_listed(table, num_reqs)
