"""Saving the states at checkpoints inside prefill chunks, straight into their reserved slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states.copier import check_are_tensors, check_devices
from mamba_cache.states.kernels import CopyBackend, extract_torch, kernels_for

__all__ = ["CHECKPOINT_FIELDS", "plan_extraction"]

CHECKPOINT_FIELDS = (
    "checkpoint_chunks",
    "checkpoint_conv_ends",
    "checkpoint_seq_starts",
    "checkpoint_rows",
    "checkpoint_slots",
)
"""The fields of ``StepMetadata`` that say what to extract, in the order that kernels take them."""

_KERNELS = "mamba_cache.states.kernels.extract"
# States are moved as integers: on some ways a float16 loses what a signalling NaN carries.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plan_extraction(
    slot_conv: torch.Tensor | None,
    slot_ssm: torch.Tensor | None,
    live_conv: torch.Tensor | None,
    chunk_states: torch.Tensor | None,
    conv_input: torch.Tensor | None,
    *,
    fields: tuple[torch.Tensor, ...],
    slot_scales: torch.Tensor | None = None,
    backend: CopyBackend = "auto",
) -> Callable[[], None]:
    """Return what writes one layer's states at checkpoints into ``slot_conv`` and ``slot_ssm``.

    So a layer of several tensors has all of them checked before the first is written: plan once for
    each pair. The call is one launch without scratch memory; call it before the layer overwrites
    its live conv state. Nothing waits for the device, and rows on it are not checked.

    A layer without a window leaves out ``slot_conv``, ``live_conv`` and ``conv_input`` (None), and
    one without another state ``slot_ssm`` and ``chunk_states``.

    Args:
        slot_conv: [slots, conv_dim, W], written. Slots at any distance. [slots, conv_dim] for a
            window of one input, such as a token shift.
        slot_ssm: [slots, *state], written; [slots, heads, head_dim, state_dim] int8 for quantised
            slots. Slots at any distance.
        live_conv: [rows, conv_dim, W], or [rows, conv_dim] likewise. The last W inputs of each
            request before this step's chunk, newest last. Rows at any distance.
        chunk_states: [num_chunks, *state]. State at each chunk's end. Chunks at any distance.
        conv_input: [num_prefill_tokens, conv_dim], any strides. The convolution's inputs, packed.
        fields: Those of ``CHECKPOINT_FIELDS``, each [n] int32 or int64, contiguous: the chunk at
            whose end the state is saved, the packed token after the checkpoint, the request's first
            packed token, its row in ``live_conv``, and the reserved slot, each listed once. They
            are not checked. An entry of slot ``PAD_SLOT_ID`` writes nothing, but takes time, so
            slice the fields where their number is known; in a captured CUDA graph padding is cheap.
        slot_scales: For quantised slots: [slots, heads, state_dim] float32, written. Slots at any
            distance.
        backend: "torch", "triton", or "auto", which is the kernel on CUDA and PyTorch elsewhere.

    Raises:
        InvalidArgumentError: Shapes, dtypes or layouts do not fit, a window or a state is given in
            part, or the backend is unknown or not for the tensors' device. Without
            ``slot_scales`` a state is never converted: rounded, it would be another state.
        MissingExtraError: The kernel is asked for and Triton is not installed.
    """
    window, state = (slot_conv, live_conv, conv_input), (slot_ssm, chunk_states)
    tensors = [tensor for tensor in (*window, *state, slot_scales) if tensor is not None]
    check_are_tensors("states", tensors)
    check_devices(*tensors)
    absent = [sum(tensor is None for tensor in part) for part in (window, state)]
    if absent not in ([0, 0], [3, 0], [0, 2]):
        raise InvalidArgumentError(
            "give slot_conv, live_conv and conv_input together, or none of them, and slot_ssm and "
            "chunk_states likewise, but not none at all"
        )
    conv = live = inputs = ssm = states = scales = None
    if slot_conv is not None and live_conv is not None and conv_input is not None:
        if slot_conv.dim() == live_conv.dim() == 2:
            slot_conv, live_conv = slot_conv.unsqueeze(-1), live_conv.unsqueeze(-1)
        dtype, shape = slot_conv.dtype, slot_conv.shape[1:]
        if len(shape) != 2:
            raise InvalidArgumentError(
                f"slot_conv must be [slots, conv_dim, W], got {[*slot_conv.shape]}"
            )
        _check_rows("slot_conv", slot_conv, dtype, shape)
        _check_rows("live_conv", live_conv, dtype, shape)
        _check_rows("conv_input", conv_input, dtype, shape[:1], any_strides=True)
        conv, live, inputs = map(_as_bits, (slot_conv, live_conv, conv_input))
    if slot_ssm is not None and chunk_states is not None:
        num_slots = (slot_ssm if slot_conv is None else slot_conv).shape[:1]
        dtype, shape = chunk_states.dtype, chunk_states.shape[1:]
        _check_rows("chunk_states", chunk_states, dtype, shape)
        if slot_scales is None:
            _check_rows("slot_ssm", slot_ssm, dtype, shape, num_slots)
            ssm, states = map(_as_bits, (slot_ssm, chunk_states))
        else:
            if len(shape) != 3:
                raise InvalidArgumentError(
                    "states in quantised slots must be [heads, head_dim, state_dim], got "
                    f"{[*shape]}"
                )
            of_scales = shape[:1] + shape[2:]
            _check_rows("slot_ssm", slot_ssm, torch.int8, shape, num_slots)
            _check_rows("slot_scales", slot_scales, torch.float32, of_scales, num_slots)
            ssm, states, scales = slot_ssm, chunk_states, slot_scales
    device = tensors[0].device
    kernels = kernels_for(backend, device, kernels=_KERNELS, twins=extract_torch)
    return partial(kernels.extract_states, conv, ssm, scales, live, states, inputs, *fields)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _check_rows(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    num_rows: torch.Size | None = None,
    *,
    any_strides: bool = False,
) -> None:
    """Check rows of a tensor against what its slots or its chunks are."""
    fits = tensor.dim() > 0 and tensor.dtype == dtype and tensor.shape[1:] == shape
    # In every layer of every step: most are contiguous altogether, which costs less to see.
    fits &= any_strides or tensor.is_contiguous() or tensor[0].is_contiguous()
    if not fits or (num_rows is not None and tensor.shape[:1] != num_rows):
        rows = "rows" if num_rows is None else num_rows[0]
        raise InvalidArgumentError(
            f"{name} must be [{rows}, {', '.join(map(str, shape))}] of {dtype} with contiguous "
            f"inner axes, got {[*tensor.shape]} of {tensor.dtype}, strides {tensor.stride()}"
        )
