"""What all batched copies of states share: their rows, checked here and brought to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states._row_ring import RowRing
from mamba_cache.states._rows import RowIndices, check_device_rows, check_host_rows, is_on_host

__all__ = ["RowMover", "check_are_tensors", "check_devices", "check_side", "check_tensors"]

_MOST_PAIRS_SENT = 1024
"""Longer lists of rows on the host take a launch for each so many pairs."""


class RowMover:
    """Copies rows between two sets of tensors by a launch that it is given.

    Args:
        sources: Checked tensors, each [num_layers, source rows, *inner].
        destinations: Likewise.
        launch: Copies rows, given as [at least n] tensors on the device, and n.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        launch: Callable[[torch.Tensor, torch.Tensor, int], None],
    ) -> None:
        self._device = sources[0].device
        self._num_source_rows = sources[0].shape[1]
        self._num_destination_rows = destinations[0].shape[1]
        read = {tensor.data_ptr() for tensor in sources if tensor.numel()}
        self._in_place = any(tensor.data_ptr() in read for tensor in destinations)
        self._launch = launch
        on_cuda = self._device.type == "cuda"
        capacity = max(1, min(self._num_destination_rows, _MOST_PAIRS_SENT))
        self._ring = RowRing(capacity, self._device) if on_cuda else None

    def copy(self, source_rows: RowIndices, destination_rows: RowIndices) -> None:
        """Copies ``source_rows[i]`` to ``destination_rows[i]`` for every i.

        ``PAD_SLOT_ID`` in either skips the pair; the source ``ZERO_SOURCE`` clears the destination.
        Rows on the host are checked, then sent without waiting for the device. Rows on a CUDA
        device cannot be read without waiting for it, so there only their number and dtype are
        checked: a row past the end is foreign memory, and of duplicate destinations any may win.

        While a CUDA graph is captured, rows must be on the device: the graph reads them there anew
        at each replay.

        Args:
            source_rows: [n] ints: a sequence, numpy, or a tensor on the CPU or on the copier's
                device; int32 or int64.
            destination_rows: The same, on the host or on the device as ``source_rows`` are.

        Raises:
            InvalidArgumentError: The lengths, dtypes or devices do not fit, rows on the host are to
                be captured, or, on the host, a row is out of range, a destination is listed twice,
                or a row of the same tensors is both read and written. Nothing was copied.
        """
        if is_on_host(source_rows) and is_on_host(destination_rows):
            self._copy_host_rows(source_rows, destination_rows)
            return
        sources = check_device_rows("source_rows", source_rows, self._device)
        destinations = check_device_rows("destination_rows", destination_rows, self._device)
        if sources.shape != destinations.shape:
            raise InvalidArgumentError(
                f"source_rows and destination_rows must be equally many, "
                f"got {len(sources)} and {len(destinations)}"
            )
        self._launch(sources, destinations, sources.shape[0])

    def _copy_host_rows(self, source_rows: RowIndices, destination_rows: RowIndices) -> None:
        sources, destinations = check_host_rows(
            source_rows,
            destination_rows,
            num_source_rows=self._num_source_rows,
            num_destination_rows=self._num_destination_rows,
            in_place=self._in_place,
        )
        if self._ring is None:
            rows = torch.tensor([sources, destinations], device="cpu")
            self._launch(rows[0], rows[1], len(sources))
            return
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgumentError(
                "rows on the host cannot be captured in a CUDA graph, which would repeat them for "
                "ever: give them in tensors on the device"
            )
        for first in range(0, len(sources), self._ring.capacity):
            part = slice(first, first + self._ring.capacity)
            sent = self._ring.send(sources[part], destinations[part])
            self._launch(sent[0], sent[1], len(sources[part]))
            self._ring.mark_used()


def check_tensors(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Checks that two sets of tensors can be copied into each other.

    Raises:
        InvalidArgumentError: As in ``StateCopier``.
    """
    check_are_tensors("sources", sources)
    check_are_tensors("destinations", destinations)
    if not sources or len(sources) != len(destinations):
        raise InvalidArgumentError(
            f"give at least one source, and as many destinations, "
            f"got {len(sources)} and {len(destinations)}"
        )
    check_side("sources", sources)
    check_side("destinations", destinations)
    check_devices(*sources, *destinations)
    for source, destination in zip(sources, destinations, strict=True):
        if _kind(source) != _kind(destination):
            raise InvalidArgumentError(
                f"paired tensors must agree in dtype, layers and inner shape, "
                f"got {_kind(source)} and {_kind(destination)}"
            )


def check_are_tensors(name: str, tensors: Any) -> None:
    """Checks that ``tensors`` is a list or tuple of tensors.

    Raises:
        InvalidArgumentError: It is not.
    """
    is_sequence = isinstance(tensors, (list, tuple))
    if not is_sequence or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise InvalidArgumentError(f"{name} must be tensors in a list or tuple, got {tensors!r}")


def check_side(side: str, tensors: Sequence[torch.Tensor]) -> None:
    """Checks that tensors hold parts of the same states, laid out so that they can be copied.

    Args:
        side: What they are, for the message.
        tensors: Each [num_layers, rows, *inner].

    Raises:
        InvalidArgumentError: Inner axes are not contiguous, or not all have equally many rows.
    """
    for tensor in tensors:
        _check_layout(side, tensor)
    if len({tensor.shape[1] for tensor in tensors}) > 1:
        rows = [tensor.shape[1] for tensor in tensors]
        raise InvalidArgumentError(f"all {side} must have equally many rows, got {rows}")


def check_devices(*tensors: torch.Tensor) -> None:
    """Checks that tensors are on one device.

    Raises:
        InvalidArgumentError: They are not.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise InvalidArgumentError(f"all tensors must be on one device, got {names}")


def _check_layout(side: str, tensor: torch.Tensor) -> None:
    if tensor.dim() < 2 or (tensor.numel() and not tensor[0, 0].is_contiguous()):
        raise InvalidArgumentError(
            f"{side} must be [num_layers, rows, *inner] with contiguous inner axes, "
            f"got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, int, tuple[int, ...]]:
    return tensor.dtype, tensor.shape[0], tuple(tensor.shape[2:])
