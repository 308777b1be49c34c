"""Copies of rectangles of bytes by a GPU's copy engines, which take none of its multiprocessors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias

__all__ = ["MOST_PITCH", "Rectangles", "cuda_rectangles"]

MOST_PITCH: Final = 2**31 - 1
"""Bytes from line to line that the driver copies in one call."""

_HOST: Final = 1  # CU_MEMORYTYPE_HOST
_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE


Rectangles: TypeAlias = Callable[[int, int, int, int, int, int, Any], None]
"""Enqueues a copy of lines of bytes in one direction: address and pitch on the host, both on the
device, bytes of a line, lines, and the stream, whose device is the current one. A pitch is above
``MOST_PITCH`` only if there is one line."""


class _Memcpy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the driver's interface."""

    _fields_ = (
        ("src_x_bytes", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_memory_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x_bytes", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_memory_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@cache
def cuda_rectangles(*, to_device: bool) -> Rectangles:  # pragma: no cover - tests/gpu run it
    """Return what enqueues copies in one direction, by the CUDA driver.

    PyTorch copies memory with gaps through a kernel and memory of its own. The calls return at once
    and keep Python's lock: given up each time, another thread might keep it for milliseconds.
    """
    driver = ctypes.PyDLL("libcuda.so.1")
    address = ctypes.c_uint64
    copy = driver.cuMemcpyHtoDAsync_v2 if to_device else driver.cuMemcpyDtoHAsync_v2
    copy.argtypes = (address, address, ctypes.c_size_t, ctypes.c_void_p)
    copy_lines = driver.cuMemcpy2DAsync_v2
    copy_lines.argtypes = (ctypes.POINTER(_Memcpy2D), ctypes.c_void_p)
    host, device = ("src", "dst") if to_device else ("dst", "src")
    types = {f"{host}_memory_type": _HOST, f"{device}_memory_type": _DEVICE}

    def enqueue(  # noqa: PLR0917
        on_host: int,
        host_pitch: int,
        on_device: int,
        device_pitch: int,
        num_bytes: int,
        num_lines: int,
        stream: Any,
    ) -> None:
        if num_lines == 1:
            both = (on_device, on_host) if to_device else (on_host, on_device)
            result = copy(*both, num_bytes, stream.cuda_stream)
        else:
            places: dict[str, Any] = {
                f"{host}_host": on_host,
                f"{host}_pitch": host_pitch,
                f"{device}_device": on_device,
                f"{device}_pitch": device_pitch,
            }
            lines = _Memcpy2D(width_bytes=num_bytes, height=num_lines, **types, **places)
            result = copy_lines(ctypes.byref(lines), stream.cuda_stream)
        if result:
            raise RuntimeError(
                f"the CUDA driver refuses a copy of {num_lines} x {num_bytes} bytes: error {result}"
            )

    return enqueue
