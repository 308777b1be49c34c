"""What tests on a GPU share."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

BUSY_CYCLES = 200_000_000
"""For ``torch.cuda._sleep``: about a tenth of a second."""


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Any wait for the device that PyTorch knows of raises inside."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # PyTorch says that the mode does not know of every wait yet.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_bits_(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with random bits, NaNs of every payload among them."""
    tensor.unsqueeze(-1).view(torch.uint8).random_(0, 256)
    return tensor


def assert_same_bits(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(
        tensor.unsqueeze(-1).view(torch.uint8), expected.unsqueeze(-1).view(torch.uint8)
    )
