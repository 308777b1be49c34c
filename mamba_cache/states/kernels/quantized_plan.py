"""Where copies between live states and quantised slots read and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_cache.states.kernels.plan import CopyPlan

__all__ = [
    "CHANCE_BASE",
    "CHANCE_BITS",
    "INFINITY_BITS",
    "LARGEST_CODE",
    "LEAST_MAGNITUDE_BITS",
    "MAGNITUDE_MASK",
    "ONE_OVER_LARGEST_CODE",
    "QuantizedPlan",
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

CHANCE_BITS = 14
"""Random bits that decide whether a value is rounded up."""

CHANCE_BASE = 768.0
"""Added to a code that is not rounded, it leaves a float32 with ``CHANCE_BITS`` bits of fraction.

768 is 512 + 256. From 512 to 1024 the fraction of a float32 has 14 bits; and 256 does not show in
the eight bits above them, which are the code, rounded down.
"""


@dataclass(frozen=True, slots=True)
class QuantizedPlan:
    """The tensors of a copy between live states and quantised slots, in either direction.

    Attributes:
        unchanged: The copy of the tensors that are not quantised, in the copy's direction.
        states: [num_layers, rows, heads, head_dim, state_dim], floating-point: live SSM states.
        codes: [num_layers, slots, heads, head_dim, state_dim] int8.
        scales: [num_layers, slots, heads, state_dim] float32.
        hash_seed: Seed of stochastic rounding; None: round to nearest.
    """

    unchanged: CopyPlan
    states: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    hash_seed: int | None
