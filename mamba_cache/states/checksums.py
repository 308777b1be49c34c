"""Checksums of many tensors, to detect changes, and checksums of entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mamba_cache._torch import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.states.kernels import CopyBackend, checksum_torch, kernels_for
from mamba_cache.states.kernels.checksum_torch import CHUNK_BYTES, plan_checksums

__all__ = ["CHUNK_BYTES", "EntryChecksums", "TensorChecksums", "bytes_of"]

_KERNELS = "mamba_cache.states.kernels.checksum"

_PROGRAMS_PER_SM = 4
"""Enough to read at the speed of memory, and few enough that small kernels run at the same time."""


class TensorChecksums:
    """Detects changes of any bit in tensors on one device.

    On a GPU ``start`` enqueues one launch over all tensors, after the work of the current stream.
    ``is_unchanged`` waits for that launch; neither ``start`` nor the current stream does.
    """

    @outside_inference_mode
    def __init__(self, tensors: Sequence[torch.Tensor], *, backend: CopyBackend = "auto") -> None:
        devices = sorted({str(tensor.device) for tensor in tensors})
        if len(devices) != 1:
            raise InvalidArgumentError(f"tensors must be on one device, got {devices}")
        self.device = tensors[0].device
        try:
            kernels = kernels_for(backend, self.device, kernels=_KERNELS, twins=checksum_torch)
        except MissingExtraError:  # the twin is slower, but gives the same sums
            kernels = checksum_torch
        self._kernel = kernels.checksum
        # A tensor with gaps between its elements is copied to one without before each measurement.
        self._gapped = [
            (tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format))
            for tensor in tensors
            if _span(tensor) is None
        ]
        copies = iter(self._gapped)
        parts = [bytes_of(next(copies)[1] if _span(t) is None else t)[None] for t in tensors]
        # The first chunk of each tensor comes before all other chunks.
        heads = [part[:, :CHUNK_BYTES] for part in parts]
        self._plan = plan_checksums(heads + [part[:, CHUNK_BYTES:] for part in parts])
        # The expected sums; the twin writes them to host memory.
        place = torch.device("cpu") if kernels is checksum_torch else self.device
        self._sums = torch.zeros(self._plan.num_chunks, dtype=torch.int64, device=place)
        self._entry = torch.tensor([[0, self._sums.data_ptr()]], device=self.device)
        self._changed = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._verdict = self._changed
        self._programs = 1
        self._done: Any = None
        self._stream: Any = None
        if self.device.type == "cuda":
            self._verdict = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._programs = _PROGRAMS_PER_SM * _num_sms(self.device)

    def measure(self) -> list[bytes]:
        """Return the checksum of each tensor, and expect these sums from now on; wait for them."""
        if self._done is not None:
            self._done.synchronize()
        self._measure(None)
        parts = torch.split(self._sums.cpu(), np.diff(self._plan.bounds).tolist())
        pairs = zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)
        return [torch.cat(pair).numpy().tobytes() for pair in pairs]

    def start(self, *, stride: int = 1, phase: int = 0) -> None:
        """Begin to compare the tensors with the expected sums."""
        if self._done is None:
            self._measure(self._changed, stride, phase)
            return
        # On its own stream, so that later work of the current stream does not wait for it.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._measure(self._changed, stride, phase)
            self._verdict.copy_(self._changed, non_blocking=True)
            self._done.record(self._stream)

    def _measure(self, changed: torch.Tensor | None, stride: int = 1, phase: int = 0) -> None:
        for tensor, copy in self._gapped:
            copy.copy_(tensor.detach())
        self._changed.zero_()
        plan = self._plan
        heads = plan.bounds[len(plan.parts) // 2]
        others = range(heads + phase, plan.num_chunks, stride)
        self._kernel(plan, self._entry, changed, slice(0, 1), heads, others, self._programs)

    def is_unchanged(self) -> bool:
        """Return whether all sums that ``start`` compared were as expected; wait for the result."""
        if self._done is not None:
            self._done.synchronize()
        return not self._verdict.item()


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor of any dtype without gaps, as a view [bytes] uint8."""
    try:
        span, storage = _span(tensor), tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as error:
        raise InvalidArgumentError(f"the tensor has no memory to read: {error}") from error
    if span is None:
        raise InvalidArgumentError("the tensor must have no gaps between its elements")
    size = tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset() * size, (span * size,), (1,))


def _span(tensor: torch.Tensor) -> int | None:
    """Return the number of elements from a tensor's first to its last; None if there are gaps."""
    sizes_and_strides = [
        (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if stride != 0
    ]
    span = 1 + sum((size - 1) * stride for size, stride in sizes_and_strides)
    count = math.prod(size for size, _ in sizes_and_strides)
    return span if span <= count else None


class EntryChecksums:
    """Checksums of entries in tensors on one device, stored in the entries' rows in host memory.

    An entry is one row of each tensor, over all layers: a slot, or a KV block. It has one checksum
    for each 64 KiB of each layer of each tensor, in that order. On a GPU each call enqueues one
    launch on the current stream, and does not wait.
    """

    @outside_inference_mode
    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        sums_start: int,
        *,
        programs: int | None = None,
        backend: CopyBackend = "auto",
    ) -> None:
        device = tensors[0].device
        bytes_of_places = [tensor.unsqueeze(-1).view(torch.uint8).flatten(2) for tensor in tensors]
        parts = [layer for tensor in bytes_of_places for layer in tensor]
        self._plan = plan_checksums(parts, sums_start=sums_start)
        if programs is None and device.type == "cuda":
            programs = _num_sms(device)
        self._programs = programs or 1
        self._kernels = kernels_for(backend, device, kernels=_KERNELS, twins=checksum_torch)
        self.num_sums = self._plan.num_chunks  # for one entry

    @staticmethod
    def count(tensors: Sequence[torch.Tensor]) -> int:
        """Return the number of checksums of one entry of these tensors."""
        sizes = [(len(x), math.prod(x.shape[2:]) * x.element_size()) for x in tensors]
        return sum(layers * -(-size // CHUNK_BYTES) for layers, size in sizes)

    def measure(
        self,
        entries: torch.Tensor,
        which: slice,
        chunks: slice,
        changed: torch.Tensor | None = None,
    ) -> None:
        """Write checksums of some ``chunks`` of the entries ``which`` to their rows.

        With ``changed`` compare them with the stored sums, and write 1 for each entry that differs.
        """
        others = range(chunks.start, chunks.stop)
        self._kernels.checksum(self._plan, entries, changed, which, 0, others, self._programs)

    def fetch(self, entries: torch.Tensor, sums: torch.Tensor, which: slice) -> None:
        """Copy the checksums of entries from their rows, all at once.

        A comparison would read one sum at a time, and wait for the link each time.
        """
        self._kernels.fetch_checksums(self._plan, entries, sums, which)
