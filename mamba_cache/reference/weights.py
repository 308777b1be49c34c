"""Random weights from a seed, and the norm that every layer shares."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mamba_cache.reference.model_config import state_dtype_of

__all__ = ["WeightMaker", "rms_norm"]


class WeightMaker:
    """The maker of a model's weights, the same for a seed whatever the dtype and the device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def linear(self, num_outputs: int, num_inputs: int) -> Tensor:
        """Draw [num_outputs, num_inputs] that keeps the scale of its input."""
        return self.normal(num_outputs, num_inputs, scale=1 / math.sqrt(num_inputs))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draw normal weights of standard deviation ``scale``."""
        drawn = torch.randn(*shape, generator=self._generator, dtype=torch.float64, device="cpu")
        return (drawn * scale).to(self.device, self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Draw uniform float64 numbers, for the caller to transform and then to narrow."""
        drawn = torch.rand(*shape, generator=self._generator, dtype=torch.float64, device="cpu")
        return (low + (high - low) * drawn).to(self.device)


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis to a root mean square of 1, then by ``weight``; sums in float32 or more.

    The result has the dtype of ``weight``.
    """
    wide = inputs.to(state_dtype_of(inputs.dtype))
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return scaled.to(weight.dtype) * weight
