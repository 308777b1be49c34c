"""The benchmark of the check of a model's weights on a GPU, beside a flat read of as many bytes."""

from __future__ import annotations

import torch

from mamba_cache.bench.measure import Measurement, check_gpu, device_us, host_us
from mamba_cache.states.checksums import TensorChecksums

__all__ = ["run_checksums"]

_LAYERS = 52
_SHAPES = ((17648, 4096), (4096, 8192), (8192,), (10240, 4), (4096,), (256,), (13, 7))
"""Weights of a layer: about those of an 8-billion-parameter hybrid model, and one of odd size."""

_FLAT = "flat read (sum of int64)"


def run_checksums(num_layers: int = _LAYERS) -> list[Measurement]:
    """Time a whole check and a sample over bf16 weights of many sizes.

    Args:
        num_layers: How many layers; the default has about 8 GB.

    Raises:
        InvalidArgumentError: There is no GPU.
    """
    check_gpu("checksums")
    weights = [
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for _ in range(num_layers)
        for shape in _SHAPES
    ]
    checksums = TensorChecksums(weights)
    _check(checksums, weights)
    num_bytes = checksums.num_bytes
    flat = torch.empty(num_bytes // 8, dtype=torch.int64, device="cuda").random_()
    read_us = device_us([flat.sum])
    own_us = device_us([checksums.start])
    sample_us = device_us([lambda: checksums.start(stride=16, phase=3)])
    host = host_us(checksums.start)
    size = f"{len(weights)} tensors, {num_bytes / 1e9:.2f} GB"

    def speed(time_us: float) -> str:
        return f"{num_bytes / time_us / 1e3:,.0f} GB/s"

    return [
        Measurement(_FLAT, read_us / 1e3, "ms", detail=f"{size}, {speed(read_us)}"),
        Measurement("checksums of all weights", own_us / 1e3, "ms", detail=speed(own_us)),
        Measurement("checksums over flat read", own_us / read_us, "x"),
        Measurement("a sixteenth of them", sample_us / 1e3, "ms"),
        Measurement("host time of a check", host, "us"),
    ]


def _check(checksums: TensorChecksums, weights: list[torch.Tensor]) -> None:
    """Compare with the twin, and change one bit, before any time is taken."""
    expected = TensorChecksums(weights[: len(_SHAPES)], backend="torch").measure()
    assert checksums.measure()[: len(_SHAPES)] == expected
    bits = weights[-1].view(torch.int16)
    for is_unchanged in (False, True):
        bits[-1, -1] ^= 1
        checksums.start()
        assert checksums.is_unchanged() == is_unchanged
