"""The way of a tensor of the host to a device, which waits for nothing."""

from __future__ import annotations

import torch

__all__ = ["to_device"]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a tensor of the host to a device without waiting for what is enqueued there."""
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the transfer would wait. PyTorch keeps pinned memory until it is read.
    return tensor.pin_memory().to(device, non_blocking=True)  # pragma: no cover - tests/gpu run it
