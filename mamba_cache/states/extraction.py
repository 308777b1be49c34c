"""Extraction: saves states at checkpoints inside prefill chunks straight to reserved slots."""

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
"""The fields of ``StepMetadata`` for extraction, in the order of the kernels' arguments."""

_KERNELS = "mamba_cache.states.kernels.extract"
# States are copied as integers: some float16 copies change the bits of a signalling NaN.
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
    """Return a call that writes one layer's states at checkpoints to its slots.

    The tensors are checked here, before any write: plan all pairs of a layer, then make the calls.
    A call is one launch without scratch memory. Make it before the layer overwrites its live conv
    state. It does not wait for the device, and does not check rows on it.

    Slots and live states are from pools of one spec; the layer's tensors are checked against them.
    A layer without a window passes None for ``slot_conv``, ``live_conv`` and ``conv_input``; a
    layer without another state passes None for ``slot_ssm`` and ``chunk_states``.

    Args:
        slot_conv: [slots, conv_dim, W], any stride of slots; written. [slots, conv_dim] for a
            window of one input, such as a token shift.
        slot_ssm: [slots, *state], any stride of slots; written. For quantised slots
            [slots, heads, head_dim, state_dim] int8.
        live_conv: [rows, conv_dim, W], or [rows, conv_dim] like ``slot_conv``, any stride of rows.
            The last W inputs of each request before this step's chunk, newest last.
        chunk_states: [num_chunks, *state], any stride of chunks. State at each chunk's end.
        conv_input: [num_prefill_tokens, conv_dim], any strides. The convolution's inputs, packed.
        fields: The fields ``CHECKPOINT_FIELDS``, each [n] int32 or int64, contiguous, not checked:
            the chunk at whose end the state is saved, the packed token after the checkpoint, the
            request's first packed token, its row in ``live_conv``, and the reserved slot, each slot
            once. Entries with slot ``PAD_SLOT_ID`` are skipped. They take time, if little in a
            captured CUDA graph, so slice the fields if the number of checkpoints is known.
        slot_scales: For quantised slots: [slots, heads, state_dim] float32, any stride of slots;
            written.
        backend: "torch", "triton", or "auto": the kernel on CUDA, PyTorch elsewhere.

    Raises:
        InvalidArgumentError: ``chunk_states`` or ``conv_input`` do not fit, or the backend is
            unknown or not for their device. Without ``slot_scales`` dtypes must be equal:
            conversion would round the state.
        MissingExtraError: The backend is "triton" and Triton is not installed.
    """
    if conv_input is not None and slot_conv is not None and live_conv is not None:
        if slot_conv.dim() == 2:
            slot_conv, live_conv = slot_conv.unsqueeze(-1), live_conv.unsqueeze(-1)
        _check_handed_over("conv_input", conv_input, slot_conv, slot_conv.shape[1:2])
        slot_conv, live_conv, conv_input = map(_as_bits, (slot_conv, live_conv, conv_input))
    if chunk_states is not None and slot_ssm is not None:
        like = slot_ssm if slot_scales is None else chunk_states
        _check_handed_over("chunk_states", chunk_states, like, slot_ssm.shape[1:])
        # Checked in every layer of every step: most are contiguous, which is the faster check.
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
    """Check a layer's tensor against its slots."""
    is_like = tensor.dtype == like.dtype and tensor.device == like.device
    if not is_like or tensor.shape[1:] != shape:
        raise InvalidArgumentError(
            f"{name} must be [rows, {', '.join(map(str, shape))}] of {like.dtype} on "
            f"{like.device}, got {[*tensor.shape]} of {tensor.dtype} on {tensor.device}"
        )
