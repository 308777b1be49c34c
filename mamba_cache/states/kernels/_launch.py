"""What kernels share: launches past Triton's own, and walks through lists of rows with padding."""

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
"""The widest access that a GPU has."""

_MAX_PROGRAMS_Y = 65535

_CARVEOUT = 9
"""``CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`` of the CUDA driver."""
_CARVEOUT_PERCENT = 50


class Launcher:
    """Remembers what a kernel was compiled to, so that later launches take half the host time.

    On its usual way Triton examines every argument to find the compiled kernel that fits: 17 us a
    launch, against 9 us so (NVIDIA H200 machine, Triton 3.6).

    A kernel that ``runs_beside`` others lets them use shared memory meanwhile.
    """

    def __init__(self, kernel: Any, *, runs_beside: bool = False) -> None:
        self._kernel = kernel
        self._runs_beside = runs_beside
        self._compiled: dict[Hashable, Any] = {}
        # Before 3.3 a compiled kernel is called without its constants.
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
        # Triton's interpreter compiles nothing, and returns None each time.
        compiled = self._kernel[grid](*arguments, **options)
        if compiled is not None and self._runs_beside:
            _set_shared_memory_aside(compiled.function)
        if self._takes_constants:
            self._compiled[device, key] = compiled


def _set_shared_memory_aside(function: int) -> None:
    """Have multiprocessors keep shared memory that a kernel does not need.

    A multiprocessor divides its memory between cache and shared memory when it is idle. If it is
    left little of the second, kernels that need more wait for the end of this one: a sum of 8
    numbers waited for 3.1 ms beside checksums of 16 GB, and 0.2 ms so (NVIDIA H200).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # another system: it is a hint
        return
    driver.cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, _CARVEOUT_PERCENT)


def layout_of(*tensors: torch.Tensor | None) -> Hashable:
    """Return what Triton looks at in tensors: dtypes, and whether wide accesses fit."""
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
    """Return how many entries of a list of rows one program walks through.

    A program for each entry is fastest where all are real. But a captured launch is replayed with
    other rows, most of them padding, and starting programs that have nothing to do takes time: 64
    padded states of 24 layers cost 985 us so, and 18 us in one walk (NVIDIA H200, 98 MiB a state).
    """
    in_graph = on_gpu and torch.cuda.is_current_stream_capturing()
    return captured if in_graph or num_entries > _MAX_PROGRAMS_Y else 1
