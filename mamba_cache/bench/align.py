"""The benchmark of the vLLM adapter: states in block tables on a GPU, beside a flat copy.

No time is taken before the bits have been compared. Copies and flat copies are timed in turn, and
other blocks are copied each time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from mamba_cache.bench.measure import Measurement, assert_same_bits, check_gpu, device_us, progress
from mamba_cache.integrations.vllm import (
    MambaHybridModelState,
    MambaSpec,
    MambaSpecDecodeGPUContext,
    get_conv_copy_spec,
    get_conv_copy_spec_ds,
    get_temporal_copy_spec,
)

__all__ = ["REQUEST_COUNTS", "measure_copies", "measure_idle_step", "run_align"]

REQUEST_COUNTS = (1, 4, 16)
"""Requests that cross a boundary in one step."""

_LAYERS, _COLUMNS, _COLUMN_TOKENS = 24, 12, 512
_CONV, _SSM = (4, 10240), (128, 64, 128)
_FLAT_BYTES = 2 * 10**9
_ROUNDS, _RUNS = 5, 9
_NUM_RUNS = _ROUNDS * _RUNS
_QUEUED_STEPS = 4  # as many as the host can queue ahead of the device

_Call = Callable[[], object]


def run_align() -> list[Measurement]:
    """Run every measurement, one after the other.

    Raises:
        InvalidArgumentError: There is no GPU.
    """
    check_gpu("align")
    results: list[Measurement] = []
    for layout in ("SD", "DS"):
        engine = _Engine(layout, max(REQUEST_COUNTS))
        engine.check_bits()
        results += measure_copies(engine)
    return [*results, *measure_idle_step(engine)]


def measure_copies(engine: _Engine) -> Iterator[Measurement]:
    """Time the copies before and after a step in which every request crosses a boundary."""
    for num_reqs in REQUEST_COUNTS:
        for bias in (0, 1):
            title = f"{engine.layout}, {num_reqs} requests, {bias} drafts accepted"
            progress(f"copy states, {title}")
            num_bytes = num_reqs * engine.moved_bytes(bias)
            flat, before, after = _in_turn_us(
                engine.flat_copies(num_bytes),
                engine.precopies(num_reqs, bias),
                engine.postcopies(num_reqs, bias),
            )
            limit = {1: 1.08, 16: 1.04}.get(num_reqs)
            if engine.layout == "DS" and bias:
                limit = None  # each row is shifted by itself, in words of two bytes
            for name, own in (("pre-copy", before), ("post-copy", after)):
                yield Measurement(
                    f"{name}, {title}: over a flat copy's time",
                    own / flat,
                    "x",
                    limit,
                    runs=_NUM_RUNS,
                    detail=f"{own:,.1f} us, {num_bytes / 2**20:,.1f} MiB, flat copy {flat:,.1f} us",
                )


def measure_idle_step(engine: _Engine) -> Iterator[Measurement]:
    """Time all calls of a step in which no request crosses a boundary."""
    for num_reqs in REQUEST_COUNTS:
        progress(f"a step of {num_reqs} requests in which nothing is copied")
        step = engine.idle_step(num_reqs)
        queue = [partial(_repeat, step, _QUEUED_STEPS)]
        queued, alone, nothing = _in_turn_us(queue, [step], [lambda: None])
        name = f"{num_reqs} requests, no boundary crossed: all calls of a step"
        detail = f"{_QUEUED_STEPS} steps behind one another; one alone {alone:,.1f} us, of which "
        detail += f"{nothing:,.1f} us are the clock's"
        yield Measurement(name, queued / _QUEUED_STEPS, "us", 8, runs=_NUM_RUNS, detail=detail)


def _repeat(call: _Call, times: int) -> None:
    for _ in range(times):
        call()


def _in_turn_us(*groups: Sequence[_Call]) -> list[float]:
    """Return the median time of one of the calls of each group, the groups taking turns."""
    rounds = [[device_us(group, runs=_RUNS) for group in groups] for _ in range(_ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


class _Engine:
    """States of random bits, and requests whose columns are blocks of their own."""

    def __init__(self, layout: str, max_num_reqs: int) -> None:
        num_blocks = max_num_reqs * _COLUMNS
        self.layout = layout
        window = _CONV if layout == "SD" else _CONV[::-1]
        self.convs = [_random(torch.bfloat16, num_blocks, *window) for _ in range(_LAYERS)]
        self.ssms = [_random(torch.float32, num_blocks, *_SSM) for _ in range(_LAYERS)]
        names = [f"mamba.{layer}" for layer in range(_LAYERS)]
        states = zip(names, self.convs, self.ssms, strict=True)
        layers = {name: SimpleNamespace(kv_cache=[conv, ssm]) for name, conv, ssm in states}
        spec = MambaSpec(
            block_size=_COLUMN_TOKENS,
            num_speculative_blocks=1,
            shapes=(window, _SSM),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_cache_mode="align",
        )
        group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        # Any: just the fields that are read, as an engine's own objects have them.
        self.config = cast(Any, SimpleNamespace(kv_cache_groups=[group]))
        blocks = torch.randperm(num_blocks, dtype=torch.int32, device="cuda")
        self.table = blocks.view(max_num_reqs, _COLUMNS)
        self.context = MambaSpecDecodeGPUContext.create(
            max_num_reqs, self.config, 2, "cuda", lambda n, *, dtype: None
        )
        conv_func = get_conv_copy_spec if layout == "SD" else get_conv_copy_spec_ds
        copy_funcs = (conv_func, get_temporal_copy_spec)
        self.context.initialize_from_forward_context(self.config, layers, copy_funcs, [self.table])
        self.state = _resident_state(max_num_reqs, layers, copy_funcs)
        self.flat = [_random(torch.uint8, _FLAT_BYTES) for _ in range(2)]

    def moved_bytes(self, bias: int) -> int:
        """Return the bytes of one request that a copy must read."""
        window, ssm = self.windows(0)[0], self.ssms[0][0]
        kept = window[bias:]
        return _LAYERS * (kept.numel() * kept.itemsize + ssm.numel() * ssm.itemsize)

    def windows(self, layer: int) -> torch.Tensor:
        """Return a layer's conv states as [blocks, W, dim]."""
        conv = self.convs[layer]
        return conv if self.layout == "SD" else conv.transpose(1, 2)

    def flat_copies(self, num_bytes: int) -> list[_Call]:
        """Return copies of as many bytes in one piece each."""
        starts = range(0, _FLAT_BYTES - num_bytes + 1, num_bytes)
        pieces = [[flat[start : start + num_bytes] for flat in self.flat] for start in starts]
        return [partial(destination.copy_, source) for source, destination in pieces[:4]]

    def precopies(self, num_reqs: int, bias: int) -> list[_Call]:
        """Return copies between other columns each."""
        return [
            partial(self._precopy, num_reqs, *(_full(num_reqs, n) for n in (*columns, bias)))
            for columns in ((0, 6), (2, 8), (4, 10), (7, 1))
        ]

    def postcopies(self, num_reqs: int, bias: int) -> list[_Call]:
        """Return copies to the column before the running one."""
        calls: list[_Call] = []
        for column in (1, 4, 7, 10):
            # The accepted drafts end at the boundary where the running column begins.
            num_computed = column * _COLUMN_TOKENS - bias - 1
            values = (bias + 1, column, 1 + bias, num_computed, bias)
            inputs = [_full(num_reqs, value) for value in values]
            calls.append(partial(self.context.run_fused_postprocess, num_reqs, *inputs))
        return calls

    def idle_step(self, num_reqs: int) -> _Call:
        """Return a step of all requests in the middle of a column."""
        slots = torch.arange(num_reqs, dtype=torch.int32, device="cuda")
        lengths = torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda") * 2
        # Any: just the fields that are read.
        batch = cast(
            Any,
            SimpleNamespace(
                num_reqs=num_reqs,
                num_tokens=2 * num_reqs,
                idx_mapping=slots,
                query_start_loc=lengths,
                num_scheduled_tokens=np.full(num_reqs, 2),
                num_draft_tokens_per_req=np.full(num_reqs, 1),
                is_prefilling_np=np.zeros(num_reqs, dtype=bool),
                seq_lens_cpu_upper_bound=torch.full((num_reqs,), _COLUMN_TOKENS),
            ),
        )
        num_computed = _full(len(self.table), _COLUMN_TOKENS // 2)
        sampled = _full(num_reqs, 2)
        for slot in range(num_reqs):
            request = SimpleNamespace(num_computed_tokens=_COLUMN_TOKENS // 2)
            self.state.add_request(slot, request)

        def step() -> None:
            self.state.preprocess_state(batch, [self.table], self.config, num_computed)
            self.state.prepare_attn(batch)
            self.state.postprocess_state(slots, sampled, num_computed)

        return step

    def check_bits(self) -> None:
        """Compare one copy before and one after a step with what indexing would have copied."""
        num_reqs = len(self.table)
        columns = [self.table[:, column].long() for column in range(_COLUMNS)]
        for call, source, destination in (
            (self.precopies(num_reqs, 1)[2], 4, 10),
            (self.postcopies(num_reqs, 1)[1], 4, 3),
        ):
            wanted = [
                (self.windows(layer)[columns[source]][:, 1:], ssm[columns[source + 1]])
                for layer, ssm in enumerate(self.ssms)
            ]
            call()
            for layer, (window, ssm) in enumerate(wanted):
                blocks = columns[destination]
                assert_same_bits(self.windows(layer)[blocks][:, :-1], window)
                assert_same_bits(self.ssms[layer][blocks], ssm)

    def _precopy(self, num_reqs: int, *columns: torch.Tensor) -> None:
        source, destination, bias = columns
        self.context.run_fused_precopy(num_reqs, destination, source, bias)


def _resident_state(
    max_num_reqs: int, layers: dict[str, Any], copy_funcs: tuple[Any, ...]
) -> MambaHybridModelState:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode="align", mamba_block_size=_COLUMN_TOKENS),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(max_model_len=_COLUMNS * _COLUMN_TOKENS),
        num_speculative_tokens=1,
    )
    model = SimpleNamespace(get_mamba_state_copy_func=lambda: copy_funcs)
    # Any: just the fields that are read.
    return MambaHybridModelState(cast(Any, config), cast(Any, model), None, "cuda")


def _full(count: int, value: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32, device="cuda")


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cuda")
    tensor.view(torch.uint8).random_(0, 256)
    return tensor
