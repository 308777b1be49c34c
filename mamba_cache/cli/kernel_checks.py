"""The doctor's checks of kernels: each beside its PyTorch twin, compared bit by bit.

``python -m mamba_cache.cli.kernel_checks`` prints one JSON object: what differed or broke, by
kernel; an empty text where nothing did. It is a program of its own, because a kernel that goes
wrong can take the process with it, and because Triton learns when it is imported whether it
interprets kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch

from mamba_cache.states import (
    PAD_SLOT_ID,
    ZERO_SOURCE,
    CopyBackend,
    SlotQuantization,
    StateCopier,
    StateDequantizer,
    StatePool,
    StateQuantizer,
    StateSpec,
    extract_checkpoint_states,
)

__all__ = ["KERNELS", "check_kernels"]

_LAYERS, _ROWS = 2, 5
_CONV, _SSM = (24, 4), (3, 8, 16)
_CHUNK = 8
_SOURCES = (3, 0, ZERO_SOURCE, PAD_SLOT_ID)
_TARGETS = (1, 4, 2, 0)

_Tensors = list[torch.Tensor]
_Run = Callable[[torch.device, CopyBackend], _Tensors]


def check_kernels() -> dict[str, str]:
    """Run every kernel on the GPU, or on the CPU if there is none.

    Returns:
        By kernel what was wrong: the error, or that bits differ; "" if nothing.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {name: _fault(run, device) for name, run in KERNELS.items()}


def _fault(run: _Run, device: torch.device) -> str:
    try:
        kernel, twin = run(device, "triton"), run(device, "torch")
    except Exception as error:  # whatever it is, it is what the user must learn
        return f"{type(error).__name__}: {error}".splitlines()[0]
    differing = sum(int((_bytes(a) != _bytes(b)).sum()) for a, b in zip(kernel, twin, strict=True))
    return f"{differing} bytes differ from the PyTorch twin's" if differing else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def _pool(device: torch.device, *, seed: int, quantized: bool = False) -> _Tensors:
    """Make states of normal values, the same for each seed; where nothing is written they stay."""
    spec = StateSpec.mamba(_LAYERS, _CONV, _SSM, torch.bfloat16, torch.float32)
    if quantized:
        spec = SlotQuantization().slot_spec(spec)
    generator = torch.Generator().manual_seed(seed)
    tensors = list(StatePool(spec, _ROWS, device=device).tensors.values())
    for tensor in tensors:
        tensor.copy_((torch.randn(tensor.shape, generator=generator) * 40).to(tensor.dtype))
    return tensors


def _copy(device: torch.device, backend: CopyBackend) -> _Tensors:
    targets = _pool(device, seed=1)
    StateCopier(_pool(device, seed=2), targets, backend=backend).copy(_SOURCES, _TARGETS)
    return targets


def _quantize(
    quantization: SlotQuantization, device: torch.device, backend: CopyBackend
) -> _Tensors:
    slots = _pool(device, seed=3, quantized=True)
    live = _pool(device, seed=4)
    StateQuantizer(live, slots, quantization, backend=backend).copy(_SOURCES, _TARGETS)
    return slots


def _dequantize(device: torch.device, backend: CopyBackend) -> _Tensors:
    slots, live = _pool(device, seed=5, quantized=True), _pool(device, seed=6)
    StateDequantizer(slots, live, backend=backend).copy(_SOURCES, _TARGETS)
    return live


def _extract(
    quantization: SlotQuantization | None, device: torch.device, backend: CopyBackend
) -> _Tensors:
    """Save two states of one layer: one that reaches back before its chunk, and one inside."""
    slots = [tensor[0] for tensor in _pool(device, seed=7, quantized=quantization is not None)]
    live, chunk_states = (tensor[0] for tensor in _pool(device, seed=8))
    inputs = torch.randn(3 * _CHUNK, _CONV[0], generator=torch.Generator().manual_seed(9))

    def field(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    extract_checkpoint_states(
        slots[0],
        slots[1],
        live,
        chunk_states,
        inputs.to(device, live.dtype),
        checkpoint_chunks=field(0, 2),
        checkpoint_conv_ends=field(2, 3 * _CHUNK),
        checkpoint_seq_starts=field(0, _CHUNK),
        checkpoint_rows=field(3, 1),
        checkpoint_slots=field(4, 0),
        slot_scales=slots[2] if quantization else None,
        quantization=quantization,
        backend=backend,
    )
    return slots


_STOCHASTIC = SlotQuantization("stochastic", seed=11)

KERNELS: dict[str, _Run] = {
    "copy": _copy,
    "int8 store": partial(_quantize, SlotQuantization()),
    "int8 store, stochastic": partial(_quantize, _STOCHASTIC),
    "int8 restore": _dequantize,
    "extract": partial(_extract, None),
    "extract to int8": partial(_extract, _STOCHASTIC),
}
"""Each kernel: a run that returns all tensors that it may have written."""

if __name__ == "__main__":
    print(json.dumps(check_kernels()))
