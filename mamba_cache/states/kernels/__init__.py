"""Kernels that move states, each beside its PyTorch twin, and the choice between the two.

The kernels need Triton, so no kernel is imported here.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch

from mamba_cache.errors import InvalidArgumentError, MissingExtraError

__all__ = ["CopyBackend", "kernels_for"]

CopyBackend = Literal["auto", "torch", "triton"]
"""The implementation of copies; "auto" is the Triton kernel on CUDA and PyTorch elsewhere."""


def kernels_for(
    backend: CopyBackend, device: torch.device, *, kernels: str, twins: ModuleType
) -> Any:
    """Return the module whose functions work on ``device``.

    Args:
        backend: The requested backend.
        device: Device of the tensors.
        kernels: Name of the module of Triton kernels and their launchers; it is imported only if it
            is chosen.
        twins: The module of the PyTorch twins, with functions of the same names.

    Raises:
        InvalidArgumentError: The backend is unknown, or not for the device.
        MissingExtraError: The kernels are chosen and Triton is not installed.
    """
    if backend not in ("auto", "torch", "triton"):
        raise InvalidArgumentError(f"backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    is_gpu = device.type == "cuda"
    if backend == "triton" and not is_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidArgumentError(
            f"backend 'triton' needs tensors on a CUDA device, got {device} "
            "(with TRITON_INTERPRET=1 in the environment Triton interprets kernels on the CPU)"
        )
    if backend == "torch" or (backend == "auto" and not is_gpu):
        return twins
    try:
        return import_module(kernels)
    except ImportError as error:
        raise MissingExtraError(
            "the kernels need triton, which is not installed: pip install triton (Linux only), or "
            "use tensors on the CPU or backend='torch'"
        ) from error
