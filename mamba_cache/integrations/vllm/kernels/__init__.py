"""Copies between columns: Triton kernels, and in ``plain`` their twins in plain Python."""

from __future__ import annotations

import os
from types import ModuleType

import torch

from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.integrations.vllm.kernels import plain
from mamba_cache.states import CopyBackend

__all__ = ["kernels_for"]


def kernels_for(backend: CopyBackend, device: torch.device) -> ModuleType:
    """Return what decides and copies for tensors on ``device``: ``plain`` or ``align_columns``.

    Raises:
        InvalidArgumentError: The backend is unknown, or not for the device.
        MissingExtraError: The kernels are asked for and Triton is not installed.
    """
    if backend not in ("auto", "torch", "triton"):
        raise InvalidArgumentError(f"backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    if device.type != "cuda" and backend != "triton":
        return plain
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidArgumentError(
            f"backend 'triton' needs tensors on a CUDA device, got {device} "
            "(with TRITON_INTERPRET=1 in the environment Triton interprets kernels on the CPU)"
        )
    if backend == "torch":
        raise InvalidArgumentError(
            f"backend 'torch' decides on the CPU and needs tensors there, got {device}"
        )
    try:
        from mamba_cache.integrations.vllm.kernels import align_columns  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            "the kernels need triton, which is not installed: pip install triton (Linux only)"
        ) from error
    return align_columns
