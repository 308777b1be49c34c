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
) -> tuple[list[int], list[int]]:
    """Checks rows on the host.

    Args:
        source_rows: [n]; ``PAD_SLOT_ID`` and ``ZERO_SOURCE`` are allowed.
        destination_rows: [n]; ``PAD_SLOT_ID`` is allowed.
        num_source_rows: Rows of the tensors read.
        num_destination_rows: Rows of the tensors written.
        in_place: Both are the same tensors.

    Returns:
        The sources and the destinations of the pairs that are not padding.

    Raises:
        InvalidArgumentError: As in ``StateCopier.copy``.
    """
    sources = _as_list("source_rows", source_rows)
    destinations = _as_list("destination_rows", destination_rows)
    if len(sources) != len(destinations):
        raise InvalidArgumentError(
            f"source_rows and destination_rows must be equally many, "
            f"got {len(sources)} and {len(destinations)}"
        )
    _check_range("source_rows", sources, min(PAD_SLOT_ID, ZERO_SOURCE), num_source_rows)
    _check_range("destination_rows", destinations, PAD_SLOT_ID, num_destination_rows)
    if PAD_SLOT_ID in sources or PAD_SLOT_ID in destinations:
        pairs = zip(sources, destinations, strict=True)
        real = [pair for pair in pairs if PAD_SLOT_ID not in pair]
        sources, destinations = [source for source, _ in real], [target for _, target in real]
    _check_conflicts(sources, destinations, in_place=in_place)
    return sources, destinations


def _as_list(name: str, rows: RowIndices) -> list[int]:
    if isinstance(rows, list) and set(map(type, rows)) == {int}:
        return rows
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{name} must be 1-D and int32 or int64, got {rows!r}"
        ) from error
    is_int = array.dtype.kind == "i" and array.dtype.itemsize >= np.dtype(np.int32).itemsize
    if array.ndim != 1 or (array.size and not is_int):
        raise InvalidArgumentError(
            f"{name} must be 1-D and int32 or int64, got shape {array.shape}, {array.dtype}"
        )
    as_list: list[int] = array.tolist()
    return as_list


def _check_range(name: str, rows: list[int], least: int, num_rows: int) -> None:
    if rows and (min(rows) < least or max(rows) >= num_rows):
        outside = [row for row in rows if not least <= row < num_rows]
        raise InvalidArgumentError(
            f"{name} must be in [0, {num_rows}) or a negative constant >= {least}, got {outside}"
        )


def _check_conflicts(sources: list[int], destinations: list[int], *, in_place: bool) -> None:
    written = set(destinations)
    if len(written) < len(destinations):
        repeated = sorted(row for row in written if destinations.count(row) > 1)
        raise InvalidArgumentError(
            f"each destination row may be listed once, got {repeated} repeatedly"
        )
    both = written.intersection(sources) if in_place else ()
    if both:
        raise InvalidArgumentError(
            f"in one set of tensors a row cannot be both read and written, got {sorted(both)}"
        )
