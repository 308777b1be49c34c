"""Helpers of all kernels: a fast launcher, and walks through lists of rows with padding."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["WIDE_BYTES", "Launcher", "end_of_real", "entries_per_program", "layout_of"]

WIDE_BYTES = 16
"""Size of a GPU's widest memory access."""

_MAX_PROGRAMS_Y = 65535

_CARVEOUT = 9
"""``CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`` of the CUDA driver."""
_CARVEOUT_PERCENT = 50


class Launcher:
    """Keeps the compiled kernel, so that later launches take half the host time.

    Triton's own launch examines every argument to find the compiled kernel: 17 us a launch, against
    9 us with this class (NVIDIA H200 machine, Triton 3.6).

    A kernel with ``runs_beside`` leaves shared memory to kernels that run at the same time.
    """

    def __init__(self, kernel: Any, *, runs_beside: bool = False) -> None:
        self._kernel = kernel
        self._runs_beside = runs_beside
        self._compiled: dict[Hashable, Any] = {}
        # Before Triton 3.3 a compiled kernel is called without its constants.
        major, minor = triton.__version__.split(".")[:2]
        self._takes_constants = (int(major), int(minor)) >= (3, 3)

    def __call__(
        self,
        device: int,
        key: Hashable,
        grid: tuple[int, int, int],
        *arguments: object,
        **options: object,
    ) -> None:
        """Launch on the device's current stream."""
        if device >= 0 and device != torch.cuda.current_device():
            # Triton launches on the current device.
            with torch.cuda.device(device):
                self(device, key, grid, *arguments, **options)
            return
        compiled = self._compiled.get((device, key))
        if compiled is not None:
            compiled[grid](*arguments)
            return
        # Triton's interpreter does not compile: it returns None.
        compiled = self._kernel[grid](*arguments, **options)
        if compiled is not None and self._runs_beside:
            _set_shared_memory_aside(compiled.function)
        if self._takes_constants:
            self._compiled[device, key] = compiled


def _set_shared_memory_aside(function: int) -> None:
    """Reserve shared memory of multiprocessors that the kernel does not need.

    A multiprocessor divides its memory between cache and shared memory while it is idle. With
    little shared memory, kernels that need more wait for the end of this kernel: a sum of 8 numbers
    waited for 3.1 ms during checksums of 16 GB, and 0.2 ms with this reserve (NVIDIA H200).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # not on Linux: this is only a hint
        return
    driver.cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, _CARVEOUT_PERCENT)


def layout_of(*tensors: torch.Tensor | None) -> Hashable:
    """Return the dtypes and alignments by which Triton chooses a compiled kernel."""
    return tuple(
        None if tensor is None else (tensor.dtype, tensor.data_ptr() % WIDE_BYTES == 0)
        for tensor in tensors
    )


@triton.jit  # type: ignore[untyped-decorator]
def end_of_real(rows, first, num_rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the end of what is not padding in ``rows[first : first + BLOCK]``."""
    entries = first + tl.arange(0, BLOCK)
    is_real = tl.load(rows + entries, mask=entries < num_rows, other=-1) >= 0
    return tl.max(tl.where(is_real, entries + 1, 0))


def entries_per_program(num_entries: int, *, on_gpu: bool, captured: int) -> int:
    """Return the number of entries of a list of rows that one program processes.

    One program for each entry is fastest if no entry is padding. But a captured launch is replayed
    with other rows, most of them padding, and starting programs for padding takes time: 985 us for
    64 padded states of 24 layers, against 18 us in one program (NVIDIA H200, 98 MiB a state).
    """
    in_graph = on_gpu and torch.cuda.is_current_stream_capturing()
    return captured if in_graph or num_entries > _MAX_PROGRAMS_Y else 1
