"""The benchmark of state copies on a GPU, beside other ways to move the same bytes.

Every figure is a median of runs that copy other rows each time, queued behind one another so that
the device never waits for the host. No time is taken before the bits have been compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mamba_cache.bench.measure import Measurement, check_gpu, device_us, host_us, progress
from mamba_cache.states import StateCopier, StatePool, StateSpec

__all__ = [
    "RUNS",
    "SHAPES",
    "SLOT_COUNTS",
    "CopyShape",
    "flat_copy",
    "gb_per_s",
    "measure_copies",
    "measure_tiny_copy",
    "random_",
    "random_pool",
    "run_copy",
    "spec_of",
]

RUNS = 15
"""Runs that a median is taken over."""

_ROW_SETS = 5
_SPARE_ROWS = 8


@dataclass(frozen=True, slots=True)
class CopyShape:
    """The states of a model, and what copying them must reach.

    Attributes:
        name: Model and dtype of the SSM state.
        spec: What one state holds.
        is_reference: Whether the limits are stated for it.
        over_indexing: How many times faster than advanced indexing, at least.
        over_loop: The same for a loop of ``copy_``.
    """

    name: str
    spec: StateSpec
    is_reference: bool = False
    over_indexing: float | None = None
    over_loop: float | None = None


def spec_of(
    num_layers: int, conv_dim: int, ssm_shape: tuple[int, int, int], ssm_dtype: torch.dtype
) -> StateSpec:
    """Describe states with convolution windows of four in bfloat16, as all of ``SHAPES`` have."""
    return StateSpec.mamba(num_layers, (conv_dim, 4), ssm_shape, torch.bfloat16, ssm_dtype)


SHAPES = (
    CopyShape(
        "Nemotron-H-8B, fp32 SSM",
        spec_of(24, 10240, (128, 64, 128), torch.float32),
        is_reference=True,
        over_indexing=4.9,
        over_loop=1.7,
    ),
    CopyShape(
        "Nemotron-H-8B, bf16 SSM",
        spec_of(24, 10240, (128, 64, 128), torch.bfloat16),
        is_reference=True,
        over_indexing=9.0,
        over_loop=2.8,
    ),
    CopyShape("Nemotron-Nano-9B-v2", spec_of(27, 12288, (128, 80, 128), torch.float32)),
    CopyShape("Granite-4.0-H-Tiny", spec_of(36, 3328, (48, 64, 128), torch.float32)),
    CopyShape("Qwen3-Next-80B-A3B", spec_of(36, 8192, (32, 128, 128), torch.float32)),
    CopyShape("Falcon-H1-7B", spec_of(44, 3584, (24, 128, 256), torch.float32)),
    CopyShape("Zamba2-7B", spec_of(81, 7424, (112, 64, 64), torch.float32)),
)
"""Layers with a state, convolution channels, and heads, head size and state size, as the models'
published configurations have them."""

SLOT_COUNTS = (1, 4, 16, 64)
_TINY = CopyShape("0.5 MiB state", spec_of(2, 1024, (16, 64, 120), torch.bfloat16))


def run_copy() -> list[Measurement]:
    """Run every measurement, one after the other.

    Raises:
        InvalidArgumentError: There is no GPU.
    """
    check_gpu("copy")
    results = [one for shape in SHAPES for one in measure_copies(shape)]
    results += measure_tiny_copy()
    return results


def measure_copies(
    shape: CopyShape, slot_counts: Sequence[int] = SLOT_COUNTS
) -> Iterator[Measurement]:
    """Time copies of whole states by this package, a flat copy, indexing and a loop."""
    pools = _Pools(shape.spec, max(slot_counts) + _SPARE_ROWS)
    pools.check_bits()
    for num_slots in slot_counts:
        progress(f"{shape.name}: copy {num_slots} slots")
        yield from _compare(shape, pools, num_slots)


def measure_tiny_copy() -> Iterator[Measurement]:
    """Time small states: starting the kernel, and the host's part of a call."""
    progress("copy small states")
    pools = _Pools(_TINY.spec, 64)
    pools.check_bits()
    time_us = device_us([partial(pools.copy, *pools.random_rows(1)) for _ in range(_ROW_SETS)])
    size = f"{_TINY.spec.bytes_per_slot:,} bytes"
    yield Measurement("small state, 1 slot", time_us, "us", limit=6, runs=RUNS, detail=size)
    for num_slots in (1, 4, 16):
        rows = pools.random_rows(num_slots)
        lists = [tensor.tolist() for tensor in rows]
        for where, given in (("in lists on the host", lists), ("on the device", rows)):
            host = host_us(partial(pools.copier.copy, *given))
            name = f"small state, {num_slots} slots: host time of a call, rows {where}"
            yield Measurement(name, host, "us", limit=25, runs=RUNS)


class _Pools:
    """Two pools of random states, and the ways to copy rows from one to the other."""

    def __init__(self, spec: StateSpec, num_rows: int) -> None:
        self.spec, self.num_rows = spec, num_rows
        pools = [random_pool(spec, num_rows) for _ in range(2)]
        self.sources, self.destinations = (list(pool.tensors.values()) for pool in pools)
        self.copier = StateCopier(self.sources, self.destinations)

    def random_rows(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows to read and rows to write, on the device."""
        rows = [torch.randperm(self.num_rows)[:num_slots].int().cuda() for _ in range(2)]
        return rows[0], rows[1]

    def copy(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self.copier.copy(sources, destinations)

    def index(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for read, write in zip(self.sources, self.destinations, strict=True):
            write[:, destinations] = read[:, sources]

    def loop(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            for read, write in zip(self.sources, self.destinations, strict=True):
                write[:, destination].copy_(read[:, source])

    def flat(self, num_slots: int, turn: int) -> None:
        num_bytes = num_slots * self.spec.bytes_per_slot
        flat_copy(self.destinations[1], self.sources[1], num_bytes, turn)

    def check_bits(self) -> None:
        """Compare one copy of this package with the sources."""
        sources, destinations = self.random_rows(4)
        self.copy(sources, destinations)
        for read, write in zip(self.sources, self.destinations, strict=True):
            copied = write[:, destinations].view(torch.uint8)
            assert torch.equal(copied, read[:, sources].view(torch.uint8))


def _compare(shape: CopyShape, pools: _Pools, num_slots: int) -> Iterator[Measurement]:
    rows = [pools.random_rows(num_slots) for _ in range(_ROW_SETS)]
    lists = [(sources.tolist(), destinations.tolist()) for sources, destinations in rows]
    own = device_us([partial(pools.copy, *pair) for pair in rows])
    flat = device_us([partial(pools.flat, num_slots, turn) for turn in range(_ROW_SETS)])
    index = device_us([partial(pools.index, *pair) for pair in rows])
    loop = device_us([partial(pools.loop, *pair) for pair in lists])
    host = host_us(partial(pools.copier.copy, *lists[0]))
    num_bytes = num_slots * shape.spec.bytes_per_slot
    name = f"{shape.name}, {num_slots} slots"
    measured = partial(Measurement, runs=RUNS)
    limit = (1.08 if num_slots == 1 else 1.04) if shape.is_reference else None
    detail = f"{own:,.1f} us, {gb_per_s(num_bytes, own)}; flat copy {flat:,.1f} us"
    yield measured(f"{name}: time over a flat copy's", own / flat, "x", limit, detail=detail)
    for other, time_us, least in (
        ("indexing", index, shape.over_indexing),
        ("a loop", loop, shape.over_loop),
    ):
        # Stated where copies are large enough to compare; what launches cost is another question.
        limit = least if num_slots in (4, 16) else None
        speedup = time_us / own
        # What no copy can do, this one cannot: how much faster a flat copy is.
        detail = f"{time_us:,.1f} us; a flat copy is {time_us / flat:.2f}x faster"
        yield measured(f"{name}: faster than {other}", speedup, "x", limit, True, detail=detail)
    detail = "rows in lists on the host, large copies queued before"
    yield measured(f"{name}: host time of a call", host, "us", detail=detail)


def flat_copy(
    destination: torch.Tensor, source: torch.Tensor, num_bytes: int, turn: int = 0
) -> None:
    """Copy as many bytes in one piece, another piece each turn if there is room."""
    count = num_bytes // source.element_size()
    start = turn % (source.numel() // count) * count
    destination.view(-1)[start : start + count].copy_(source.view(-1)[start : start + count])


def gb_per_s(num_bytes: int, time_us: float) -> str:
    """Say how fast a copy of ``num_bytes`` was, each read once and written once."""
    return f"{2 * num_bytes / time_us / 1e3:,.0f} GB/s read and written"


def random_pool(spec: StateSpec, num_rows: int) -> StatePool:
    """Make a pool of random bits on the GPU."""
    pool = StatePool(spec, num_rows, device="cuda")
    for tensor in pool.tensors.values():
        random_(tensor)
    return pool


def random_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor with random bits, and return it."""
    tensor.view(torch.uint8).random_(0, 256)
    return tensor
