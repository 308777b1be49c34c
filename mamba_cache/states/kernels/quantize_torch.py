"""Quantised state copies in PyTorch: what the kernels of ``quantize`` must equal, bit for bit."""

from __future__ import annotations

from functools import partial

import torch

from mamba_cache.states.kernels import copy_torch
from mamba_cache.states.kernels.plan import (
    CHANCE_BASE,
    CHANCE_BITS,
    INFINITY_BITS,
    LARGEST_CODE,
    LEAST_MAGNITUDE_BITS,
    MAGNITUDE_MASK,
    ONE_OVER_LARGEST_CODE,
    QuantizedPlan,
    RowCopy,
)

__all__ = ["dequantize", "dequantize_states", "quantize", "quantize_states"]

_UINT32 = 0xFFFFFFFF


def quantize_states(plan: QuantizedPlan) -> RowCopy:
    """Return what stores live states in slots, as ``StateQuantizer.copy`` describes.

    It waits for the device if the rows are on one, so it serves the CPU and as a reference.

    Args:
        plan: Where to read and write.
    """
    return partial(_quantize_rows, plan, copy_torch.copy_states(plan.unchanged))


def dequantize_states(plan: QuantizedPlan) -> RowCopy:
    """Return what restores live states from slots, as ``StateDequantizer.copy`` describes.

    It waits for the device if the rows are on one, so it serves the CPU and as a reference.

    Args:
        plan: Where to read and write.
    """
    return partial(_dequantize_rows, plan, copy_torch.copy_states(plan.unchanged))


def _quantize_rows(
    plan: QuantizedPlan,
    copy_unchanged: RowCopy,
    live_rows: torch.Tensor | list[int],
    slots: torch.Tensor | list[int],
    num_pairs: int,
) -> None:
    copy_unchanged(live_rows, slots, num_pairs)
    for row, slot in copy_torch.real_pairs(live_rows, slots, num_pairs):
        states = plan.states[:, row] if row >= 0 else torch.zeros_like(plan.states[:, 0])
        plan.codes[:, slot], plan.scales[:, slot] = quantize(states, plan.hash_seed)


def _dequantize_rows(
    plan: QuantizedPlan,
    copy_unchanged: RowCopy,
    slots: torch.Tensor | list[int],
    live_rows: torch.Tensor | list[int],
    num_pairs: int,
) -> None:
    copy_unchanged(slots, live_rows, num_pairs)
    for slot, row in copy_torch.real_pairs(slots, live_rows, num_pairs):
        if slot < 0:
            plan.states[:, row] = 0
        else:
            codes, scales = plan.codes[:, slot], plan.scales[:, slot]
            plan.states[:, row] = dequantize(codes, scales, plan.states.dtype)


def quantize(states: torch.Tensor, hash_seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., heads, head_dim, state_dim], as ``SlotQuantization`` describes.

    Returns:
        Codes of the same shape, int8, and scales [..., heads, state_dim], float32.
    """
    values = states.float()
    magnitudes = values.view(torch.int32) & MAGNITUDE_MASK
    largest_bits = magnitudes.amax(-2, keepdim=True).clamp(min=LEAST_MAGNITUDE_BITS)
    is_finite = largest_bits < INFINITY_BITS
    largest = largest_bits.view(torch.float32)
    scales = torch.where(is_finite, largest * ONE_OVER_LARGEST_CODE, torch.nan)
    # By a tensor: a number PyTorch may divide by another way.
    exact = values * (torch.full_like(largest, LARGEST_CODE) / largest)
    if hash_seed is None:
        codes = exact.round()
    else:
        with_fraction = (exact + CHANCE_BASE).view(torch.int32) + _chances(values, hash_seed)
        codes = with_fraction >> CHANCE_BITS
    return torch.where(is_finite, codes, 0).to(torch.int8), scales.squeeze(-2)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return code times scale, rounded once, to ``dtype``."""
    return (codes.float() * scales.unsqueeze(-2)).to(dtype)


def _chances(values: torch.Tensor, hash_seed: int) -> torch.Tensor:
    """Hash each value and its place in its layer to ``CHANCE_BITS`` bits, in unsigned 32 bits.

    Returns:
        int32, of the values' shape.
    """
    heads, head_dim, state_dim = values.shape[-3:]
    rows = torch.arange(heads * head_dim, device=values.device).view(heads, head_dim, 1)
    columns = torch.arange(state_dim, device=values.device)
    keys = _mixed((columns * 0x85EBCA77 + hash_seed) & _UINT32) ^ (rows * 0x9E3779B1 & _UINT32)
    keys = keys ^ (values.view(torch.int32).long() & _UINT32)
    return (((keys * 0x7FEB352D) & _UINT32) >> (32 - CHANCE_BITS)).int()


def _mixed(keys: torch.Tensor) -> torch.Tensor:
    """Apply the 32-bit mixer "lowbias32" by Wellons, 2018 (public domain)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        keys = ((keys ^ (keys >> shift)) * factor) & _UINT32
    return keys ^ (keys >> 16)
