"""Pinned buffers: ``CpuGpuBuffer``, and the lists of copies in ``MambaCopyBuffers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.copy_specs import CopyFuncs, count_states
from mamba_cache.integrations.vllm.mamba_spec import shared_schedule
from mamba_cache.integrations.vllm.protocols import (
    HostDeviceBuffer,
    KVCacheConfig,
    MakeBuffer,
    StateSpecView,
)
from mamba_cache.states import CopyBackend

__all__ = ["CpuGpuBuffer", "MambaCopyBuffers", "Region", "wait_until_sent"]


class CpuGpuBuffer:
    """One array twice: pinned on the host, and on the device.

    Args:
        n: Elements.
        dtype: Their dtype.
        device: Where ``gpu`` lives. On the CPU both sides are memory of their own all the same, so
            that what runs there runs alike on a GPU.

    Attributes:
        np: [n] numpy view of ``cpu``.
        cpu: [n], pinned if the device is a GPU.
        gpu: [n] on the device.
    """

    @outside_inference_mode
    def __init__(self, n: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        device = torch.device(device)
        on_cuda = device.type == "cuda"
        self.cpu = torch.zeros(n, dtype=dtype, device="cpu", pin_memory=on_cuda)
        self.gpu = torch.zeros(n, dtype=dtype, device=device)
        self.np: Any = self.cpu.numpy()
        self._sent = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Enqueue the copy of the first ``n`` elements, or of all.

        The host side must not change before the copy is done: see ``wait``.

        Args:
            n: How many.

        Returns:
            The copied elements on the device.
        """
        copied = self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)
        if self._sent:
            self._sent.record()
        return copied

    def wait(self) -> None:
        """Wait until the host side may change: until what was enqueued last has been copied.

        It has been, unless the host runs more than a step ahead of the device.
        """
        if self._sent:
            self._sent.synchronize()


class Region(NamedTuple):
    """Bytes to copy: ``num_rows`` rows of ``size`` bytes each.

    Where source and destination overlap, the source lies after the destination, and the bytes are
    moved in pieces of ``piece_bytes``, each row's from first to last.

    Attributes:
        source: Address of the first row's first byte.
        destination: The same of what is written.
        size: Bytes of a row.
        num_rows: Rows.
        row_stride: Bytes from row to row.
        piece_bytes: Bytes that may be moved at once; 0 where nothing overlaps.
    """

    source: int
    destination: int
    size: int
    num_rows: int
    row_stride: int
    piece_bytes: int


@dataclass(slots=True)
class MambaCopyBuffers:
    """The copies of a batch, one entry for each request, layer and state.

    Attributes:
        src_ptrs: Source addresses, int64.
        dst_ptrs: Destination addresses, int64.
        sizes: Bytes of a row, int64.
        num_rows: Rows, int64.
        row_strides: Bytes from row to row, int64.
        piece_bytes: Bytes that may be moved at once, or 0, int64.
        mamba_group_ids: The Mamba groups.
        mamba_spec: How their states are scheduled.
        offset: Entries in use.
        backend: "torch", "triton", or "auto": the kernel on CUDA, plain Python elsewhere.
    """

    src_ptrs: HostDeviceBuffer
    dst_ptrs: HostDeviceBuffer
    sizes: HostDeviceBuffer
    num_rows: HostDeviceBuffer
    row_strides: HostDeviceBuffer
    piece_bytes: HostDeviceBuffer
    mamba_group_ids: list[int]
    mamba_spec: StateSpecView
    offset: int = 0
    backend: CopyBackend = "auto"

    @classmethod
    @outside_inference_mode
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: KVCacheConfig,
        copy_funcs: CopyFuncs,
        make_buffer: MakeBuffer,
    ) -> MambaCopyBuffers:
        """Make buffers for the copies of ``max_num_reqs`` requests.

        Args:
            max_num_reqs: The most requests of a batch.
            kv_cache_config: Names the layers of each group.
            copy_funcs: One for each kind of state, by kind of layer.
            make_buffer: Called as ``make_buffer(n, dtype=...)``.

        Raises:
            InvalidArgumentError: There is no Mamba group, two are scheduled differently, or a kind
                of layer has no copy functions.
        """
        group_ids, spec = shared_schedule(kv_cache_config)
        num_states = count_states(kv_cache_config, group_ids, copy_funcs)
        count = max_num_reqs * num_states
        one, two, three, four, five, six = (
            make_buffer(count, dtype=torch.int64) for _ in Region._fields
        )
        return cls(one, two, three, four, five, six, group_ids, spec)

    @property
    def columns(self) -> tuple[HostDeviceBuffer, ...]:
        """The buffers in the order of ``Region``'s fields."""
        return (
            self.src_ptrs,
            self.dst_ptrs,
            self.sizes,
            self.num_rows,
            self.row_strides,
            self.piece_bytes,
        )

    def check_room(self, count: int) -> None:
        """Check that ``count`` copies fit.

        Raises:
            InvalidArgumentError: They do not.
        """
        if count > len(self.sizes.np):
            raise InvalidArgumentError(
                f"the copy buffers hold {len(self.sizes.np)} copies, got {count}"
            )

    def fill(self, regions: Sequence[Region]) -> None:
        """Write the host side, from the first entry on. There is at least one region."""
        for buffer in self.columns:
            wait_until_sent(buffer)
        for buffer, values in zip(self.columns, zip(*regions, strict=True), strict=True):
            buffer.np[: len(regions)] = values
        self.offset = len(regions)


def wait_until_sent(buffer: HostDeviceBuffer) -> None:
    """Wait until the host side of a buffer may change, if the buffer knows.

    An engine's own buffer may not; then the engine sees to it.
    """
    wait = getattr(buffer, "wait", None)
    if wait is not None:
        wait()
