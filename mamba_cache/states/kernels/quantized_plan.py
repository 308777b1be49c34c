"""Where copies between live states and quantised slots read and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_cache.states.kernels.plan import CopyPlan

__all__ = ["LARGEST_CODE", "LEAST_MAGNITUDE", "QuantizedPlan"]

LARGEST_CODE = 127.0
"""The code of a column's largest magnitude; -128 is not used, so that codes are symmetric."""

LEAST_MAGNITUDE = 2.0**-100
"""Columns that stay below are stored as zeros: their scales, and one over them, stay normal."""


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
