"""Copies, extractions and quantised states in PyTorch: the reference of the kernels, to the bit."""

# The launchers of the kernels take the same arguments in the same order.
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from mamba_cache._torch import ZERO_SOURCE

__all__ = [
    "INFINITY_BITS",
    "LARGEST_CODE",
    "LEAST_MAGNITUDE_BITS",
    "MAGNITUDE_MASK",
    "ONE_OVER_LARGEST_CODE",
    "Pairs",
    "Quantized",
    "RowCopy",
    "as_bytes",
    "copy_states",
    "dequantize_states",
    "extract_states",
    "quantize_states",
]

LARGEST_CODE = 127.0
"""The code of a column's largest magnitude; -128 is not used, so that codes are symmetric."""

ONE_OVER_LARGEST_CODE = 1 / LARGEST_CODE
"""Factor of scales, in float32: a division would take ten times as long."""

# Magnitudes are compared as the bits of float32, where NaN is above infinity: one integer maximum
# finds a column's largest magnitude, and whether all its values are finite.
MAGNITUDE_MASK = 0x7FFFFFFF
"""All bits of a float32 except the sign."""

INFINITY_BITS = 0x7F800000
"""Bits of an infinite float32; the bits of NaNs are above."""

LEAST_MAGNITUDE_BITS = (127 - 100) << 23
"""Bits of 2**-100, the lower bound of a column's magnitude: scale and 1 / scale stay normal."""


def quantize_states(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise states as ``SlotQuantization`` describes.

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
    # A tensor of 127s: PyTorch may divide a plain number in a different way.
    exact = values * (torch.full_like(largest, LARGEST_CODE) / largest)
    return torch.where(is_finite, exact.round(), 0).to(torch.int8), scales.squeeze(-2)


def dequantize_states(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the states of codes and scales: code * scale, in ``dtype``.

    Args:
        codes: [..., heads, head_dim, state_dim] int8.
        scales: [..., heads, state_dim] float32.
        dtype: Dtype of the live states.
    """
    return (codes.float() * scales.unsqueeze(-2)).to(dtype)


Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of source and destination, each [num_layers, rows, *inner]."""

RowCopy: TypeAlias = Callable[[Any, Any, int], None]
"""Copies n rows, given source rows, destination rows, and n.

Rows are [at least n] int32 or int64, contiguous, on the tensors' device. The twins also take lists
of n ints.
"""

Quantized: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]
"""States, codes, scales, and whether states are quantised (True) or restored (False)."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view [..., bytes] uint8 of a tensor's memory."""
    return tensor.unsqueeze(-1).view(torch.uint8)


def copy_states(pairs: Pairs, quantized: Quantized | None, device: torch.device) -> RowCopy:
    """Return a copy of whole rows, all layers of all tensors, as in ``StateCopier.copy``.

    The copy waits for the device if the rows are on one: it is for the CPU, and a reference.
    """
    tensors: list[tuple[Any, Any]] = [
        (as_bytes(source), as_bytes(destination))
        for source, destination in pairs
        if destination.numel()
    ]
    if device.type == "cpu":  # numpy's calls take a quarter of the time
        tensors = [(source.numpy(), destination.numpy()) for source, destination in tensors]

    def copy(source_rows: Any, destination_rows: Any, num_pairs: int) -> None:
        for source_row, destination_row in _real_pairs(source_rows, destination_rows, num_pairs):
            for source, destination in tensors:
                destination[:, destination_row] = source[:, source_row] if source_row >= 0 else 0
            if quantized is not None:
                _copy_quantized(quantized, source_row, destination_row)

    return copy


def _copy_quantized(quantized: Quantized, source: int, target: int) -> None:
    states, codes, scales, is_store = quantized
    if is_store:
        given = torch.zeros_like(codes[:, target]) if source < 0 else states[:, source]
        codes[:, target], scales[:, target] = quantize_states(given)
    elif source < 0:
        states[:, target] = 0
    else:
        states[:, target] = dequantize_states(codes[:, source], scales[:, source], states.dtype)


def _real_pairs(source_rows: Any, destination_rows: Any, num_pairs: int) -> list[tuple[int, int]]:
    """Return the pairs of rows that are not padding; wait for rows on a device."""
    if not isinstance(source_rows, list):  # destination_rows is no list either
        source_rows = source_rows[:num_pairs].tolist()
        destination_rows = destination_rows[:num_pairs].tolist()
    return [
        (source, destination)
        for source, destination in zip(source_rows, destination_rows, strict=True)
        if destination >= 0 and (source >= 0 or source == ZERO_SOURCE)
    ]


def extract_states(
    slot_conv: torch.Tensor | None,
    slot_ssm: torch.Tensor | None,
    slot_scales: torch.Tensor | None,
    live_conv: torch.Tensor | None,
    chunk_states: torch.Tensor | None,
    conv_input: torch.Tensor | None,
    chunks: torch.Tensor,
    conv_ends: torch.Tensor,
    seq_starts: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write checked tensors as ``plan_extraction`` describes.

    Slots without ``slot_scales`` are not quantised. This waits for fields on a device: it is for
    the CPU, and a reference.
    """
    real = (slots >= 0).nonzero()[:, 0]
    if not len(real):
        return
    fields = (chunks, conv_ends, seq_starts, rows, slots)
    chunks, conv_ends, seq_starts, rows, slots = (field[real].long() for field in fields)
    if slot_conv is not None and live_conv is not None and conv_input is not None:
        slot_conv[slots] = _conv_windows(live_conv[rows], conv_input, seq_starts, conv_ends)
    if slot_ssm is not None and chunk_states is not None:
        states = chunk_states[chunks]
        if slot_scales is None:
            slot_ssm[slots] = states
        else:
            slot_ssm[slots], slot_scales[slots] = quantize_states(states)


def _conv_windows(
    live_windows: torch.Tensor,
    conv_input: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return the last W inputs before each of ``ends``."""
    width = live_windows.shape[2]
    # [n, W]: position of each input of the window, counted from the request's first packed token.
    positions = (ends - starts)[:, None] + torch.arange(-width, 0, device=ends.device)
    packed = (starts[:, None] + positions).clamp(0, len(conv_input) - 1)
    new = conv_input[packed].transpose(1, 2)
    columns = (width + positions).clamp(0, width - 1)
    old = live_windows.gather(2, columns[:, None].expand_as(live_windows))
    return torch.where((positions >= 0)[:, None], new, old)
