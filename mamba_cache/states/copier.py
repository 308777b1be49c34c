"""Batched copies of whole states: checked here, done by a kernel or its PyTorch twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.states._backend import CopyBackend, kernels_for
from mamba_cache.states._mover import RowMover, check_tensors
from mamba_cache.states.kernels import copy_torch
from mamba_cache.states.kernels.plan import plan_copy

__all__ = ["StateCopier"]

_KERNELS = "mamba_cache.states.kernels.copy"


class StateCopier(RowMover):
    """Copies rows between two sets of tensors, all layers of all tensors in one launch.

    The addresses are read once, here: the tensors must keep their storage. Sources and destinations
    may be the same tensors, as long as no row is both read and written in one call. Views of one
    storage that share bytes in any other way are the caller's to avoid.

    Args:
        sources: At least one, each [num_layers, source rows, *inner], inner axes contiguous, layers
            and rows at any distance. All have equally many rows and are on one device.
        destinations: As many, each of its source's dtype, number of layers and inner shape, on the
            same device; all have equally many rows.
        backend: "torch", "triton", or "auto", which is the kernel on CUDA and PyTorch elsewhere.

    Raises:
        InvalidArgumentError: The tensors do not fit each other, or the backend is unknown or not
            for their device.
        MissingExtraError: The kernel is asked for and Triton is not installed.
    """

    @outside_inference_mode
    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        *,
        backend: CopyBackend = "auto",
    ) -> None:
        check_tensors(sources, destinations)
        device = sources[0].device
        plan = plan_copy(sources, destinations, device=device)
        kernels = kernels_for(backend, device, kernels=_KERNELS, twins=copy_torch)
        copy_rows = kernels.copy_states(plan)
        takes_lists = kernels is copy_torch
        super().__init__(sources, destinations, copy_rows, takes_lists=takes_lists)
