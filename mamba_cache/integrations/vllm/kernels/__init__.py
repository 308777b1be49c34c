"""Copies between columns: Triton kernels, and in ``plain`` their twins in plain Python."""

from __future__ import annotations

from typing import Any

import torch

from mamba_cache import states
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.kernels import plain
from mamba_cache.states import CopyBackend

__all__ = ["kernels_for"]

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
