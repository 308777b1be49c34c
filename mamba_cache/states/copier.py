"""Batched copies of whole states: checked here, copied by a kernel or its PyTorch twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from mamba_cache._checks import as_ids
from mamba_cache._torch import PAD_SLOT_ID, ZERO_SOURCE, outside_inference_mode, to_device
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states.kernels import CopyBackend, kernels_for, twins
from mamba_cache.states.kernels.twins import Quantized, RowCopy

__all__ = ["RowIndices", "StateCopier"]

_KERNELS = "mamba_cache.states.kernels.copy"
_QUANTIZED_DIMS = 3

RowIndices: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | torch.Tensor"
"""[n] row indices: a sequence of ints, a numpy array, or a tensor."""


class StateCopier:
    """Copies rows between two sets of tensors, all layers of all tensors in one launch.

    Addresses are read only when the copier is made: the tensors must keep their storage. Sources
    and destinations may be the same tensors, if no row is both read and written in one call. Views
    that share bytes in another way are not detected, and must not be used.

    For a floating-point tensor on one side the other side may have two tensors, int8 codes and then
    scales, in the order of ``SlotQuantization.slot_spec``. Copying to them quantises, and copying
    from them dequantises. Each quantised tensor takes one launch; the first launch also copies all
    tensors that are not quantised.

    Args:
        sources: At least one tensor [num_layers, source rows, *inner], inner axes contiguous, any
            strides of layers and rows. All have the same number of rows and are on one device.
        destinations: One tensor for each source, with the same dtype, number of layers and inner
            shape, on the same device; all have the same number of rows. For floating-point states
            [num_layers, rows, heads, head_dim, state_dim] either side may have int8 codes of that
            shape, with its own rows, and float32 scales [num_layers, rows, heads, state_dim].
        backend: "torch", "triton", or "auto": the kernel on CUDA, PyTorch elsewhere.

    Raises:
        InvalidArgumentError: The tensors do not fit each other, or the backend is unknown or not
            for their device.
        MissingExtraError: The backend is "triton" and Triton is not installed.
    """

    @outside_inference_mode
    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        *,
        backend: CopyBackend = "auto",
    ) -> None:
        unchanged, quantized = _match(sources, destinations)
        self._device = sources[0].device
        self._num_source_rows = sources[0].shape[1]
        self._num_destination_rows = destinations[0].shape[1]
        read = {tensor.data_ptr() for tensor in sources if tensor.numel()}
        self._in_place = any(tensor.data_ptr() in read for tensor in destinations)
        kernels = kernels_for(backend, self._device, kernels=_KERNELS, twins=twins)
        self._takes_lists = kernels is twins  # the PyTorch twins take rows as lists
        self._kept_alive = (*sources, *destinations)  # kernels hold addresses only
        self._launches: list[RowCopy] = [
            kernels.copy_states([] if i else unchanged, each, self._device)
            for i, each in enumerate(quantized or [None])
        ]

    def copy(self, source_rows: RowIndices, destination_rows: RowIndices) -> None:
        """Copy ``source_rows[i]`` to ``destination_rows[i]`` for every i.

        ``PAD_SLOT_ID`` in either skips the pair; the source ``ZERO_SOURCE`` clears the destination.
        Rows on the host are checked, then sent without waiting for the device. Reading rows on a
        CUDA device would wait for it, so only their number and dtype are checked: a row past the
        end accesses other memory, and of duplicate destinations any write may be last.

        While a CUDA graph is captured, rows must be on the device: each replay reads them there.

        Args:
            source_rows: [n] ints: a sequence, a numpy array, a tensor on the CPU, or an int32 or
                int64 tensor on the copier's device.
            destination_rows: [n] ints likewise, on the host or device like ``source_rows``.

        Raises:
            InvalidArgumentError: The lengths, dtypes or devices do not fit, rows on the host are to
                be captured, or, on the host, a row is out of range, a destination is listed twice,
                or a row of the same tensors is both read and written. Nothing was copied.
        """
        are_lists = _is_on_host(source_rows) and _is_on_host(destination_rows)
        if are_lists:
            # ``PAD_SLOT_ID`` and ``ZERO_SOURCE`` are negative.
            stops = self._num_source_rows, self._num_destination_rows
            sources = as_ids("source_rows", source_rows, stops[0], start=ZERO_SOURCE)
            destinations = as_ids("destination_rows", destination_rows, stops[1], start=PAD_SLOT_ID)
        else:
            sources = _check_device_rows("source_rows", source_rows, self._device)
            destinations = _check_device_rows("destination_rows", destination_rows, self._device)
        if len(sources) != len(destinations):
            raise InvalidArgumentError(
                f"source_rows and destination_rows must be equally many, "
                f"got {len(sources)} and {len(destinations)}"
            )
        num_pairs = len(sources)
        if are_lists:
            sources, destinations, num_pairs = self._real_rows(sources, destinations)
        for launch in self._launches:
            launch(sources, destinations, num_pairs)

    def copy_own(self, source_rows: Any, destination_rows: Any) -> None:
        """Do what ``copy`` does, without checks, for rows that a context has made.

        Rows are tensors on the device, or lists on the CPU.
        """
        for launch in self._launches:
            launch(source_rows, destination_rows, len(source_rows))

    def _real_rows(self, sources: list[int], destinations: list[int]) -> tuple[Any, Any, int]:
        """Check rows on the host; return the unpadded rows where launches read them, and count."""
        if PAD_SLOT_ID in sources or PAD_SLOT_ID in destinations:
            pairs = zip(sources, destinations, strict=True)
            real = [pair for pair in pairs if PAD_SLOT_ID not in pair]
            sources, destinations = [source for source, _ in real], [target for _, target in real]
        written = set(destinations)
        if len(written) < len(destinations):
            repeated = sorted(row for row in written if destinations.count(row) > 1)
            raise InvalidArgumentError(
                f"each destination row may be listed once, got {repeated} repeatedly"
            )
        both = written.intersection(sources) if self._in_place else ()
        if both:
            raise InvalidArgumentError(
                f"in one set of tensors a row cannot be both read and written, got {sorted(both)}"
            )
        if self._takes_lists:
            return sources, destinations, len(sources)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidArgumentError(
                "rows on the host cannot be captured in a CUDA graph, which would repeat them for "
                "ever: give them in tensors on the device"
            )
        rows = torch.from_numpy(np.array((sources, destinations), dtype=np.int32))
        on_device = to_device(rows, self._device)
        return on_device[0], on_device[1], len(sources)


def _is_on_host(rows: RowIndices) -> bool:
    """Return whether rows can be read without waiting for a device."""
    return not isinstance(rows, torch.Tensor) or rows.device.type == "cpu"


def _check_device_rows(name: str, rows: RowIndices, device: torch.device) -> Any:
    """Check device, dtype and layout of rows on a device, without waiting for it."""
    if not isinstance(rows, torch.Tensor) or rows.device != device:
        given = rows.device if isinstance(rows, torch.Tensor) else "the host"
        raise InvalidArgumentError(
            f"source and destination rows must both be on the host or both on {device}, "
            f"got {name} on {given}"
        )
    is_int = rows.dtype in (torch.int32, torch.int64)
    if not is_int or rows.dim() != 1 or not rows.is_contiguous():
        raise InvalidArgumentError(
            f"{name} must be contiguous, 1-D and int32 or int64, got shape {tuple(rows.shape)}, "
            f"strides {rows.stride()}, {rows.dtype}"
        )
    return rows


_Pairs: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor]]"


def _match(
    sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]
) -> tuple[_Pairs, list[Quantized]]:
    """Check tensors; return the pairs that are copied unchanged and those that are quantised."""
    _check_side("sources", sources)
    _check_side("destinations", destinations)
    read, written = list(sources), list(destinations)
    unchanged: _Pairs = []
    quantized: list[Quantized] = []
    while read and written:
        source, destination = read.pop(0), written.pop(0)
        if source.is_floating_point() and destination.dtype == torch.int8 and written:
            quantized.append((source, destination, written.pop(0), True))
        elif destination.is_floating_point() and source.dtype == torch.int8 and read:
            quantized.append((destination, source, read.pop(0), False))
        else:
            unchanged.append((source, destination))
    if not sources or read or written:
        raise InvalidArgumentError(
            f"give at least one source, and as many destinations, "
            f"got {len(sources)} and {len(destinations)}"
        )
    devices = {tensor.device for tensor in (*sources, *destinations)}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise InvalidArgumentError(f"all tensors must be on one device, got {names}")
    for source, destination in unchanged:
        if _kind(source) != _kind(destination):
            raise InvalidArgumentError(
                f"paired tensors must agree in dtype, layers and inner shape, "
                f"got {_kind(source)} and {_kind(destination)}"
            )
    for *tensors, _ in quantized:
        (_, layers, inner), codes, scales = kinds = [_kind(tensor) for tensor in tensors]
        fits = len(inner) == _QUANTIZED_DIMS and codes[1:] == (layers, inner)
        if not fits or scales != (torch.float32, layers, (inner[0], inner[2])):
            raise InvalidArgumentError(
                "quantised states must have inner axes [heads, head_dim, state_dim], codes the "
                f"same, and scales [heads, state_dim] in float32, got {kinds}"
            )
    return unchanged, quantized


def _check_side(side: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check that tensors have equally many rows and contiguous inner axes."""
    is_sequence = isinstance(tensors, (list, tuple))
    if not is_sequence or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise InvalidArgumentError(f"{side} must be tensors in a list or tuple, got {tensors!r}")
    for tensor in tensors:
        if tensor.dim() < 2 or (tensor.numel() and not tensor[0, 0].is_contiguous()):
            raise InvalidArgumentError(
                f"{side} must be [num_layers, rows, *inner] with contiguous inner axes, "
                f"got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
    if len({tensor.shape[1] for tensor in tensors}) > 1:
        rows = [tensor.shape[1] for tensor in tensors]
        raise InvalidArgumentError(f"all {side} must have equally many rows, got {rows}")


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, int, tuple[int, ...]]:
    return tensor.dtype, tensor.shape[0], tuple(tensor.shape[2:])
