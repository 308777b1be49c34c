"""Checks of the row indices that a state copy is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from mamba_cache._indices import PAD_SLOT_ID, ZERO_SOURCE
from mamba_cache.errors import InvalidArgumentError

__all__ = ["RowIndices", "check_device_rows", "check_host_rows", "is_on_host"]

RowIndices: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | torch.Tensor"
"""[n] row indices: a sequence of ints, a numpy array, or a tensor."""

_HostRows: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def is_on_host(rows: RowIndices) -> bool:
    """Says whether the rows can be read without waiting for a device."""
    return not isinstance(rows, torch.Tensor) or rows.device.type == "cpu"


def check_device_rows(name: str, rows: RowIndices, device: torch.device) -> torch.Tensor:
    """Checks what can be checked of rows on a device without waiting for it.

    Raises:
        InvalidArgumentError: The rows are not a contiguous 1-D int32 or int64 tensor on ``device``.
    """
    if not isinstance(rows, torch.Tensor) or rows.device != device:
        given = rows.device if isinstance(rows, torch.Tensor) else "the host"
        raise InvalidArgumentError(
            f"source and destination rows must both be on the host or both on {device}, "
            f"got {name} on {given}"
        )
    is_int = rows.dtype in (torch.int32, torch.int64)
    if not is_int or rows.dim() != 1 or not rows.is_contiguous():
        raise InvalidArgumentError(
            f"{name} must be contiguous, 1-D, and int32 or int64, got shape {tuple(rows.shape)}, "
            f"strides {rows.stride()}, {rows.dtype}"
        )
    return rows


def check_host_rows(
    source_rows: RowIndices,
    destination_rows: RowIndices,
    *,
    num_source_rows: int,
    num_destination_rows: int,
    in_place: bool,
) -> _HostRows:
    """Checks rows on the host.

    Args:
        source_rows: [n]; ``PAD_SLOT_ID`` and ``ZERO_SOURCE`` are allowed.
        destination_rows: [n]; ``PAD_SLOT_ID`` is allowed.
        num_source_rows: Rows of the tensors read.
        num_destination_rows: Rows of the tensors written.
        in_place: Both are the same tensors.

    Returns:
        [2, n] int64: the sources, then the destinations.

    Raises:
        InvalidArgumentError: As in ``StateCopier.copy``.
    """
    sources = _as_array("source_rows", source_rows)
    destinations = _as_array("destination_rows", destination_rows)
    if len(sources) != len(destinations):
        raise InvalidArgumentError(
            f"source_rows and destination_rows must be equally many, "
            f"got {len(sources)} and {len(destinations)}"
        )
    _check_range("source_rows", sources, min(PAD_SLOT_ID, ZERO_SOURCE), num_source_rows)
    _check_range("destination_rows", destinations, PAD_SLOT_ID, num_destination_rows)
    used = (sources != PAD_SLOT_ID) & (destinations != PAD_SLOT_ID)
    _check_conflicts(sources[used], destinations[used], in_place=in_place)
    return np.stack([sources, destinations])


def _as_array(name: str, rows: RowIndices) -> _HostRows:
    array = np.asarray(rows)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise InvalidArgumentError(
            f"{name} must be 1-D and int32 or int64, got shape {array.shape}, {array.dtype}"
        )
    return array.astype(np.int64, copy=False)


def _check_range(name: str, rows: _HostRows, least: int, num_rows: int) -> None:
    outside = rows[(rows < least) | (rows >= num_rows)]
    if outside.size:
        raise InvalidArgumentError(
            f"{name} must be in [0, {num_rows}) or a negative constant >= {least}, "
            f"got {outside.tolist()}"
        )


def _check_conflicts(sources: _HostRows, destinations: _HostRows, *, in_place: bool) -> None:
    rows, counts = np.unique(destinations, return_counts=True)
    if len(rows) < len(destinations):
        raise InvalidArgumentError(
            f"each destination row may be listed once, got {rows[counts > 1].tolist()} repeatedly"
        )
    both = np.intersect1d(sources, destinations) if in_place else rows[:0]
    if both.size:
        raise InvalidArgumentError(
            f"in one set of tensors a row cannot be both read and written, got {both.tolist()}"
        )
