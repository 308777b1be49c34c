"""Saving the states at checkpoints inside prefill chunks, straight into their reserved slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states.kernels import CopyBackend, kernels_for, twins

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

    Slots and live states are those of pools of one spec. What a layer hands over is checked against
    them. A layer without a window leaves out ``slot_conv``, ``live_conv`` and ``conv_input``
    (None), and one without another state ``slot_ssm`` and ``chunk_states``.

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
        InvalidArgumentError: ``chunk_states`` or ``conv_input`` do not fit, or the backend is
            unknown or not for their device. Without ``slot_scales`` a state is never converted:
            rounded, it would be another state.
        MissingExtraError: The kernel is asked for and Triton is not installed.
    """
    if conv_input is not None and slot_conv is not None and live_conv is not None:
        if slot_conv.dim() == 2:
            slot_conv, live_conv = slot_conv.unsqueeze(-1), live_conv.unsqueeze(-1)
        _check_handed_over("conv_input", conv_input, slot_conv, slot_conv.shape[1:2])
        slot_conv, live_conv, conv_input = map(_as_bits, (slot_conv, live_conv, conv_input))
    if chunk_states is not None and slot_ssm is not None:
        like = slot_ssm if slot_scales is None else chunk_states
        _check_handed_over("chunk_states", chunk_states, like, slot_ssm.shape[1:])
        # In every layer of every step: most are contiguous altogether, which costs less to see.
        if not chunk_states.is_contiguous() and not chunk_states[0].is_contiguous():
            raise InvalidArgumentError(
                "chunk_states must have contiguous inner axes, got strides "
                f"{chunk_states.stride()} of {[*chunk_states.shape]}"
            )
        if slot_scales is None:
            slot_ssm, chunk_states = _as_bits(slot_ssm), _as_bits(chunk_states)
    kernels = kernels_for(backend, fields[0].device, kernels=_KERNELS, twins=twins)
    tensors = (slot_conv, slot_ssm, slot_scales, live_conv, chunk_states, conv_input)
    return partial(kernels.extract_states, *tensors, *fields)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _check_handed_over(
    name: str, tensor: torch.Tensor, like: torch.Tensor, shape: torch.Size
) -> None:
    """Check what a layer hands over against its slots."""
    is_like = tensor.dtype == like.dtype and tensor.device == like.device
    if not is_like or tensor.shape[1:] != shape:
        raise InvalidArgumentError(
            f"{name} must be [rows, {', '.join(map(str, shape))}] of {like.dtype} on "
            f"{like.device}, got {[*tensor.shape]} of {tensor.dtype} on {tensor.device}"
        )
