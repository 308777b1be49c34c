"""Helpers around PyTorch: special indices, inference mode, precision, transfers."""

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
"""An index of padding, which kernels skip."""

ZERO_SOURCE = -2
"""A source index for which the destination is set to zero."""

outside_inference_mode = torch.inference_mode(mode=False)
"""Decorates functions that make tensors which are kept from call to call.

A tensor made in inference mode cannot be written outside of it, but engines use one context in both
modes.
"""

_NAMES: Final = {"tf32": "high", "bf16": "medium"}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device, without waiting for work that is enqueued there."""
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from pageable memory would wait. PyTorch keeps the pinned memory until it is read.
    return tensor.pin_memory().to(device, non_blocking=True)  # pragma: no cover - tests/gpu run it


def check_device_room(
    num_bytes: int, settings: Mapping[str, object], device: torch.device | str
) -> None:
    """Check that ``num_bytes`` for these settings fit into a device's memory.

    On a GPU only free memory counts. On the host all memory counts: pages are taken when written.
    """
    device = torch.device(device)
    if device.type != "cuda":
        check_room(num_bytes, settings)
        return
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached  # PyTorch can allocate from both
    check_room(num_bytes, settings, room=free, place=str(device))


def float32_precision(device: torch.device) -> str:
    """Return the precision of float32 products on a device: "highest", "high" or "medium".

    PyTorch's own function raises if a setting of a single backend, new in PyTorch 2.9, was used.
    """
    settings = _settings(device)
    if settings is None:
        return torch.get_float32_matmul_precision()
    return _NAMES.get(settings.fp32_precision, "highest")


def has_all_digits(device: torch.device) -> bool:
    """Return whether float32 products are exact to float32: no autocast, highest precision."""
    return not torch.is_autocast_enabled(device.type) and float32_precision(device) == "highest"


@contextmanager
def all_digits(device: torch.device) -> Iterator[None]:
    """Compute float32 products in the highest precision, without autocast, within the block.

    Autocast is disabled for this thread. The precision is set for the whole process.
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
    """Return the object with a device's ``fp32_precision``; None in PyTorch before 2.9."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    settings = getattr(backend, "matmul", None)
    return settings if hasattr(settings, "fp32_precision") else None


def _set(settings: Any, precision: str) -> None:
    if settings is None:
        torch.set_float32_matmul_precision(precision)
    else:
        settings.fp32_precision = precision
