"""Times state copies on a GPU beside other ways to move the same bytes.

    python tests/benchmarks/bench_copy.py --json copy.json

Whole states are copied, a prefill's checkpoints are saved, and int8 slots are written and read.
Every figure is a median of runs queued behind one another, so that the device never waits for the
host. Bits are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from measuring import (
    Measurement,
    assert_same_bits,
    device_us,
    host_us,
    need_gpu,
    parser_for,
    progress,
    report,
)

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.reference import HybridModel, HybridModelConfig
from mamba_cache.states import (
    SlotQuantization,
    StateCopier,
    StatePool,
    StateSpec,
    dequantize_states,
    plan_extraction,
    quantize_states,
)

_DEVICE = "cuda"
_RUNS = 15
_ROW_SETS = 5
_SPARE_ROWS = 8


def _mamba(layers, conv, ssm, ssm_dtype=torch.float32):
    return StateSpec.mamba(layers, conv, ssm, torch.bfloat16, ssm_dtype)


SHAPES = {
    "Nemotron-H-8B, fp32 SSM": _mamba(24, (10240, 4), (128, 64, 128)),
    "Nemotron-H-8B, bf16 SSM": _mamba(24, (10240, 4), (128, 64, 128), torch.bfloat16),
    "Nemotron-Nano-9B-v2": _mamba(27, (12288, 4), (128, 80, 128)),
    "Granite-4.0-H-Tiny": _mamba(36, (3328, 4), (48, 64, 128)),
    "Qwen3-Next-80B-A3B": _mamba(36, (8192, 4), (32, 128, 128)),
    "Falcon-H1-7B": _mamba(44, (3584, 4), (24, 128, 256)),
    "Zamba2-7B": _mamba(81, (7424, 4), (112, 64, 64)),
}
"""States to copy, by model."""

SLOT_COUNTS = (1, 4, 16, 64)

_CONV_DIM, _SSM = 10240, (128, 64, 128)  # Nemotron-H-8B's
_QUANTIZED_SLOTS = 16
_CHECKPOINTS = 64
_TOKENS = 16384
_STEP_RUNS = 7
_BLOCK = 128

# Nemotron-H-8B's layers, fewer of them, and a vocabulary of bytes: the share of a step is that of a
# layer. Attention is left out: it would make the step longer.
_MODEL = HybridModelConfig(
    layer_pattern="M-M-",
    hidden_size=4096,
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    num_groups=8,
    ssm_chunk_size=_BLOCK,
    mlp_size=21504,
)


def measure_copies(
    name: str, spec: StateSpec, slot_counts: Sequence[int] = SLOT_COUNTS
) -> Iterator[Measurement]:
    """Time copies of whole states by this package, a flat copy, indexing and a loop."""
    pools = _Pools(spec, max(slot_counts) + _SPARE_ROWS)
    pools.check_bits()
    for num_slots in slot_counts:
        progress(f"{name}: copy {num_slots} slots")
        yield from _compare(name, pools, num_slots)


def measure_tiny_copy() -> Iterator[Measurement]:
    """Time small states: starting the kernel, and the host's part of a call."""
    progress("copy small states")
    spec = StateSpec.mamba(2, (1024, 4), (16, 64, 120), torch.bfloat16, torch.bfloat16)
    pools = _Pools(spec, 64)
    pools.check_bits()
    calls = [partial(pools.copier.copy, *_random_rows(64, 1)) for _ in range(_ROW_SETS)]
    detail = f"{spec.bytes_per_slot:,} bytes"
    yield Measurement("small state, 1 slot", device_us(calls), "us", runs=_RUNS, detail=detail)
    for num_slots in (1, 4, 16):
        rows = _random_rows(64, num_slots)
        lists = [tensor.tolist() for tensor in rows]
        for where, given in (("in lists on the host", lists), ("on the device", rows)):
            host = host_us(partial(pools.copier.copy, *given))
            name = f"small state, {num_slots} slots: host time of a call, rows {where}"
            yield Measurement(name, host, "us", runs=_RUNS)


def measure_extraction(ssm_dtype: torch.dtype, *, int8: bool = False) -> Iterator[Measurement]:
    """Time taking one layer's checkpoints of a prefill step, into slots of either kind."""
    name = f"extract {_CHECKPOINTS} checkpoints of {_TOKENS:,} tokens, {ssm_dtype}"
    if int8:
        name = f"int8 slots, {ssm_dtype}: extract {_CHECKPOINTS} checkpoints"
    progress(name)
    layer = _Layer(ssm_dtype, SlotQuantization() if int8 else None)
    if not int8:
        layer.check_bits()
    own = device_us([layer.extract])
    flat = _flat_us(layer.states, layer.moved_bytes)
    yield _share(name, own, flat, layer.moved_bytes)
    if not int8:
        yield Measurement(f"{name}: host time of a call", host_us(layer.extract), "us", runs=_RUNS)
        yield Measurement(f"{name}: scratch memory", _memory_taken(layer), "bytes")


def measure_model_step(config: HybridModelConfig) -> Iterator[Measurement]:
    """Time a step of the reference model in bfloat16, with checkpoints to save and without."""
    name = f"a step of {_TOKENS:,} tokens that extracts {_CHECKPOINTS} checkpoints"
    progress(name)
    model = HybridModel(config, dtype=torch.bfloat16, device=_DEVICE)
    context = DynamicInferenceContext(
        CacheConfig(
            block_size_tokens=_BLOCK,
            ssm_chunk_size=_BLOCK,
            max_requests=1,
            max_tokens=_TOKENS,
            max_sequence_length=_TOKENS + _BLOCK,
            num_kv_blocks=_TOKENS // _BLOCK + 2,
            max_slots=_CHECKPOINTS + 2,
            max_checkpoints_per_step=_CHECKPOINTS,
        ),
        config.state_spec(model.dtype),
        config.kv_spec(model.dtype),
        device=_DEVICE,
    )
    # Every other block's end, so that all checkpoints lie inside the chunk.
    positions = range(_BLOCK, _TOKENS, 2 * _BLOCK)
    prompt = torch.randint(256, (_TOKENS,)).tolist()
    context.add_request(
        Request(request_id=name, prompt_tokens=prompt, checkpoint_positions=positions)
    )
    metadata = context.begin_step().metadata
    assert int((metadata.checkpoint_slots >= 0).sum()) == _CHECKPOINTS
    # Any: only the fields that are read; no checkpoint is saved.
    saves_nothing: Any = SimpleNamespace(
        kv_cache=context.kv_cache,
        live_states=context.live_states,
        extract_checkpoint_states=lambda *_: None,
    )
    saving, other = (
        device_us([partial(model.forward, metadata, caches)], runs=_STEP_RUNS)
        for caches in (context, saves_nothing)
    )
    detail = f"{saving / 1e3:,.1f} ms, without {other / 1e3:,.1f} ms; layers {config.layer_pattern}"
    over = f"{name}: time over one that does not"
    yield Measurement(over, saving / other, "x", runs=_STEP_RUNS, detail=detail)


def measure_quantized_copies(ssm_dtype: torch.dtype) -> Iterator[Measurement]:
    """Time storing states in int8 slots, and restoring them.

    Rates count the bytes really read and written: a state on one side, codes and scales on the
    other.
    """
    name = f"int8 slots, {ssm_dtype}, {_QUANTIZED_SLOTS} slots"
    progress(name)
    spec = StateSpec.mamba(24, (_CONV_DIM, 4), _SSM, torch.bfloat16, ssm_dtype)
    num_rows = _QUANTIZED_SLOTS + _SPARE_ROWS
    live = _random_pool(spec, num_rows)
    slots = StatePool(SlotQuantization().slot_spec(spec), num_rows, device=_DEVICE)
    states, saved = list(live.tensors.values()), list(slots.tensors.values())
    store = StateCopier(states, saved)
    restore = StateCopier(saved, states)
    _check_quantized_bits(live, slots, store, restore)
    num_bytes = _QUANTIZED_SLOTS * (spec.bytes_per_slot + slots.spec.bytes_per_slot)
    flat = _flat_us(states[1], num_bytes)
    for direction, copier in (("store", store), ("restore", restore)):
        rows = [_random_rows(num_rows, _QUANTIZED_SLOTS) for _ in range(_ROW_SETS)]
        own = device_us([partial(copier.copy, *pair) for pair in rows])
        yield _share(f"{name}: {direction}", own, flat, num_bytes)


class _Pools:
    """Two pools of random states, and ways to copy rows from one to the other."""

    def __init__(self, spec: StateSpec, num_rows: int) -> None:
        self.spec, self.num_rows = spec, num_rows
        pools = [_random_pool(spec, num_rows) for _ in range(2)]
        self.sources, self.destinations = (list(pool.tensors.values()) for pool in pools)
        self.copier = StateCopier(self.sources, self.destinations)

    def index(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for read, write in zip(self.sources, self.destinations, strict=True):
            write[:, destinations] = read[:, sources]

    def loop(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            for read, write in zip(self.sources, self.destinations, strict=True):
                write[:, destination].copy_(read[:, source])

    def flat(self, num_slots: int, turn: int) -> None:
        """Copy as many bytes in one piece; use a different piece each turn if there is room."""
        source, destination = self.sources[1].view(-1), self.destinations[1].view(-1)
        count = num_slots * self.spec.bytes_per_slot // source.element_size()
        start = turn % (source.numel() // count) * count
        destination[start : start + count].copy_(source[start : start + count])

    def check_bits(self) -> None:
        """Compare one copy of this package with the sources."""
        sources, destinations = _random_rows(self.num_rows, 4)
        self.copier.copy(sources, destinations)
        for read, write in zip(self.sources, self.destinations, strict=True):
            assert_same_bits(write[:, destinations], read[:, sources])


class _Layer:
    """One layer's part of a prefill step, with random states and inputs."""

    def __init__(self, ssm_dtype: torch.dtype, quantization: SlotQuantization | None) -> None:
        spec = StateSpec.mamba(1, (_CONV_DIM, 4), _SSM, torch.bfloat16, ssm_dtype)
        slot_spec = quantization.slot_spec(spec) if quantization else spec
        slots = StatePool(slot_spec, _CHECKPOINTS + _SPARE_ROWS, device=_DEVICE)
        live = _random_pool(spec, _CHECKPOINTS + _SPARE_ROWS)
        self.moved_bytes = _CHECKPOINTS * (spec.bytes_per_slot + slot_spec.bytes_per_slot)
        self.slots = {name: tensor[0] for name, tensor in slots.tensors.items()}
        self.live, self.states = live["conv"][0], live["ssm"][0]
        self.inputs = torch.randn(_TOKENS, _CONV_DIM, dtype=torch.bfloat16, device=_DEVICE)
        self.order = torch.randperm(_CHECKPOINTS).int().to(_DEVICE)
        entries = torch.arange(_CHECKPOINTS, dtype=torch.int32, device=_DEVICE)
        zeros = torch.zeros_like(entries)
        self.ends = (entries + 1) * (_TOKENS // _CHECKPOINTS)
        self.plan = partial(
            plan_extraction,
            self.slots["conv"],
            self.slots["ssm"],
            self.live,
            self.states,
            self.inputs,
            fields=(entries, self.ends, zeros, zeros, self.order),
            slot_scales=self.slots.get("ssm_scales"),
        )

    def extract(self) -> None:
        """Plan and write, as a context does for a layer."""
        self.plan()()

    def check_bits(self) -> None:
        """Compare one extraction into plain slots with a loop's."""
        self.extract()
        width = self.live.shape[2]
        places = zip(self.order.tolist(), self.ends.tolist(), strict=True)
        for entry, (slot, end) in enumerate(places):
            assert_same_bits(self.slots["ssm"][slot], self.states[entry])
            assert_same_bits(self.slots["conv"][slot], self.inputs[end - width : end].T)


def _compare(shape: str, pools: _Pools, num_slots: int) -> Iterator[Measurement]:
    rows = [_random_rows(pools.num_rows, num_slots) for _ in range(_ROW_SETS)]
    lists = [(sources.tolist(), destinations.tolist()) for sources, destinations in rows]
    own = device_us([partial(pools.copier.copy, *pair) for pair in rows])
    flat = device_us([partial(pools.flat, num_slots, turn) for turn in range(_ROW_SETS)])
    index = device_us([partial(pools.index, *pair) for pair in rows])
    loop = device_us([partial(pools.loop, *pair) for pair in lists])
    host = host_us(partial(pools.copier.copy, *lists[0]))
    num_bytes = 2 * num_slots * pools.spec.bytes_per_slot
    name = f"{shape}, {num_slots} slots"
    measured = partial(Measurement, runs=_RUNS)
    detail = f"{own:,.1f} us, {_rate(num_bytes, own)}; flat copy {flat:,.1f} us"
    yield measured(f"{name}: time over a flat copy's", own / flat, "x", detail=detail)
    for other, time_us in (("indexing", index), ("a loop", loop)):
        speedup = time_us / own
        # A flat copy is the upper bound: report how much faster it is.
        detail = f"{time_us:,.1f} us; a flat copy is {time_us / flat:.2f}x faster"
        yield measured(f"{name}: faster than {other}", speedup, "x", detail=detail)
    detail = "rows in lists on the host, large copies queued before"
    yield measured(f"{name}: host time of a call", host, "us", detail=detail)


def _share(name: str, own_us: float, flat_us: float, num_bytes: int) -> Measurement:
    return Measurement(
        f"{name}: share of the flat copy's GB/s",
        flat_us / own_us,
        "x",
        runs=_RUNS,
        detail=f"{own_us:,.1f} us, {_rate(num_bytes, own_us)}, flat copy {flat_us:,.1f} us",
    )


def _rate(num_bytes: int, time_us: float) -> str:
    return f"{num_bytes / time_us / 1e3:,.0f} GB/s read and written"


def _flat_us(source: torch.Tensor, num_bytes: int) -> float:
    """Time a flat copy that reads and writes ``num_bytes`` in all."""
    count = num_bytes // 2 // source.element_size()
    destination = torch.empty(count, dtype=source.dtype, device=source.device)
    return device_us([partial(destination.copy_, source.view(-1)[:count])])


def _memory_taken(layer: _Layer) -> int:
    """Return the bytes of GPU memory that an extraction takes while it runs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer.extract()
    return torch.cuda.max_memory_allocated() - before


def _random_rows(num_rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows to read and rows to write, on the device."""
    first, second = (torch.randperm(num_rows)[:count].int().to(_DEVICE) for _ in range(2))
    return first, second


def _random_pool(spec: StateSpec, num_rows: int) -> StatePool:
    pool = StatePool(spec, num_rows, device=_DEVICE)
    for tensor in pool.tensors.values():
        tensor.normal_()
    return pool


def _check_quantized_bits(
    live: StatePool, slots: StatePool, store: StateCopier, restore: StateCopier
) -> None:
    """Compare one state, quantised and restored, with PyTorch's result on the CPU."""
    store.copy([2], [3])
    codes, scales = quantize_states(live["ssm"][:2, 2].cpu())
    assert torch.equal(slots["ssm"][:2, 3].cpu(), codes)
    assert torch.equal(slots["ssm_scales"][:2, 3].cpu(), scales)
    restore.copy([3], [1])
    expected = dequantize_states(codes, scales, live["ssm"].dtype)
    assert torch.equal(live["ssm"][:2, 1].cpu(), expected)
    assert torch.equal(live["conv"][:, 1], live["conv"][:, 2])


def main() -> None:
    """Run every measurement, one after the other."""
    options = parser_for(__doc__).parse_args()
    need_gpu()
    dtypes = (torch.float32, torch.bfloat16)
    results = [one for name, spec in SHAPES.items() for one in measure_copies(name, spec)]
    results += measure_tiny_copy()
    for dtype in dtypes:
        results += measure_extraction(dtype)
    results += measure_model_step(_MODEL)
    for dtype in dtypes:
        results += measure_quantized_copies(dtype)
        results += measure_extraction(dtype, int8=True)
    report("copy", results, options.json)


if __name__ == "__main__":
    main()
