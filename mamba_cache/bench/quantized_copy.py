"""The benchmark of copies between live states and int8 slots on a GPU, beside a flat copy.

Rates count the bytes really read and written: a state on one side, codes and scales on the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import get_args

import torch

from mamba_cache.bench.copy import RUNS, spec_of
from mamba_cache.bench.measure import Measurement, device_us, progress
from mamba_cache.states import (
    SlotQuantization,
    SlotRounding,
    StateDequantizer,
    StatePool,
    StateQuantizer,
    dequantize_states,
    extract_checkpoint_states,
    quantize_states,
)

__all__ = ["measure_quantized_copies", "measure_quantized_extraction", "run_quantized_copies"]

_SLOTS = 16
_SPARE_ROWS = 8
_LEAST_SHARE = 0.8
_ROW_SETS = 5


def run_quantized_copies() -> list[Measurement]:
    """Run every measurement, one after the other, on a GPU."""
    results: list[Measurement] = []
    for dtype in (torch.float32, torch.bfloat16):
        for rounding in get_args(SlotRounding):
            results += measure_quantized_copies(dtype, rounding)
        results += measure_quantized_extraction(dtype)
    return results


def measure_quantized_copies(
    ssm_dtype: torch.dtype, rounding: SlotRounding
) -> Iterator[Measurement]:
    """Time storing states in int8 slots, and restoring them."""
    name = f"int8 slots, {ssm_dtype}, {rounding}, {_SLOTS} slots"
    progress(name)
    live, slots, quantization = _pools(24, ssm_dtype, rounding)
    states, saved = list(live.tensors.values()), list(slots.tensors.values())
    store = StateQuantizer(states, saved, quantization)
    restore = StateDequantizer(saved, states)
    _check_bits(live, slots, store, restore, quantization)
    num_bytes = _SLOTS * (live.spec.bytes_per_slot + slots.spec.bytes_per_slot)
    flat = _flat_us(states[1], num_bytes)
    for direction, copier in (("store", store), ("restore", restore)):
        calls = [partial(copier.copy, *_rows(live.num_rows)) for _ in range(_ROW_SETS)]
        yield _share(f"{name}: {direction}", device_us(calls), flat, num_bytes)


def measure_quantized_extraction(ssm_dtype: torch.dtype) -> Iterator[Measurement]:
    """Time taking one layer's checkpoints of a prefill step into int8 slots."""
    num_checkpoints, num_tokens = 64, 16384
    name = f"int8 slots, {ssm_dtype}: extract {num_checkpoints} checkpoints"
    progress(name)
    live, slots, quantization = _pools(1, ssm_dtype, "nearest", num_checkpoints)
    inputs = torch.randn(num_tokens, 10240, dtype=torch.bfloat16, device="cuda")
    entries = torch.arange(num_checkpoints, dtype=torch.int32, device="cuda")
    zeros = torch.zeros_like(entries)
    extract = partial(
        extract_checkpoint_states,
        slots["conv"][0],
        slots["ssm"][0],
        live["conv"][0],
        live["ssm"][0],
        inputs,
        checkpoint_chunks=entries,
        checkpoint_conv_ends=(entries + 1) * (num_tokens // num_checkpoints),
        checkpoint_seq_starts=zeros,
        checkpoint_rows=zeros,
        checkpoint_slots=torch.randperm(num_checkpoints, device="cuda").int(),
        slot_scales=slots["ssm_scales"][0],
        quantization=quantization,
    )
    num_bytes = num_checkpoints * (live.spec.bytes_per_slot + slots.spec.bytes_per_slot)
    yield _share(name, device_us([extract]), _flat_us(live["ssm"], num_bytes), num_bytes)


def _share(name: str, own_us: float, flat_us: float, num_bytes: int) -> Measurement:
    rate = f"{num_bytes / own_us / 1e3:,.0f} GB/s read and written"
    detail = f"{own_us:,.1f} us, {rate}, flat copy {flat_us:,.1f} us"
    share = flat_us / own_us
    name = f"{name}: share of the flat copy's GB/s"
    return Measurement(name, share, "x", _LEAST_SHARE, at_least=True, runs=RUNS, detail=detail)


def _pools(
    num_layers: int, ssm_dtype: torch.dtype, rounding: SlotRounding, num_rows: int = _SLOTS
) -> tuple[StatePool, StatePool, SlotQuantization]:
    quantization = SlotQuantization(rounding, seed=1)
    spec = spec_of(num_layers, 10240, (128, 64, 128), ssm_dtype)
    live = StatePool(spec, num_rows + _SPARE_ROWS, device="cuda")
    for tensor in live.tensors.values():
        tensor.normal_()
    slots = StatePool(quantization.slot_spec(spec), num_rows + _SPARE_ROWS, device="cuda")
    return live, slots, quantization


def _rows(num_rows: int) -> list[torch.Tensor]:
    return [torch.randperm(num_rows)[:_SLOTS].int().cuda() for _ in range(2)]


def _check_bits(
    live: StatePool,
    slots: StatePool,
    store: StateQuantizer,
    restore: StateDequantizer,
    quantization: SlotQuantization,
) -> None:
    """Compare one state, there and back, with what PyTorch makes of it on the CPU."""
    store.copy([2], [3])
    codes, scales = quantize_states(live["ssm"][:2, 2].cpu(), quantization)
    assert torch.equal(slots["ssm"][:2, 3].cpu(), codes)
    assert torch.equal(slots["ssm_scales"][:2, 3].cpu(), scales)
    restore.copy([3], [1])
    wanted = dequantize_states(codes, scales, live["ssm"].dtype)
    assert torch.equal(live["ssm"][:2, 1].cpu(), wanted)
    assert torch.equal(live["conv"][:, 1], live["conv"][:, 2])


def _flat_us(source: torch.Tensor, num_bytes: int) -> float:
    """Time a flat copy that reads and writes ``num_bytes`` in all."""
    count = num_bytes // 2 // source.element_size()
    destination = torch.empty(count, dtype=source.dtype, device=source.device)
    return device_us([partial(destination.copy_, source.view(-1)[:count])])
