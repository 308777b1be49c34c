"""Helpers shared by tests on a GPU."""

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

BUSY_CYCLES = 200_000_000
"""Cycles for ``torch.cuda._sleep``: about a tenth of a second."""


@contextmanager
def held_stream() -> Iterator[None]:
    """Hold back work enqueued on the current stream until the end of the ``with`` block."""
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    driver, stream = ctypes.CDLL("libcuda.so.1"), torch.cuda.current_stream().cuda_stream
    wait = driver.cuStreamWaitValue32_v2
    wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    driver.cuStreamSynchronize.argtypes = (ctypes.c_void_p,)
    assert wait(stream, flag.data_ptr(), 1, 0) == 0
    try:
        yield
    finally:
        flag[0] = 1
        assert driver.cuStreamSynchronize(stream) == 0  # after it nothing reads the flag


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Make every wait for the device that PyTorch detects raise in the ``with`` block."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # PyTorch warns that the mode does not detect every wait yet.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_bits_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with random bits, which include NaNs of every payload."""
    tensor.unsqueeze(-1).view(torch.uint8).random_(0, 256)
    return tensor


def assert_same_bits(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(
        tensor.unsqueeze(-1).view(torch.uint8), expected.unsqueeze(-1).view(torch.uint8)
    )
