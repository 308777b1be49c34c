"""Who moves the states: Triton kernels, or their PyTorch twins."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.states.kernels import copy_torch, extract_torch, quantize_torch
from mamba_cache.states.kernels.plan import CopyPlan, RowCopy
from mamba_cache.states.kernels.quantized_plan import QuantizedPlan

__all__ = ["CopyBackend", "StateKernels", "kernels_for"]

CopyBackend = Literal["auto", "torch", "triton"]
"""What carries out the copies; "auto" is the Triton kernel on CUDA and PyTorch elsewhere."""


class StateKernels(NamedTuple):
    """What moves states, on one device.

    Attributes:
        copy_states: Returns what copies whole rows by a plan.
        extract_states: Writes one layer's checkpoint states, into slots of either kind.
        quantize_states: Returns what stores whole rows in quantised slots by a plan.
        dequantize_states: Returns what restores whole rows from them by a plan.
    """

    copy_states: Callable[[CopyPlan], RowCopy]
    extract_states: Callable[..., None]
    quantize_states: Callable[[QuantizedPlan], RowCopy]
    dequantize_states: Callable[[QuantizedPlan], RowCopy]


_TWINS = StateKernels(
    copy_torch.copy_states,
    extract_torch.extract_states,
    quantize_torch.quantize_states,
    quantize_torch.dequantize_states,
)


def kernels_for(backend: CopyBackend, device: torch.device) -> StateKernels:
    """Returns what ``backend`` means for tensors on ``device``.

    Raises:
        InvalidArgumentError: The backend is unknown, or not for the device.
        MissingExtraError: The kernels are asked for and Triton is not installed.
    """
    if backend not in ("auto", "torch", "triton"):
        raise InvalidArgumentError(f"backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return _TWINS
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidArgumentError(
            f"backend 'triton' needs tensors on a CUDA device, got {device} "
            "(with TRITON_INTERPRET=1 in the environment Triton interprets kernels on the CPU)"
        )
    try:
        from mamba_cache.states.kernels import copy, extract, quantize  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            "the kernels need triton, which is not installed: pip install triton (Linux only), or "
            "choose backend='torch'"
        ) from error
    return StateKernels(
        copy.copy_states,
        extract.extract_states,
        quantize.quantize_states,
        quantize.dequantize_states,
    )
