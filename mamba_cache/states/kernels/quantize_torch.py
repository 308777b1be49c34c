"""Quantised state copies in PyTorch: what the kernels of ``quantize`` must equal, bit for bit."""

from __future__ import annotations

import torch

from mamba_cache.states.kernels import copy_torch
from mamba_cache.states.kernels.quantized_plan import LARGEST_CODE, LEAST_MAGNITUDE, QuantizedPlan

__all__ = ["dequantize", "dequantize_states", "quantize", "quantize_states"]

_UINT32 = 0xFFFFFFFF


def quantize_states(
    plan: QuantizedPlan, live_rows: torch.Tensor, slots: torch.Tensor, num_pairs: int
) -> None:
    """Stores live states in slots, as ``StateQuantizer.copy`` describes.

    It waits for the device if the rows are on one, so it serves the CPU and as a reference.

    Args:
        plan: Where to read and write.
        live_rows: [at least num_pairs] int32 or int64, on the plan's device.
        slots: The same.
        num_pairs: How many of them to store.
    """
    copy_torch.copy_states(plan.unchanged, live_rows, slots, num_pairs)
    pairs = zip(live_rows[:num_pairs].tolist(), slots[:num_pairs].tolist(), strict=True)
    for row, slot in pairs:
        if copy_torch.is_padding(row, slot):
            continue
        states = plan.states[:, row] if row >= 0 else torch.zeros_like(plan.states[:, 0])
        plan.codes[:, slot], plan.scales[:, slot] = quantize(states, plan.hash_seed)


def dequantize_states(
    plan: QuantizedPlan, slots: torch.Tensor, live_rows: torch.Tensor, num_pairs: int
) -> None:
    """Restores live states from slots, as ``StateDequantizer.copy`` describes.

    Args:
        plan: Where to read and write.
        slots: [at least num_pairs] int32 or int64, on the plan's device.
        live_rows: The same.
        num_pairs: How many of them to restore.
    """
    copy_torch.copy_states(plan.unchanged, slots, live_rows, num_pairs)
    pairs = zip(slots[:num_pairs].tolist(), live_rows[:num_pairs].tolist(), strict=True)
    for slot, row in pairs:
        if copy_torch.is_padding(slot, row):
            continue
        if slot < 0:
            plan.states[:, row] = 0
        else:
            codes, scales = plan.codes[:, slot], plan.scales[:, slot]
            plan.states[:, row] = dequantize(codes, scales, plan.states.dtype)


def quantize(states: torch.Tensor, hash_seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises [..., heads, head_dim, state_dim], as ``SlotQuantization`` describes.

    Returns:
        Codes of the same shape, int8, and scales [..., heads, state_dim], float32.
    """
    values = states.float()
    magnitudes = values.abs()
    largest = torch.where(magnitudes < torch.inf, magnitudes, torch.inf).amax(-2, keepdim=True)
    is_usable = (largest >= LEAST_MAGNITUDE) & (largest < torch.inf)
    # By a tensor: to divide by a number, or a number, PyTorch may multiply by a rounded inverse.
    code = torch.full_like(largest, LARGEST_CODE)
    scales = torch.where(is_usable, largest / code, 0.0)
    scales = torch.where(largest < torch.inf, scales, torch.nan)
    values = torch.where(is_usable, values, 0.0)
    exact = values * (code / torch.where(is_usable, largest, 1.0))
    if hash_seed is None:
        rounded = exact.round()
    else:
        floor = exact.floor()
        rounded = floor + (_chances(values, hash_seed) < exact - floor)
    return rounded.clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8), scales.squeeze(-2)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns code times scale, rounded once, to ``dtype``."""
    return (codes.float() * scales.unsqueeze(-2)).to(dtype)


def _chances(values: torch.Tensor, hash_seed: int) -> torch.Tensor:
    """Hashes each value and its place in its layer to a number in [0, 1), in unsigned 32 bits.

    Source: the 32-bit mixer "lowbias32" by Wellons, 2018 (public domain).
    """
    places = torch.arange(values.shape[-3:].numel(), device=values.device)
    keys = (places.view(values.shape[-3:]) * 0x9E3779B1 + hash_seed) & _UINT32
    keys = keys ^ (values.contiguous().view(torch.int32).long() & _UINT32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        keys = ((keys ^ (keys >> shift)) * factor) & _UINT32
    return ((keys ^ (keys >> 16)) >> 8) * 2.0**-24
