"""Checksums of many tensors: whether any of them is another than it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError, MissingExtraError
from mamba_cache.states._backend import CopyBackend, kernels_for
from mamba_cache.states.kernels import checksum_torch
from mamba_cache.states.kernels.checksum_plan import CHUNK_BYTES, plan_checksums

__all__ = ["RowChecksums", "TensorChecksums", "bytes_of"]

_KERNELS = "mamba_cache.states.kernels.checksum"


class TensorChecksums:
    """Remembers what tensors on one device hold, to the bit, and tells whether they still do.

    On a GPU ``start`` enqueues one launch over all tensors on the current stream and returns;
    ``is_unchanged`` waits for that launch, not for what was enqueued after it.

    Args:
        tensors: Of any dtype and strides, on one device. None empty.
        backend: Who measures: "auto" is the Triton kernel on CUDA and PyTorch elsewhere.

    Attributes:
        device: Where the tensors are.

    Raises:
        InvalidArgumentError: The tensors are on several devices, or there is none, or one has no
            memory of its own that could be read, or the backend is unknown or not for them.
    """

    @outside_inference_mode
    def __init__(self, tensors: Sequence[torch.Tensor], *, backend: CopyBackend = "auto") -> None:
        devices = sorted({str(tensor.device) for tensor in tensors})
        if len(devices) != 1:
            raise InvalidArgumentError(f"tensors must be on one device, got {devices}")
        self.device = tensors[0].device
        self._measure = _measure_for(backend, self.device)
        # A tensor with gaps between its elements is copied together before each measurement.
        self._gapped = [
            (tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format))
            for tensor in tensors
            if _span(tensor) is None
        ]
        copies = iter(self._gapped)
        parts = [bytes_of(next(copies)[1] if _span(t) is None else t) for t in tensors]
        self._plan = plan_checksums(parts)
        number = self._plan.num_chunks
        self._expected = torch.zeros(number, dtype=torch.int64, device=self.device)
        self._sums = torch.zeros(number, dtype=torch.int64, device=self.device)
        self._changed = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._verdict = self._changed
        self._done: Any = None
        if self.device.type == "cuda":
            self._verdict = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Bytes that a whole measurement reads."""
        return sum(tensor.numel() for tensor in self._plan.tensors)

    def measure(self) -> list[bytes]:
        """Return the checksum of each tensor now, which are expected from then on. It waits."""
        self._copy_gapped()
        self._measure(self._plan, self._expected, self._expected, self._changed, 1, 0)
        sums, heads = self._expected.cpu(), self._plan.num_heads
        starts = [*self._plan.rest_starts, self._plan.num_chunks]
        return [
            torch.cat([sums[i : i + 1], sums[starts[i] : starts[i + 1]]]).numpy().tobytes()
            for i in range(heads)
        ]

    def start(self, *, stride: int = 1, phase: int = 0) -> None:
        """Begin to compare the tensors with what is expected.

        Args:
            stride: Compare the first 64 KiB of each tensor, and of all that follow in them only
                each so-many-th 64 KiB.
            phase: Which of those, 0 <= phase < stride.
        """
        self._copy_gapped()
        self._changed.zero_()
        self._measure(self._plan, self._expected, self._sums, self._changed, stride, phase)
        if self._done is not None:
            self._verdict.copy_(self._changed, non_blocking=True)
            self._done.record(torch.cuda.current_stream(self.device))

    def is_unchanged(self) -> bool:
        """Say whether all that ``start`` compared was as expected. It waits for that."""
        if self._done is not None:
            self._done.synchronize()
        return not self._verdict.item()

    def _copy_gapped(self) -> None:
        for tensor, copy in self._gapped:
            copy.copy_(tensor.detach())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor without gaps, [bytes] uint8, not copied, of whatever dtype.

    Raises:
        InvalidArgumentError: It has no memory of its own that could be read, or has gaps.
    """
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
    """Count the elements from a tensor's first to its last, None if some between are not its."""
    sizes_and_strides = [
        (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if stride != 0
    ]
    span = 1 + sum((size - 1) * stride for size, stride in sizes_and_strides)
    count = 1
    for size, _ in sizes_and_strides:
        count *= size
    return span if span <= count else None


def _measure_for(backend: CopyBackend, device: torch.device) -> Callable[..., None]:
    twin: Callable[..., None] = checksum_torch.checksum
    try:
        kernels = kernels_for(backend, device, kernels=_KERNELS, twins=checksum_torch)
    except MissingExtraError:  # slower, and the same sums
        return twin
    measure: Callable[..., None] = kernels.checksum
    return measure


class RowChecksums:
    """Checksums of rows of bytes at fixed addresses, each beside its row, on one device.

    On a GPU each call enqueues one launch on the current stream, and nothing waits.

    Args:
        rows: [bytes] uint8 each, contiguous, at multiples of 16.
        sums: For each row [at least ``num_sums``] int64: where its checksums stand.
        backend: As for ``TensorChecksums``.

    Raises:
        InvalidArgumentError: The backend is unknown or not for them.
    """

    @outside_inference_mode
    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        sums: Sequence[torch.Tensor],
        *,
        backend: CopyBackend = "auto",
    ) -> None:
        device = rows[0].device
        self._measure = _measure_for(backend, device)
        self._plans = [plan_checksums([row]) for row in rows]
        self._sums = [each[: self._plans[0].num_chunks] for each in sums]
        self._found = torch.zeros_like(self._sums[0])
        self._ignored = torch.zeros(1, dtype=torch.int32, device=device)

    @staticmethod
    def num_sums(num_bytes: int) -> int:
        """Return how many checksums a row of so many bytes has."""
        return -(-num_bytes // CHUNK_BYTES)

    def write(self, row: int) -> None:
        """Write the checksums of a row beside it."""
        sums = self._sums[row]
        self._measure(self._plans[row], sums, sums, self._ignored, 1, 0)

    def compare(self, row: int, changed: torch.Tensor) -> None:
        """Compare a row with the checksums beside it.

        Args:
            row: The row.
            changed: [1] int32; becomes 1 if they are not its.
        """
        self._measure(self._plans[row], self._sums[row], self._found, changed, 1, 0)
