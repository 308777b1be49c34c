"""The benchmark of tiers: what spilling and loading take beside plain copies of as many bytes.

Entries have the shape of Nemotron-H-8B's states and KV blocks. Every copy is timed from the call to
its end, on the host, with nothing else under way; the plain copies beside them likewise. No time is
taken before the bits have been compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from mamba_cache.bench.measure import Measurement, assert_same_bits, check_device, progress
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.model_shapes import BUILT_IN, shape_of
from mamba_cache.reference import HybridModel, HybridModelConfig
from mamba_cache.states import KVCacheSpec, StatePool, StateSpec
from mamba_cache.tiers import (
    CopyJob,
    CudaTransfers,
    EntryKind,
    HostTier,
    LoadPlanner,
    PlainTransfers,
    Rates,
    RowFormat,
    RowLayout,
    Transfers,
    pinner_for,
)

__all__ = ["TierShape", "add_tiers_options", "run_tiers"]

_RUNS = 15
_BLOCK = 256
_PREFIX_BLOCKS = 16
_STEPS = 400
_LEAST_SHARE, _MOST_VERIFYING, _MOST_SLOWER = 0.95, 5.0, 1.03


class TierShape(NamedTuple):
    """What is copied, and how much of it.

    Attributes:
        name: Of the model.
        states: What one state holds.
        kv: What one token's keys and values hold.
        num_states: States on the GPU and in the tier.
        num_blocks: KV blocks likewise.
        ready_gb: Of the tier whose making is timed, in GiB.
        model: What computes first tokens: its layers, fewer of them.
    """

    name: str
    states: StateSpec
    kv: KVCacheSpec
    num_states: int
    num_blocks: int
    ready_gb: float
    model: HybridModelConfig


_LAYERS = HybridModelConfig(
    layer_pattern="M-M-M-M*-M-M-",
    hidden_size=4096,
    num_attention_heads=32,
    num_kv_heads=8,
    attention_head_dim=128,
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    num_groups=8,
    ssm_chunk_size=128,
    mlp_size=21504,
    vocab_size=256,
)

_SMALL_LAYERS = HybridModelConfig(
    layer_pattern="M*",
    hidden_size=16,
    num_attention_heads=2,
    num_kv_heads=1,
    attention_head_dim=4,
    mamba_num_heads=2,
    mamba_head_dim=4,
    ssm_state_size=4,
    num_groups=1,
    ssm_chunk_size=128,
    mlp_size=16,
    vocab_size=256,
)


def add_tiers_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"where the cache is (default {default})")
    parser.add_argument(
        "--small", action="store_true", help="tiny states and few: to see that it runs"
    )
    parser.add_argument(
        "--ready-gb",
        type=float,
        default=None,
        metavar="GB",
        help="GiB of the tier whose making is timed (default 64 on a GPU, else 0.25)",
    )


def run_tiers(
    *, device: str = "cpu", small: bool = False, ready_gb: float | None = None
) -> list[Measurement]:
    """Run every measurement, one after the other.

    Args:
        device: Where the cache is.
        small: Whether to copy tiny states instead of a model's.
        ready_gb: GiB of the tier whose making is timed; None: 64 on a GPU, else a quarter.

    Raises:
        InvalidArgumentError: PyTorch does not find the device, it is neither a CPU nor CUDA's, or
            ``ready_gb`` is not a number above 0.
    """
    where = check_device(device)
    if where.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device must be a CPU or a CUDA device, got {device!r}")
    if ready_gb is None:
        ready_gb = 64.0 if where.type == "cuda" and not small else 0.25
    if not ready_gb > 0:
        raise InvalidArgumentError(f"ready_gb must be a number above 0, got {ready_gb!r}")
    shape = _shape(small=small, ready_gb=ready_gb)
    copies = _Copies(shape, where)
    copies.check_bits()
    results = [*_measure_copies(copies)]
    if where.type == "cuda":  # pragma: no cover - needs a GPU
        results += _measure_steps(copies)
    copies.close()
    del copies
    results += _measure_first_tokens(shape, where)
    results += _measure_readiness(shape, where)
    return results


def _shape(*, small: bool, ready_gb: float) -> TierShape:
    if small:
        states = _SMALL_LAYERS.state_spec(torch.float32)
        kv = _SMALL_LAYERS.kv_spec(torch.float32)
        return TierShape("small states", states, kv, 4, 20, ready_gb, _SMALL_LAYERS)
    model = shape_of(BUILT_IN["nemotron-h-8b"][1], name="nemotron-h-8b")
    assert model.kv_spec is not None, "it has attention layers"
    return TierShape("Nemotron-H-8B", model.state_spec, model.kv_spec, 16, 64, ready_gb, _LAYERS)


class _Copies:
    """Random states and KV blocks on a device, rows of host memory, and copies between them."""

    def __init__(self, shape: TierShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.on_gpu = device.type == "cuda"
        self.states = StatePool(shape.states, shape.num_states, device=device)
        self.kv = shape.kv.allocate(shape.num_blocks, _BLOCK, device)
        self.tensors = [self.kv, *self.states.tensors.values()]
        for tensor in self.tensors:
            tensor.normal_()
        layouts = {
            EntryKind.KV: RowLayout([self.kv.flatten(0, 1)], sums_chunks=self.on_gpu),
            EntryKind.STATE: RowLayout(list(self.states.tensors.values()), sums_chunks=self.on_gpu),
        }
        self.layouts = layouts
        counts = {EntryKind.KV: shape.num_blocks, EntryKind.STATE: shape.num_states}
        formats = [
            RowFormat(layouts[kind].row_bytes, layouts[kind].checksums, count)
            for kind, count in counts.items()
        ]
        self.host = HostTier(*formats, pinner=pinner_for(device) if self.on_gpu else None)
        self.host.wait_for_memory()
        self.transfers: Transfers
        if self.on_gpu:  # pragma: no cover - needs a GPU
            self.transfers = CudaTransfers(layouts, self.host.memory, device)
        else:
            self.transfers = PlainTransfers(layouts, self.host.memory)

    def jobs(self, num_states: int, num_blocks: int) -> list[CopyJob]:
        """Return copies of the first states and blocks to or from the rows of their numbers."""
        jobs = [CopyJob(EntryKind.KV, number, number) for number in range(num_blocks)]
        return jobs + [CopyJob(EntryKind.STATE, number, number) for number in range(num_states)]

    def num_bytes(self, jobs: Sequence[CopyJob]) -> int:
        """Return the bytes that cross the link."""
        return sum(self.layouts[job.kind].row_bytes for job in jobs)

    def check_bits(self) -> None:
        """Compare what was spilled and loaded with what there was; a turned bit is found."""
        jobs = self.jobs(self.shape.num_states, self.shape.num_blocks)
        before = [tensor.clone() for tensor in self.tensors]
        self.transfers.spill(jobs).wait()
        for tensor in self.tensors:
            tensor.zero_()
        ticket = self.transfers.load(jobs)
        ticket.wait()
        assert ticket.damaged() == []
        for tensor, old in zip(self.tensors, before, strict=True):
            assert_same_bits(tensor, old)
        row = self.host.memory[EntryKind.STATE].row(1)
        row[77] ^= 4
        ticket = self.transfers.load(jobs)
        ticket.wait()
        assert ticket.damaged() == [self.shape.num_blocks + 1]
        row[77] ^= 4

    def close(self) -> None:
        """Give the memory back."""
        self.transfers.wait()
        self.host.close()


def _measure_copies(copies: _Copies) -> Iterator[Measurement]:
    """Time loads and spills beside one plain copy of as many bytes in the same direction."""
    shape, on_gpu = copies.shape, copies.on_gpu
    least = _LEAST_SHARE if on_gpu and shape.states.bytes_per_slot > 2**20 else None
    for name, jobs in (
        ("a prefix of 4,096 tokens", copies.jobs(1, _PREFIX_BLOCKS)),
        (f"{shape.num_states} states", copies.jobs(shape.num_states, 0)),
    ):
        progress(f"{shape.name}: {name}")
        num_bytes = copies.num_bytes(jobs)
        host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        device = torch.empty(num_bytes, dtype=torch.uint8, device=copies.device)
        for way, run, plain in (
            ("load", copies.transfers.load, partial(device.copy_, host, non_blocking=True)),
            ("spill", copies.transfers.spill, partial(host.copy_, device, non_blocking=True)),
        ):
            own, other = _in_turn(partial(_to_its_end, run, jobs), partial(_alone, plain, on_gpu))
            detail = (
                f"{own * 1e3:,.2f} ms, {num_bytes / own / 1e9:,.1f} GB/s; plain "
                f"{other * 1e3:,.2f} ms, {num_bytes / other / 1e9:,.1f} GB/s"
            )
            title = f"{way} {name}: share of a plain copy's GB/s"
            yield Measurement(title, other / own, "x", least, True, _RUNS, detail)
        yield _verifying(copies, name, jobs)


def _verifying(copies: _Copies, name: str, jobs: Sequence[CopyJob]) -> Measurement:
    """Time loads with their verification and without."""
    unverified = _without_verification(copies)
    run = copies.transfers.load
    own, other = _in_turn(partial(_to_its_end, run, jobs), lambda: unverified(jobs))
    share = max(0.0, own - other) / own * 100
    limit = _MOST_VERIFYING if copies.on_gpu and own > 1e-3 else None
    detail = f"{own * 1e3:,.2f} ms, without {other * 1e3:,.2f} ms"
    return Measurement(f"load {name}: verification", share, "%", limit, False, _RUNS, detail)


def _without_verification(copies: _Copies) -> Callable[[Sequence[CopyJob]], object]:
    """Return what loads without looking at what comes: nothing but a benchmark does that."""
    if copies.on_gpu:  # pragma: no cover - needs a GPU
        transfers = CudaTransfers(copies.layouts, copies.host.memory, copies.device)
        for staging in transfers._loads.values():
            staging.sums.compare = lambda row, changed: None  # type: ignore[method-assign]
        return partial(_to_its_end, transfers.load)

    def load(jobs: Sequence[CopyJob]) -> None:
        for kind, place, row in jobs:
            layout, data = copies.layouts[kind], copies.host.memory[kind].row(row)
            for tensor, view in zip(layout.tensors, layout.views(data[None]), strict=True):
                tensor[:, place].copy_(view[:, 0])

    return load


def _measure_steps(copies: _Copies) -> Iterator[Measurement]:  # pragma: no cover - needs a GPU
    """Time the matrix products of decode steps while both directions of the link are saturated."""
    progress("steps under saturated spills and loads")
    device = copies.device
    big = copies.shape.states.bytes_per_slot > 2**20
    sizes, layers = ((64, 4096, 21504), 20) if big else ((8, 64, 64), 2)
    weights = [
        torch.randn(sizes[1], sizes[2], device=device, dtype=torch.bfloat16) for _ in range(layers)
    ]
    inputs = torch.randn(sizes[0], sizes[1], device=device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    for weight in weights:
        inputs @ weight
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for weight in weights:
            inputs @ weight
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    half = copies.shape.num_states // 2
    jobs = copies.jobs(copies.shape.num_states, 0)

    def saturate(under_way: list[Any]) -> None:
        under_way[:] = [ticket for ticket in under_way if not ticket.is_done()]
        while len(under_way) < 4:
            with torch.cuda.stream(side):  # what waits for the loads is not the step's stream
                under_way.append(copies.transfers.load(jobs[:half]))
                under_way.append(copies.transfers.spill(jobs[half:]))

    def steps(saturated: bool) -> list[float]:
        times, under_way = [], list[Any]()
        for _ in range(_STEPS):
            if saturated:
                saturate(under_way)
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended))
        copies.transfers.wait()
        return times

    steps(False)
    rounds = [(steps(False), steps(True)) for _ in range(3)]
    for name, find in (("p99", partial(np.percentile, q=99)), ("median", np.median)):
        without, under = (
            statistics.median(float(find(times[index])) for times in rounds) for index in (0, 1)
        )
        limit = _MOST_SLOWER if name == "p99" else None
        yield Measurement(
            f"{name} of a step under saturated spills and loads",
            under / without,
            "x",
            limit,
            runs=3 * _STEPS,
            detail=f"{under:,.3f} ms, without {without:,.3f} ms",
        )


def _measure_first_tokens(shape: TierShape, device: torch.device) -> Iterator[Measurement]:
    """Time the first token of a prompt whose prefix is on the GPU, and of one that is loaded."""
    progress("first tokens after a prefix of 4,096 tokens")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = HybridModel(shape.model, dtype=dtype, device=device)
    num_blocks = _PREFIX_BLOCKS + 3
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        ssm_chunk_size=shape.model.ssm_chunk_size,
        max_requests=1,
        max_tokens=num_blocks * _BLOCK,
        max_sequence_length=num_blocks * _BLOCK,
        num_kv_blocks=num_blocks,
        max_slots=4,
        num_host_blocks=4 * num_blocks,
        num_host_states=12,
    )
    context = DynamicInferenceContext(
        config,
        shape.model.state_spec(dtype),
        shape.model.kv_spec(dtype),
        device=device,
        load_planner=LoadPlanner(Rates(1e15, 0.0, 1.0), learns=False),
    )
    context.wait_for_tiers()
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 256, (3, (_PREFIX_BLOCKS + 1) * _BLOCK))

    def answer(prompt: Any) -> tuple[float, int]:
        begun = time.perf_counter()
        admission = context.add_request(Request(request_id="a", prompt_tokens=prompt))
        step = context.begin_step()
        token = int(model.forward(step.metadata, context)[-1].argmax())
        seconds = time.perf_counter() - begun
        preempted = context.commit_step([token])
        assert not preempted
        context.finish("a")
        context.wait_for_tiers()
        return seconds, admission.loaded_blocks

    for prompt in prompts:
        answer(prompt)
    hits, loads = [], []
    for run in range(_RUNS):
        prompt = prompts[run % len(prompts)]
        context.kv_block_allocator.deregister_blocks(range(num_blocks))
        seconds, loaded = answer(prompt)
        assert loaded == _PREFIX_BLOCKS
        loads.append(seconds)
        seconds, loaded = answer(prompt)
        assert loaded == 0
        hits.append(seconds)
    hit, load = statistics.median(hits), statistics.median(loads)
    yield Measurement(
        "first token after 4,096 tokens from the host: over one from the GPU",
        load / hit,
        "x",
        runs=_RUNS,
        detail=(
            f"{load * 1e3:,.1f} ms, from the GPU {hit * 1e3:,.1f} ms; layers "
            f"{shape.model.layer_pattern}, {_BLOCK} tokens computed"
        ),
    )


def _measure_readiness(shape: TierShape, device: torch.device) -> Iterator[Measurement]:
    """Time until a large tier is there, and until the first request of its context is served."""
    progress(f"{shape.ready_gb:g} GiB of tier")
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        max_requests=1,
        max_tokens=_BLOCK,
        max_sequence_length=2 * _BLOCK,
        num_kv_blocks=4,
        max_slots=2,
        host_cache_gb=shape.ready_gb,
    )
    on_gpu = device.type == "cuda"
    begun = time.perf_counter()
    context = DynamicInferenceContext(config, shape.states, shape.kv, device=device)
    context.add_request(Request(request_id="a", prompt_tokens=list(range(200))))
    context.begin_step()
    context.commit_step([1])  # what a model takes is no part of it
    first = time.perf_counter() - begun
    context.wait_for_tiers()
    ready = time.perf_counter() - begun
    [stats] = context.tier_stats()
    assert stats.ready_rows == stats.rows
    is_large = on_gpu and shape.ready_gb >= 64
    gib = f"{shape.ready_gb:g} GiB of tier"
    limits = (10.0, 1.0) if is_large else (None, None)
    yield Measurement(f"{gib}: until all of it is there", ready * 1e3, "ms",
                      limits[0] and limits[0] * 1e3)  # fmt: skip
    yield Measurement(f"{gib}: until the first request is served", first * 1e3, "ms",
                      limits[1] and limits[1] * 1e3)  # fmt: skip
    assert context.host_tier is not None
    context.host_tier.close()


def _in_turn(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Return the median seconds of two calls, made in turn."""
    times: tuple[list[float], list[float]] = [], []
    for run in range(_RUNS + 2):
        for call, seconds in zip((first, second), times, strict=True):
            begun = time.perf_counter()
            call()
            if run >= 2:
                seconds.append(time.perf_counter() - begun)
    return statistics.median(times[0]), statistics.median(times[1])


def _to_its_end(run: Callable[[Sequence[CopyJob]], Any], jobs: Sequence[CopyJob]) -> None:
    run(jobs).wait()


def _alone(copy: Callable[[], object], on_gpu: bool) -> None:
    copy()
    if on_gpu:  # pragma: no cover - needs a GPU
        torch.cuda.synchronize()
