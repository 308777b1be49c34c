"""What all packages need of PyTorch: indices with a meaning, modes, precision, transfers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from mamba_cache._checks import check_room

__all__ = [
    "PAD_SLOT_ID",
    "ZERO_SOURCE",
    "all_digits",
    "check_device_room",
    "float32_precision",
    "has_all_digits",
    "outside_inference_mode",
    "to_device",
]

PAD_SLOT_ID = -1
"""An index that means: nothing here, skip it."""

ZERO_SOURCE = -2
"""A source index that means: no state is copied, the destination is cleared."""

outside_inference_mode = torch.inference_mode(mode=False)
"""Decorates what makes tensors that are kept from call to call.

A tensor made in inference mode cannot be written outside of it, and engines use one context in and
out of it.
"""

_NAMES: Final = {"tf32": "high", "bf16": "medium"}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor of the host to a device without waiting for what is enqueued there."""
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the transfer would wait. PyTorch keeps pinned memory until it is read.
    return tensor.pin_memory().to(device, non_blocking=True)  # pragma: no cover - tests/gpu run it


def check_device_room(
    num_bytes: int, settings: Mapping[str, object], device: torch.device | str
) -> None:
    """Check that a device has memory for what settings ask for.

    Of a GPU only what is free counts; the host lends pages when they are written.
    """
    device = torch.device(device)
    if device.type != "cuda":
        check_room(num_bytes, settings)
        return
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached  # PyTorch takes from either
    check_room(num_bytes, settings, room=free, place=str(device))


def float32_precision(device: torch.device) -> str:
    """Return the precision of float32 products on a device: "highest", "high" or "medium".

    PyTorch's own function for it raises where one of the settings has been used that each backend
    has since PyTorch 2.9.
    """
    settings = _settings(device)
    if settings is None:
        return torch.get_float32_matmul_precision()
    return _NAMES.get(settings.fp32_precision, "highest")


def has_all_digits(device: torch.device) -> bool:
    """Say whether products of float32 are of all digits: no autocast, the highest precision."""
    return not torch.is_autocast_enabled(device.type) and float32_precision(device) == "highest"


@contextmanager
def all_digits(device: torch.device) -> Iterator[None]:
    """Have products of float32 be of all digits.

    Autocast is this thread's; the precision is the process's until the end of the block.
    """
    if has_all_digits(device):
        yield
        return
    settings = _settings(device)
    if settings is None:
        before, highest = torch.get_float32_matmul_precision(), "highest"
    else:
        before, highest = settings.fp32_precision, "ieee"
    with torch.autocast(device.type, enabled=False):
        _set(settings, highest)
        try:
            yield
        finally:
            _set(settings, before)


def _settings(device: torch.device) -> Any:
    """Return what has a device's ``fp32_precision``; None in PyTorch before 2.9."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    settings = getattr(backend, "matmul", None)
    return settings if hasattr(settings, "fp32_precision") else None


def _set(settings: Any, precision: str) -> None:
    if settings is None:
        torch.set_float32_matmul_precision(precision)
    else:
        settings.fp32_precision = precision
