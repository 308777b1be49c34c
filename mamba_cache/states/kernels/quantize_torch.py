"""Quantised states in PyTorch: what the tiles of ``quantize`` must equal, bit for bit."""

from __future__ import annotations

import torch

__all__ = [
    "INFINITY_BITS",
    "LARGEST_CODE",
    "LEAST_MAGNITUDE_BITS",
    "MAGNITUDE_MASK",
    "ONE_OVER_LARGEST_CODE",
    "dequantize_states",
    "quantize_states",
]

LARGEST_CODE = 127.0
"""The code of a column's largest magnitude; -128 is not used, so that codes are symmetric."""

ONE_OVER_LARGEST_CODE = 1 / LARGEST_CODE
"""Scales are multiplied by it, in float32: a division takes ten times as long."""

# Magnitudes are compared as the bits of float32, where NaN is above infinity: one integer maximum
# finds the largest of a column and whether all are finite.
MAGNITUDE_MASK = 0x7FFFFFFF
"""All bits of a float32 but its sign."""

INFINITY_BITS = 0x7F800000
"""An infinite float32; the magnitudes of NaNs are above it."""

LEAST_MAGNITUDE_BITS = (127 - 100) << 23
"""2**-100, for which columns that stay below are taken: scales, and one over them, stay normal."""


def quantize_states(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise states as they are stored in slots, as ``SlotQuantization`` describes.

    Args:
        states: [..., heads, head_dim, state_dim], floating-point.

    Returns:
        Codes, int8, of the states' shape, and scales, float32 [..., heads, state_dim].
    """
    values = states.float()
    magnitudes = values.view(torch.int32) & MAGNITUDE_MASK
    largest_bits = magnitudes.amax(-2, keepdim=True).clamp(min=LEAST_MAGNITUDE_BITS)
    is_finite = largest_bits < INFINITY_BITS
    largest = largest_bits.view(torch.float32)
    scales = torch.where(is_finite, largest * ONE_OVER_LARGEST_CODE, torch.nan)
    # By a tensor: a number PyTorch may divide by another way.
    exact = values * (torch.full_like(largest, LARGEST_CODE) / largest)
    return torch.where(is_finite, exact.round(), 0).to(torch.int8), scales.squeeze(-2)


def dequantize_states(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Turn codes back into states of ``dtype``, as they are restored: code times scale.

    Args:
        codes: [..., heads, head_dim, state_dim] int8.
        scales: [..., heads, state_dim] float32.
        dtype: Of the live states.
    """
    return (codes.float() * scales.unsqueeze(-2)).to(dtype)
