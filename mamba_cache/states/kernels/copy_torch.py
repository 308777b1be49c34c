"""Copies of states in PyTorch: what the kernel of ``copy`` must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from mamba_cache._torch import ZERO_SOURCE
from mamba_cache.states.kernels.quantize_torch import dequantize_states, quantize_states

__all__ = ["Pairs", "Quantized", "RowCopy", "as_bytes", "copy_states"]

Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors to copy from and to, [num_layers, rows, *inner]."""

RowCopy: TypeAlias = Callable[[Any, Any, int], None]
"""Copies n rows, given the sources, the destinations, and n.

Rows are [at least n] int32 or int64, contiguous, on the device of what is copied. The kernels'
twins also take lists of n ints, none of which is to be skipped.
"""

Quantized: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]
"""States, their codes and scales, and whether the states are stored so, or restored from them."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return [..., bytes] uint8 of a tensor's memory."""
    return tensor.unsqueeze(-1).view(torch.uint8)


def copy_states(pairs: Pairs, quantized: Quantized | None, device: torch.device) -> RowCopy:
    """Return what copies whole rows, all layers of all tensors, as ``StateCopier.copy`` describes.

    It waits for the device if the rows are on one, so it serves the CPU and as a reference.
    """
    tensors: list[tuple[Any, Any]] = [
        (as_bytes(source), as_bytes(destination))
        for source, destination in pairs
        if destination.numel()
    ]
    if device.type == "cpu":  # numpy's calls cost a fourth
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
    """Return the pairs of rows that are not to be skipped; it waits for rows on a device."""
    if isinstance(source_rows, list):  # and so are the others
        return list(zip(source_rows, destination_rows, strict=True))
    both = source_rows[:num_pairs].tolist(), destination_rows[:num_pairs].tolist()
    return [
        (source, destination)
        for source, destination in zip(*both, strict=True)
        if destination >= 0 and (source >= 0 or source == ZERO_SOURCE)
    ]
