"""Times tiers: spills and loads beside plain copies of as many bytes.

    python tests/benchmarks/bench_tiers.py --only copies disk --disk-path DIR --json tiers.json

Entries have the shape of Nemotron-H-8B's states and KV blocks. Every copy is timed from the call to
its end, on the host, with no other work; plain copies are timed in the same way. Bits are compared
before anything is timed.

Parts can be run alone. Details of each part give the time on the host, on the link, and in
checksums.
"""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from measuring import (
    Measurement,
    assert_same_bits,
    parser_for,
    progress,
    report,
    usable_device,
)
from model_kernels import kernels_of
from models import FAMILIES, make_model

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, PrefetchState, Request
from mamba_cache.context.tier_memory import Transfers
from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.reference import HybridModel, HybridModelConfig, hybrid_model
from mamba_cache.reference.model_config import WeightMaker
from mamba_cache.states import KVCacheSpec, StatePool, StateSpec
from mamba_cache.tiers import LoadPlanner, ModelIdentity, Rates
from mamba_cache.tiers.cuda import CudaTransfers, cuda_rectangles, pinner_for
from mamba_cache.tiers.disk import PAGE_BYTES
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.memory import RowMemory
from mamba_cache.tiers.transfers import CopyJob, PlainTransfers, RowLayout

PARTS = ("copies", "steps", "model", "first", "disk", "ready")
"""Measurements: copies beside plain ones; steps while copies run (matrix products, or a model's
decode steps); first tokens after a prefix that is loaded from the host or the disk; and the time
until a tier is ready."""

_RUNS = 15
_BLOCK = 256
_PREFIX_BLOCKS = 16
_STEPS, _MODEL_STEPS, _MODEL_REQUESTS = 400, 100, 64
_READERS, _READ_BYTES = 8, 4 * 2**20


class TierShape(NamedTuple):
    """Shape and amount of the copied entries.

    Attributes:
        name: Name of the model.
        states: Layout of one state.
        kv: Layout of one token's keys and values.
        num_states: States on the GPU and in the tier.
        num_blocks: KV blocks on the GPU and in the tier.
        ready_gb: Size of the tier whose construction is timed, in GiB.
        model: Model that computes first tokens.
    """

    name: str
    states: StateSpec
    kv: KVCacheSpec
    num_states: int
    num_blocks: int
    ready_gb: float
    model: HybridModelConfig


_LAYERS = HybridModelConfig(
    layer_pattern="M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
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


def _shape(*, small: bool, ready_gb: float) -> TierShape:
    if small:
        states = _SMALL_LAYERS.state_spec(torch.float32)
        kv = _SMALL_LAYERS.kv_spec(torch.float32)
        return TierShape("small states", states, kv, 4, 20, ready_gb, _SMALL_LAYERS)
    states = StateSpec.mamba(24, (10240, 4), (128, 64, 128), torch.bfloat16, torch.float32)
    kv = KVCacheSpec(4, 8, 128, torch.bfloat16)
    return TierShape("Nemotron-H-8B", states, kv, 16, 64, ready_gb, _LAYERS)


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
        memory = [
            RowMemory(layouts[kind].row_bytes, layouts[kind].checksums, count)
            for kind, count in counts.items()
        ]
        self.host = HostTier(*memory, pinner=pinner_for(device) if self.on_gpu else None)
        self.host.wait_for_memory()
        self.transfers: Transfers = (
            CudaTransfers(layouts, self.host.memory, device)
            if self.on_gpu
            else PlainTransfers(layouts, self.host.memory)
        )

    def unverified(self) -> _Unverified:
        """Return transfers by copy engines only, without verification."""
        assert isinstance(self.transfers, CudaTransfers)
        return _Unverified(self.transfers, self.device)

    def jobs(self, num_states: int, num_blocks: int) -> list[CopyJob]:
        """Return copies of the first states and blocks to or from host rows of equal numbers."""
        jobs = [CopyJob(EntryKind.KV, number, number) for number in range(num_blocks)]
        return jobs + [CopyJob(EntryKind.STATE, number, number) for number in range(num_states)]

    def num_bytes(self, jobs: Sequence[CopyJob]) -> int:
        """Return the bytes that cross the link."""
        return sum(self.layouts[job.kind].row_bytes for job in jobs)

    def check_bits(self) -> None:
        """Compare entries before a spill and after a load; check that a flipped bit is detected."""
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
        self.transfers.wait()
        self.host.close()


class _Unverified:
    """Copies by copy engines, in place, without checksums: for this benchmark only."""

    def __init__(self, transfers: CudaTransfers, device: torch.device) -> None:
        self._transfers = transfers
        self._streams: dict[bool, Any] = {
            to_device: torch.cuda.Stream(device) for to_device in (False, True)
        }

    def load(self, jobs: Sequence[CopyJob]) -> Any:
        return self._copy(jobs, to_device=True)

    def spill(self, jobs: Sequence[CopyJob]) -> Any:
        return self._copy(jobs, to_device=False)

    def _copy(self, jobs: Sequence[CopyJob], *, to_device: bool) -> torch.cuda.Event:
        copy, stream = cuda_rectangles(to_device=to_device), self._streams[to_device]
        stream.wait_event(torch.cuda.current_stream().record_event())
        for job in jobs:
            self._transfers._entries[job.kind].copy(copy, [job], stream)
        done: torch.cuda.Event = stream.record_event()
        return done


def _measure_copies(copies: _Copies) -> Iterator[Measurement]:
    """Time loads and spills beside one plain copy of as many bytes in the same direction."""
    shape, on_gpu = copies.shape, copies.on_gpu
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
            if on_gpu:
                detail += f"; {_stages(run, jobs, num_bytes)}"
            title = f"{way} {name}: share of a plain copy's GB/s"
            yield Measurement(title, other / own, "x", _RUNS, detail)
        yield _verifying(copies, name, jobs)


def _stages(
    run: Callable[[Sequence[CopyJob]], Any], jobs: Sequence[CopyJob], num_bytes: int
) -> str:
    """Describe the time of copies on the host, on the link, and after it."""
    stages = []
    for _ in range(_RUNS):
        begun = time.perf_counter()
        ticket = run(jobs)
        enqueued = time.perf_counter()
        _, crossed = ticket._crossing
        crossed.synchronize()
        received = time.perf_counter()
        ticket.wait()
        after = time.perf_counter() - received
        stages.append((enqueued - begun, ticket.seconds(), after))
    enqueued, crossing, after = np.median(np.array(stages), axis=0).tolist()
    return (
        f"the host enqueues for {enqueued * 1e3:,.2f} ms, the link takes {crossing * 1e3:,.2f} ms "
        f"({num_bytes / crossing / 1e9:,.1f} GB/s), what follows it {after * 1e6:,.0f} us"
    )


def _verifying(copies: _Copies, name: str, jobs: Sequence[CopyJob]) -> Measurement:
    """Time loads with their verification and without."""
    unverified: Callable[[Sequence[CopyJob]], object]
    if copies.on_gpu:
        unverified = partial(_to_its_end, copies.unverified().load)
    else:
        unverified = partial(_load_plainly, copies)
    run = copies.transfers.load
    own, other = _in_turn(partial(_to_its_end, run, jobs), partial(unverified, jobs))
    share = max(0.0, own - other) / own * 100
    detail = f"{own * 1e3:,.2f} ms, without {other * 1e3:,.2f} ms"
    return Measurement(f"load {name}: verification", share, "%", _RUNS, detail)


def _load_plainly(copies: _Copies, jobs: Sequence[CopyJob]) -> None:
    for kind, place, row in jobs:
        layout, data = copies.layouts[kind], copies.host.memory[kind].row(row)
        for tensor, view in zip(layout.tensors, layout.views(data[None]), strict=True):
            tensor[:, place].copy_(view[:, 0])


class _Step(NamedTuple):
    """A stand-in for a decode step.

    Attributes:
        name: Name in titles.
        graph: Its CUDA graph.
        about: Returns the detail text of a step of so many ms.
        num_steps: Steps per timing.
        kept: Tensors of the graph, kept alive.
    """

    name: str
    graph: Any
    about: Callable[[float], str]
    num_steps: int
    kept: Any


def _products(copies: _Copies) -> _Step:
    """Capture matrix products alone, which read weights as fast as the memory gives them."""
    device, big = copies.device, copies.shape.states.bytes_per_slot > 2**20
    (rows, hidden, size), layers = ((64, 4096, 21504), 20) if big else ((8, 64, 64), 2)
    weights = [
        torch.randn(hidden, size, device=device, dtype=torch.bfloat16) for _ in range(layers)
    ]
    inputs = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    for weight in weights:
        inputs @ weight
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for weight in weights:
            inputs @ weight
    read_bytes = sum(weight.nbytes for weight in weights)

    def about(milliseconds: float) -> str:
        return f"the step alone reads {read_bytes / milliseconds / 1e9:,.2f} TB/s"

    return _Step("a step of matrix products", graph, about, _STEPS, (weights, inputs))


def _model(copies: _Copies) -> _Step:
    """Let ``generate_batch`` capture a decode step of Nemotron-H-8B, with random weights."""
    progress("a decode step of a model")
    big = copies.shape.states.bytes_per_slot > 2**20
    model = make_model(FAMILIES["nemotron-h-8b" if big else "tiny"], str(copies.device)).eval()
    cache = PrefixCache(model, mamba_cache_gb=8.0, kv_cache_gb=6.0)
    rng = np.random.default_rng(1)
    prompts = rng.integers(3, model.config.vocab_size, (_MODEL_REQUESTS, 256)).tolist()
    cache.generate_batch(prompts, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert cache._batcher is not None, "the call has made it"
    graph = cache._batcher._graphs._graphs[_MODEL_REQUESTS].graph

    def about(milliseconds: float) -> str:
        return f"{_MODEL_REQUESTS} requests, kernels: {', '.join(kernels_of(model).values())}"

    name = f"a decode step of {copies.shape.name}"
    return _Step(name, graph, about, _MODEL_STEPS, (model, cache))


class _Steps:
    """Steps while both directions of the link are busy."""

    def __init__(self, copies: _Copies, step: _Step) -> None:
        self._copies, self._step, device = copies, step, copies.device
        self._side: Any = torch.cuda.Stream(device)
        self._jobs = copies.jobs(copies.shape.num_states, 0)
        num_bytes = copies.num_bytes(self._jobs) // 2
        # Plain copies without entries, of as many bytes as the loads and spills beside them.
        self._plain = [
            (
                torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True),
                torch.empty(num_bytes, dtype=torch.uint8, device=device),
                torch.cuda.Stream(device),
            )
            for _ in range(2)
        ]

    def under(
        self, copying: str, transfers: Transfers | _Unverified
    ) -> tuple[list[float], list[float]]:
        """Return the time of each step on the GPU, in ms, and of each call on the host, in us.

        Args:
            copying: "nothing", "plain" for copies of no entries, "load", "spill", "both", or
                "context" for spills beside steps and a load before each, as a context has them.
            transfers: Transfers that copy.
        """
        times, host, under_way = [], [], list[Any]()
        for _ in range(self._step.num_steps):
            started = time.perf_counter()
            under_way = [one for one in under_way if not _is_over(one)]
            if copying != "nothing":
                while len(under_way) < 4:
                    under_way += self._begin(copying, transfers)
            if copying == "context":
                transfers.load(self._jobs[:1])
            host.append((time.perf_counter() - started) * 1e6)
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            self._step.graph.replay()
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended))
        torch.cuda.synchronize()
        return times, host

    def _begin(self, copying: str, transfers: Transfers | _Unverified) -> list[Any]:
        half = len(self._jobs) // 2
        if copying == "plain":
            (host, device, receiving), (sink, source, sending) = self._plain
            over = []
            for stream, to, of in ((receiving, device, host), (sending, sink, source)):
                with torch.cuda.stream(stream):
                    to.copy_(of, non_blocking=True)
                    over.append(stream.record_event())
            return over
        tickets = []
        with torch.cuda.stream(self._side):  # the step's stream does not wait for loads
            if copying in ("load", "both"):
                tickets.append(transfers.load(self._jobs[:half]))
            if copying != "load":
                tickets.append(transfers.spill(self._jobs[half:]))
        return tickets


def _is_over(copy: Any) -> bool:
    return bool((copy.query if isinstance(copy, torch.cuda.Event) else copy.is_done)())


def _measure_steps(copies: _Copies, step: _Step) -> Iterator[Measurement]:
    """Time steps while both directions are saturated, by tier copies and by plain copies."""
    progress(f"{step.name} under saturated spills and loads")
    steps = _Steps(copies, step)
    ways: dict[str, tuple[str, Transfers | _Unverified]] = {
        "nothing": ("nothing", copies.transfers),
        "plain copies of as many bytes": ("plain", copies.transfers),
        "spills and loads without checksums": ("both", copies.unverified()),
        "loads": ("load", copies.transfers),
        "spills": ("spill", copies.transfers),
        "spills and a load before each step": ("context", copies.transfers),
        "spills and loads": ("both", copies.transfers),
    }
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    steps.under("nothing", copies.transfers)
    for _ in range(3):
        for name, way in ways.items():
            times, host = steps.under(*way)
            p99, median = np.percentile(times, 99), np.median(times)
            rounds[name].append((float(p99), float(median), statistics.mean(host)))
    figures = {name: np.median(np.array(each), axis=0).tolist() for name, each in rounds.items()}
    p99, median, _ = figures["nothing"]
    for name, (its_p99, its_median, host_us) in list(figures.items())[1:]:
        runs = 3 * step.num_steps
        detail = (
            f"{its_p99:,.3f} ms, without {p99:,.3f} ms; {step.about(median)}; the host takes "
            f"{host_us:,.0f} us a step to enqueue copies, which is no part of it"
        )
        title = f"p99 of {step.name} under saturated {name}"
        yield Measurement(title, its_p99 / p99, "x", runs=runs, detail=detail)
        title = f"median of {step.name} under saturated {name}"
        detail = f"{its_median:,.3f} ms, without {median:,.3f} ms"
        yield Measurement(title, its_median / median, "x", runs=runs, detail=detail)


class _OneForAll(WeightMaker):
    """Gives all layers of one shape the same weights: times do not depend on weights."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._made: dict[tuple[int, ...], torch.Tensor] = {}

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Draw the first weights of a shape."""
        if shape not in self._made:
            self._made[shape] = super().normal(*shape, scale=scale)
        return self._made[shape]


class _FirstTokens:
    """A context with tiers that answers prompts of a prefix and a few tokens."""

    def __init__(self, model: HybridModel, disk_path: str | None) -> None:
        self._model = model
        self.num_blocks = _PREFIX_BLOCKS + 3
        config = CacheConfig(
            block_size_tokens=_BLOCK,
            ssm_chunk_size=model.config.ssm_chunk_size,
            max_requests=1,
            max_tokens=self.num_blocks * _BLOCK,
            max_sequence_length=self.num_blocks * _BLOCK,
            num_kv_blocks=self.num_blocks,
            max_slots=4,
            num_host_blocks=4 * self.num_blocks,
            num_host_states=12,
            disk_cache_path=disk_path,
            disk_cache_gb=None if disk_path is None else 8.0,
            write_on_use=1,
            hash_secret=bytes(32),
        )
        self.context = DynamicInferenceContext(
            config,
            model.config.state_spec(model.dtype),
            model.config.kv_spec(model.dtype),
            device=model.device,
            # Every entry below is loaded, because loading is measured here.
            load_planner=LoadPlanner(Rates(1e15, 0.0, 1.0), learns=False),
            identity=ModelIdentity(name="bench", weights="of this process"),
        )
        self.context.wait_for_tiers()
        rng = np.random.default_rng(1)
        self.prompts = rng.integers(0, 256, (3, (_PREFIX_BLOCKS + 1) * _BLOCK))
        for prompt in self.prompts:
            self.answer(prompt)

    def answer(self, prompt: Any, *, prefetches: bool = False) -> _Answer:
        """Compute the first token of a prompt."""
        context, request = self.context, Request(request_id="a", prompt_tokens=prompt)
        begun = time.perf_counter()
        if prefetches:
            state = context.prefetch(request).wait()
            assert state is PrefetchState.READY, state
        prefetched = time.perf_counter()
        admission = context.add_request(request)
        added = time.perf_counter()
        step = context.begin_step()
        enqueued = time.perf_counter()
        token = int(self._model.forward(step.metadata, context)[-1].argmax())
        ended = time.perf_counter()
        preempted = context.commit_step([token])
        assert not preempted
        context.finish("a")
        context.wait_for_tiers()
        return _Answer(
            ended - begun,
            prefetched - begun,
            added - prefetched,
            enqueued - added,
            token,
            admission.loaded_blocks,
        )

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the rows of a prefix."""
        host = self.context.host_tier
        assert host is not None
        return (
            host[EntryKind.STATE].memory.row_bytes
            + _PREFIX_BLOCKS * host[EntryKind.KV].memory.row_bytes
        )

    def forget(self, *, host: bool) -> None:
        """Empty the GPU's cache; with ``host`` the host tier, too."""
        self.context.kv_block_allocator.deregister_blocks(range(self.num_blocks))
        if host:
            assert self.context.host_tier is not None
            self.context.host_tier.clear()

    def close(self) -> None:
        self.context.close()
        assert self.context.host_tier is not None
        self.context.host_tier.close()


class _Answer(NamedTuple):
    """Seconds until a first token, and the token."""

    seconds: float
    prefetching: float
    adding: float
    beginning: float
    token: int
    loaded_blocks: int


def _measure_first_tokens(
    shape: TierShape, device: torch.device, only: Sequence[str], disk_path: str | None
) -> Iterator[Measurement]:
    """Time the first token after a prefix on the GPU, on the host and on the disk."""
    progress("first tokens after a prefix of 4,096 tokens")
    with ExitStack() as stack:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with mock.patch.object(hybrid_model, "WeightMaker", _OneForAll):
            model = HybridModel(shape.model, dtype=dtype, device=device)
        if "first" in only:
            firsts = _FirstTokens(model, None)
            stack.callback(firsts.close)
            yield _from_below(firsts, "the host").over_a_hit
        if "disk" in only:
            path = disk_path or stack.enter_context(TemporaryDirectory(prefix="mamba-cache-"))
            firsts = _FirstTokens(model, path)
            stack.callback(firsts.close)
            disk = _Disk(Path(path), firsts.prefix_bytes)
            stack.callback(disk.close)
            yield from _from_disk(firsts, disk)


class _FromBelow(NamedTuple):
    """The first token after a prefix that was loaded, over one from the GPU, and its stages."""

    over_a_hit: Measurement
    load: _Answer


def _from_below(firsts: _FirstTokens, where: str, disk: _Disk | None = None) -> _FromBelow:
    """Time the first token after a prefix that comes from the host, or from the disk."""
    hits, loads = [], []
    for run in range(_RUNS):
        prompt = firsts.prompts[run % len(firsts.prompts)]
        firsts.forget(host=disk is not None)
        if disk is not None:
            disk.read(run)  # in turn: a shared disk's speed varies
            _drop_pages(disk.path)
        load = firsts.answer(prompt, prefetches=disk is not None)
        hit = firsts.answer(prompt)
        assert (load.loaded_blocks, hit.loaded_blocks) == (_PREFIX_BLOCKS, 0)
        assert load.token == hit.token
        loads.append(load)
        hits.append(hit)
    hit, load = (_Answer(*np.median(np.array(each), axis=0)) for each in (hits, loads))
    detail = (
        f"{load.seconds * 1e3:,.1f} ms, from the GPU {hit.seconds * 1e3:,.1f} ms; add_request "
        f"{load.adding * 1e3:,.2f} ms, {hit.adding * 1e3:,.2f} ms; begin_step "
        f"{load.beginning * 1e3:,.2f} ms, {hit.beginning * 1e3:,.2f} ms; {_BLOCK} tokens computed"
    )
    if disk is not None:
        detail += f"; prefetch {load.prefetching * 1e3:,.1f} ms"
    title = f"first token after 4,096 tokens from {where}: over one from the GPU"
    ratio = load.seconds / hit.seconds
    return _FromBelow(Measurement(title, ratio, "x", runs=_RUNS, detail=detail), load)


def _from_disk(firsts: _FirstTokens, disk: _Disk) -> Iterator[Measurement]:
    """Time first tokens from the disk, and beside them the disk alone."""
    tier = firsts.context.disk_tier
    assert tier is not None
    over_a_hit, load = _from_below(firsts, "the disk", disk)
    yield over_a_hit
    own, plain = disk.num_bytes / load.prefetching / 1e9, disk.num_bytes / disk.seconds() / 1e9
    mib = f"{disk.num_bytes / 2**20:,.1f} MiB"
    yield Measurement("the disk alone", plain, "GB/s", runs=_RUNS,
                      detail=f"{mib} by {_READERS} threads, {_way(disk.is_direct)}, no hashing, "
                             "other bytes each time")  # fmt: skip
    yield Measurement("prefetch: share of the disk's GB/s", own / plain, "x", _RUNS,
                      f"{own:,.2f} GB/s")  # fmt: skip


def _way(is_direct: bool) -> str:
    return "past the page cache" if is_direct else "page cache dropped before"


class _Disk:
    """A file beside the tier's, and threads that read it: the disk's speed without the tier.

    It has different bytes for each run, because storage may cache bytes that were read before.

    Args:
        path: Folder of the tier.
        num_bytes: Bytes that one run reads.

    Attributes:
        path: As given.
        num_bytes: As given.
        is_direct: Whether reads bypass the page cache.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self._stride = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self._file = path / "plain-reads"
        self._memory = memoryview(mmap.mmap(-1, self._stride))
        self._threads = ThreadPoolExecutor(_READERS)
        self._seconds: list[float] = []
        with self._file.open("wb") as file:
            for seed in range(_RUNS):
                file.write(np.random.default_rng(seed).bytes(self._stride))
            file.flush()
            os.fsync(file.fileno())
        _drop_pages(path)
        try:
            self._fd, self.is_direct = os.open(self._file, os.O_RDONLY | os.O_DIRECT), True
        except OSError:
            self._fd, self.is_direct = os.open(self._file, os.O_RDONLY), False
        self._memory[:] = bytes(self._stride)  # maps all pages before the timing

    def read(self, run: int) -> None:
        """Read the bytes of a run by all threads at once, and record the time."""
        begun = time.perf_counter()
        parts = range(0, self._stride, _READ_BYTES)
        moved = sum(self._threads.map(partial(self._read_part, run * self._stride), parts))
        self._seconds.append(time.perf_counter() - begun)
        assert moved == self._stride

    def seconds(self) -> float:
        """Return the median time of the runs."""
        return statistics.median(self._seconds)

    def close(self) -> None:
        """Remove the file."""
        self._threads.shutdown()
        os.close(self._fd)
        self._file.unlink()

    def _read_part(self, offset: int, start: int) -> int:
        part = self._memory[start : start + _READ_BYTES]
        return os.preadv(self._fd, [part], offset + start)


def _drop_pages(path: Path) -> None:
    """Drop the files below a path from the system's page cache."""
    for file in [each for each in path.rglob("*") if each.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _measure_readiness(shape: TierShape, device: torch.device) -> Iterator[Measurement]:
    """Time until a large tier is ready, and until the first request of its context is served.

    Twice: the first time the system may have to obtain memory, as in a virtual machine; the second
    time the system has the memory.
    """
    # A server has loaded its model by then: the driver is loaded, and kernels are compiled.
    alone = _make_tier(shape._replace(ready_gb=0.0), device)
    yield Measurement("no tier: until the first request is served", alone.first * 1e3, "ms",
                      detail=f"of a new process: {alone.stages}")  # fmt: skip
    for which in ("", ", of memory used before"):
        gib = f"{shape.ready_gb:g} GiB of tier{which}"
        progress(gib)
        made = _make_tier(shape, device)
        gc.collect()  # free the memory before the next tier takes as much
        yield Measurement(f"{gib}: until all of it is there", made.ready * 1e3, "ms",
                          detail=made.detail)  # fmt: skip
        yield Measurement(f"{gib}: until the first request is served", made.first * 1e3, "ms",
                          detail=made.stages)  # fmt: skip


class _Made(NamedTuple):
    """Seconds until a request is served, and until a tier is ready, with their stages."""

    first: float
    ready: float
    stages: str
    detail: str


def _make_tier(shape: TierShape, device: torch.device) -> _Made:
    """Make a context with a tier (of 0 GiB: without one) and serve a request."""
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        max_requests=1,
        max_tokens=_BLOCK,
        max_sequence_length=2 * _BLOCK,
        num_kv_blocks=4,
        max_slots=2,
        host_cache_gb=shape.ready_gb or None,
    )
    times = [time.perf_counter()]
    context = DynamicInferenceContext(config, shape.states, shape.kv, device=device)
    times.append(time.perf_counter())
    context.add_request(Request(request_id="a", prompt_tokens=list(range(200))))
    times.append(time.perf_counter())
    context.begin_step()
    times.append(time.perf_counter())
    context.commit_step([1])  # without the time of a model
    times.append(time.perf_counter())
    names = "context", "add_request", "begin_step", "commit_step"
    stages = ", ".join(
        f"{name} {(after - before) * 1e3:,.1f} ms"
        for name, before, after in zip(names, times, times[1:], strict=False)
    )
    context.wait_for_tiers()
    ready, detail = time.perf_counter() - times[0], ""
    host = context.host_tier
    if host is not None:
        [stats] = context.tier_stats()
        assert stats.ready_rows == stats.rows
        if host._pinner is not None:
            detail = f"{_huge_pages():,.1f} GiB of huge pages"
        host.close()
    return _Made(times[-1] - times[0], ready, stages, detail)


def _huge_pages() -> float:
    """Return the GiB of this process in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    sizes = [int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")]
    return sum(sizes) / 2**20


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
    ticket = run(jobs)
    (ticket.synchronize if isinstance(ticket, torch.cuda.Event) else ticket.wait)()


def _alone(copy: Callable[[], object], on_gpu: bool) -> None:
    copy()
    if on_gpu:
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run every measurement, one after the other."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--device", metavar="NAME", help="where the cache is; default: a GPU, else the CPU")
    add("--small", action="store_true", help="few tiny states: to check that it runs")
    about = f"which of {', '.join(PARTS)} to run; default: all, but model without transformers"
    add("--only", nargs="+", choices=PARTS, metavar="PART", help=about)
    about = "where the disk tier is; default: a new directory for temporary files"
    add("--disk-path", metavar="DIR", help=about)
    about = "GiB of the tier whose construction is timed; default: 64 on a GPU, else 0.25"
    add("--ready-gb", type=float, metavar="GB", help=about)
    options = parser.parse_args(arguments)
    only = options.only
    if only is None:
        only = [part for part in PARTS if part != "model" or find_spec("transformers")]
    where = usable_device(options.device)
    ready_gb = options.ready_gb
    if ready_gb is None:
        ready_gb = 64.0 if where.type == "cuda" and not options.small else 0.25
    shape = _shape(small=options.small, ready_gb=ready_gb)
    results: list[Measurement] = []
    if "ready" in only:  # first, while the machine's memory is unused
        results += _measure_readiness(shape, where)
    if not {"copies", "steps", "model"}.isdisjoint(only):
        copies = _Copies(shape, where)
        copies.check_bits()
        if "copies" in only:
            results += _measure_copies(copies)
        if copies.on_gpu:
            for part, make in (("steps", _products), ("model", _model)):
                if part in only:
                    results += _measure_steps(copies, make(copies))
        copies.close()
        del copies
    if "first" in only or "disk" in only:
        results += _measure_first_tokens(shape, where, only, options.disk_path)
    return report("tiers", results, options.json)


if __name__ == "__main__":
    main()
