"""How long states in block tables take to follow a step on a GPU, beside a flat copy.

No time is taken before the bits have been compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from mamba_cache.align import (
    MambaHybridModelState,
    MambaSpec,
    MambaSpecDecodeGPUContext,
    get_conv_copy_spec,
    get_temporal_copy_spec,
)
from mamba_cache.bench.measure import Measurement, device_us, progress

__all__ = ["REQUEST_COUNTS", "measure_copies", "measure_idle_step", "run_align"]

REQUEST_COUNTS = (1, 4, 16)
"""Requests that cross a boundary in one step."""

_LAYERS, _COLUMNS, _COLUMN_TOKENS = 24, 5, 512
_CONV, _SSM = (4, 10240), (128, 64, 128)
_COPY_FUNCS = (get_conv_copy_spec, get_temporal_copy_spec)
_RUNS = 15


def run_align() -> list[Measurement]:
    """Run every measurement, one after the other.

    Raises:
        SystemExit: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise SystemExit("the align benchmark times a GPU, and PyTorch finds none")
    engine = _Engine(max(REQUEST_COUNTS))
    engine.check_bits()
    return [*measure_copies(engine), *measure_idle_step(engine)]


def measure_copies(engine: _Engine) -> Iterator[Measurement]:
    """Time the copies before and after a step in which every request crosses a boundary."""
    for num_reqs in REQUEST_COUNTS:
        for bias in (0, 1):
            progress(f"copy the states of {num_reqs} requests, {bias} drafts accepted")
            num_bytes = num_reqs * engine.moved_bytes(bias)
            flat = device_us([partial(engine.flat_copy, num_bytes)], runs=_RUNS)
            limit = {1: 1.08, 16: 1.04}.get(num_reqs)
            for name, calls in (
                ("pre-copy", engine.precopies(num_reqs, bias)),
                ("post-copy", engine.postcopies(num_reqs, bias)),
            ):
                own = device_us(calls, runs=_RUNS)
                yield Measurement(
                    f"{name}, {num_reqs} requests, {bias} drafts accepted: over a flat copy's time",
                    own / flat,
                    "x",
                    limit,
                    runs=_RUNS,
                    detail=f"{own:,.1f} us, {num_bytes / 1e6:,.1f} MB, flat copy {flat:,.1f} us",
                )


def measure_idle_step(engine: _Engine) -> Iterator[Measurement]:
    """Time all that a step costs in which no request crosses a boundary."""
    for num_reqs in REQUEST_COUNTS:
        progress(f"a step of {num_reqs} requests in which nothing is copied")
        time_us = device_us([engine.idle_step(num_reqs)], runs=_RUNS)
        name = f"{num_reqs} requests, no boundary crossed: before and after the forward"
        yield Measurement(name, time_us, "us", 8, runs=_RUNS)


class _Engine:
    """States of random bits, and requests whose columns are blocks of their own."""

    def __init__(self, max_num_reqs: int) -> None:
        num_blocks = max_num_reqs * _COLUMNS
        self.convs = [_random(torch.bfloat16, num_blocks, *_CONV) for _ in range(_LAYERS)]
        self.ssms = [_random(torch.float32, num_blocks, *_SSM) for _ in range(_LAYERS)]
        names = [f"mamba.{layer}" for layer in range(_LAYERS)]
        states = zip(names, self.convs, self.ssms, strict=True)
        layers = {name: SimpleNamespace(kv_cache=[conv, ssm]) for name, conv, ssm in states}
        spec = MambaSpec(
            block_size=_COLUMN_TOKENS,
            num_speculative_blocks=1,
            shapes=(_CONV, _SSM),
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
        self.context.initialize_from_forward_context(self.config, layers, _COPY_FUNCS, [self.table])
        self.state = _resident_state(max_num_reqs, layers)
        self.flat = [torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def moved_bytes(self, bias: int) -> int:
        """Return the bytes of one request that a copy must read."""
        conv, ssm = self.convs[0][0], self.ssms[0][0]
        return _LAYERS * (conv[bias:].numel() * conv.itemsize + ssm.numel() * ssm.itemsize)

    def flat_copy(self, num_bytes: int) -> None:
        """Copy as many bytes in one piece."""
        self.flat[1][:num_bytes].copy_(self.flat[0][:num_bytes])

    def precopies(self, num_reqs: int, bias: int) -> list[Callable[[], None]]:
        """Return copies between other columns each."""
        return [
            partial(self._precopy, num_reqs, *(_full(num_reqs, n) for n in (*columns, bias)))
            for columns in ((2, 0), (3, 1), (0, 2), (1, 3))
        ]

    def postcopies(self, num_reqs: int, bias: int) -> list[Callable[[], None]]:
        """Return copies to the column before the running one."""
        calls: list[Callable[[], None]] = []
        for column in (1, 2, 3):
            # The accepted drafts end at the boundary where the running column begins.
            num_computed = column * _COLUMN_TOKENS - bias - 1
            values = (bias + 1, column, 1 + bias, num_computed, bias)
            inputs = [_full(num_reqs, value) for value in values]
            calls.append(partial(self.context.run_fused_postprocess, num_reqs, *inputs))
        return calls

    def idle_step(self, num_reqs: int) -> Callable[[], None]:
        """Return a step of all requests in the middle of a column."""
        slots = torch.arange(num_reqs, dtype=torch.int32, device="cuda")
        lengths = torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda") * 2
        # Any: just the fields that are read.
        batch = cast(
            Any, SimpleNamespace(num_reqs=num_reqs, idx_mapping=slots, query_start_loc=lengths)
        )
        num_computed = _full(len(self.table), _COLUMN_TOKENS // 2)
        sampled = _full(num_reqs, 2)
        for slot in range(num_reqs):
            request = SimpleNamespace(num_computed_tokens=_COLUMN_TOKENS // 2)
            self.state.add_request(slot, request)

        def step() -> None:
            self.state.preprocess_state(batch, [self.table], self.config, num_computed)
            self.state.postprocess_state(slots, sampled, num_computed)

        return step

    def check_bits(self) -> None:
        """Compare one copy before and one after a step with what indexing would have copied."""
        num_reqs = len(self.table)
        columns = [self.table[:, column].long() for column in range(_COLUMNS)]
        for call, source, destination in (
            (self.precopies(num_reqs, 1)[2], 0, 2),
            (self.postcopies(num_reqs, 1)[1], 2, 1),
        ):
            wanted = [
                (conv[columns[source]][:, 1:], ssm[columns[source + 1]])
                for conv, ssm in zip(self.convs, self.ssms, strict=True)
            ]
            call()
            for (conv, ssm), now in zip(
                wanted, zip(self.convs, self.ssms, strict=True), strict=True
            ):
                blocks = columns[destination]
                _assert_same_bits(now[0][blocks][:, :-1], conv)
                _assert_same_bits(now[1][blocks], ssm)

    def _precopy(self, num_reqs: int, *columns: torch.Tensor) -> None:
        source, destination, bias = columns
        self.context.run_fused_precopy(num_reqs, destination, source, bias)


def _resident_state(max_num_reqs: int, layers: dict[str, Any]) -> MambaHybridModelState:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode="align", mamba_block_size=_COLUMN_TOKENS),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    model = SimpleNamespace(get_mamba_state_copy_func=lambda: _COPY_FUNCS)
    # Any: just the fields that are read.
    return MambaHybridModelState(cast(Any, config), cast(Any, model), None, "cuda")


def _full(count: int, value: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32, device="cuda")


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cuda")
    tensor.view(torch.uint8).random_(0, 256)
    return tensor


def _assert_same_bits(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    pair: Sequence[torch.Tensor] = [t.contiguous().view(torch.uint8) for t in (tensor, expected)]
    assert torch.equal(pair[0], pair[1])
