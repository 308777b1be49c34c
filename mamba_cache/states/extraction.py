"""Saving the states at checkpoints inside prefill chunks, straight into their reserved slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states.copier import check_are_tensors, check_devices
from mamba_cache.states.kernels import CopyBackend, extract_torch, kernels_for

__all__ = ["CHECKPOINT_FIELDS", "extract_checkpoint_states", "plan_extraction"]

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


def extract_checkpoint_states(
    slot_conv: torch.Tensor | None,
    slot_ssm: torch.Tensor | None,
    live_conv: torch.Tensor | None,
    chunk_states: torch.Tensor | None,
    conv_input: torch.Tensor | None,
    *,
    checkpoint_chunks: torch.Tensor,
    checkpoint_conv_ends: torch.Tensor,
    checkpoint_seq_starts: torch.Tensor,
    checkpoint_rows: torch.Tensor,
    checkpoint_slots: torch.Tensor,
    slot_scales: torch.Tensor | None = None,
    backend: CopyBackend = "auto",
) -> None:
    """Write one layer's states at the step's checkpoints into ``slot_conv`` and ``slot_ssm``.

    One launch, without scratch memory. Call it before the layer overwrites its live conv state.
    The checkpoint fields are those of ``StepMetadata``, each [n] int32 or int64, contiguous. An
    entry of slot ``PAD_SLOT_ID`` writes nothing, but takes time, so slice the fields where their
    number is known; in a captured CUDA graph padding is cheap. Nothing waits for the device, and
    rows on it are not checked.

    A layer without a window leaves out ``slot_conv``, ``live_conv`` and ``conv_input`` (None), and
    one without another state ``slot_ssm`` and ``chunk_states``. With more tensors than one of each
    call it once for each pair.

    Args:
        slot_conv: [slots, conv_dim, W], written. Slots at any distance. [slots, conv_dim] for a
            window of one input, such as a token shift.
        slot_ssm: [slots, *state], written; [slots, heads, head_dim, state_dim] int8 for quantised
            slots. Slots at any distance.
        live_conv: [rows, conv_dim, W], or [rows, conv_dim] likewise. The last W inputs of each
            request before this step's chunk, newest last. Rows at any distance.
        chunk_states: [num_chunks, *state]. State at each chunk's end. Chunks at any distance.
        conv_input: [num_prefill_tokens, conv_dim], any strides. The convolution's inputs, packed.
        checkpoint_chunks: The chunk at whose end the state is saved.
        checkpoint_conv_ends: The packed token after the checkpoint.
        checkpoint_seq_starts: The request's first packed token, before the checkpoint.
        checkpoint_rows: The request's row in ``live_conv``.
        checkpoint_slots: The reserved slot, each listed once.
        slot_scales: For quantised slots: [slots, heads, state_dim] float32, written. Slots at any
            distance.
        backend: "torch", "triton", or "auto", which is the kernel on CUDA and PyTorch elsewhere.

    Raises:
        InvalidArgumentError: Shapes, dtypes or layouts do not fit, a window or a state is given in
            part, or the backend is unknown or not for the tensors' device. Without
            ``slot_scales`` a state is never converted: rounded, it would be another state.
        MissingExtraError: The kernel is asked for and Triton is not installed.
    """
    fields = (
        checkpoint_chunks,
        checkpoint_conv_ends,
        checkpoint_seq_starts,
        checkpoint_rows,
        checkpoint_slots,
    )
    check_are_tensors("fields", fields)
    write = plan_extraction(
        slot_conv,
        slot_ssm,
        live_conv,
        chunk_states,
        conv_input,
        fields=fields,
        slot_scales=slot_scales,
        backend=backend,
    )
    written = slot_ssm if slot_conv is None else slot_conv
    assert written is not None
    _check_fields(fields, written.device)
    write()


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
    """Return what does what ``extract_checkpoint_states`` says, of states that are checked.

    So a layer of several tensors can have all of them checked before the first is written. It takes
    the same; the fields, those of ``CHECKPOINT_FIELDS`` in that order, are not checked: a context
    makes them itself.

    Raises:
        InvalidArgumentError: As in ``extract_checkpoint_states``.
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


def _check_fields(fields: tuple[torch.Tensor, ...], device: torch.device) -> None:
    for field in fields:
        fits = field.shape == fields[0].shape and field.dim() == 1 and field.is_contiguous()
        if not fits or field.dtype not in (torch.int32, torch.int64) or field.device != device:
            raise InvalidArgumentError(
                f"checkpoint fields must be contiguous, 1-D, equally long, int32 or int64, and on "
                f"{device}, got {[(tuple(f.shape), f.dtype, str(f.device)) for f in fields]}"
            )
