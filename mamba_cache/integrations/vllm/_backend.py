"""The choice of kernels for a device: Triton's, or their twins in plain Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.integrations.vllm.kernels import plain
from mamba_cache.states import CopyBackend

__all__ = ["AlignKernels", "kernels_for"]


class AlignKernels(NamedTuple):
    """What decides and copies, on one device.

    Attributes:
        accept_tokens: Scatters accepted counts to request slots.
        copy_regions: Copies a list of regions.
        gather_accepted: Gathers accepted counts from request slots.
        postcopy_columns: Decides and copies after a step.
        postcopy_resident: The same for resident requests.
        precopy_columns: Copies between decided columns.
        precopy_resident: Decides and copies before a step of resident requests.
    """

    accept_tokens: Callable[..., None]
    copy_regions: Callable[..., None]
    gather_accepted: Callable[..., None]
    postcopy_columns: Callable[..., None]
    postcopy_resident: Callable[..., None]
    precopy_columns: Callable[..., None]
    precopy_resident: Callable[..., None]


_PLAIN = AlignKernels(
    plain.accept_tokens,
    plain.copy_regions,
    plain.gather_accepted,
    plain.postcopy_columns,
    plain.postcopy_resident,
    plain.precopy_columns,
    plain.precopy_resident,
)


def kernels_for(backend: CopyBackend, device: torch.device) -> AlignKernels:
    """Return what ``backend`` means for tensors on ``device``.

    Raises:
        InvalidArgumentError: The backend is unknown, or not for the device.
        MissingExtraError: The kernels are asked for and Triton is not installed.
    """
    if backend not in ("auto", "torch", "triton"):
        raise InvalidArgumentError(f"backend must be 'auto', 'torch' or 'triton', got {backend!r}")
    if device.type != "cuda" and backend != "triton":
        return _PLAIN
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
        from mamba_cache.integrations.vllm.kernels import align_columns, regions  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            "the kernels need triton, which is not installed: pip install triton (Linux only)"
        ) from error
    return AlignKernels(
        align_columns.accept_tokens,
        regions.copy_regions,
        align_columns.gather_accepted,
        align_columns.postcopy_columns,
        align_columns.postcopy_resident,
        align_columns.precopy_columns,
        align_columns.precopy_resident,
    )
