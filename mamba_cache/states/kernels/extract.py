"""Saving the states at checkpoints inside prefill chunks, straight into their reserved slots."""

from __future__ import annotations

import torch

from mamba_cache.errors import InvalidArgumentError

__all__ = ["extract_checkpoint_states"]


def extract_checkpoint_states(
    slot_conv: torch.Tensor,
    slot_ssm: torch.Tensor,
    live_conv: torch.Tensor,
    chunk_states: torch.Tensor,
    conv_input: torch.Tensor,
    *,
    checkpoint_chunks: torch.Tensor,
    checkpoint_conv_ends: torch.Tensor,
    checkpoint_seq_starts: torch.Tensor,
    checkpoint_rows: torch.Tensor,
    checkpoint_slots: torch.Tensor,
) -> None:
    """Writes one layer's states at the step's checkpoints into ``slot_conv`` and ``slot_ssm``.

    Call it before the layer overwrites its live conv state. The checkpoint fields are those of
    ``StepMetadata``, each [n] int32 or int64; a padded entry, slot ``PAD_SLOT_ID``, writes nothing
    but costs as much as another, so slice the fields where their number is known. Nothing waits
    for the device, and rows on it are not checked.

    Args:
        slot_conv: [slots, conv_dim, W], written.
        slot_ssm: [slots, heads, head_dim, state_dim], written.
        live_conv: [rows, conv_dim, W]. The last W inputs of each request before this step's chunk,
            newest last.
        chunk_states: [num_chunks, heads, head_dim, state_dim]. State at each SSM chunk's end.
        conv_input: [num_prefill_tokens, conv_dim]. Inputs of the convolution, packed.
        checkpoint_chunks: The chunk at whose end the state is saved.
        checkpoint_conv_ends: The packed token after the checkpoint.
        checkpoint_seq_starts: The request's first packed token, before the checkpoint.
        checkpoint_rows: The request's row in ``live_conv``.
        checkpoint_slots: The reserved slot, each listed once.

    Raises:
        InvalidArgumentError: Shapes or dtypes do not fit. A state is never converted: rounded, it
            would be another state.
    """
    _check(slot_conv, slot_ssm, live_conv, chunk_states, conv_input)
    # Nothing to read or nowhere to write: all entries must be padding.
    if not (len(checkpoint_slots) and len(slot_conv) and len(conv_input) and len(chunk_states)):
        return
    # Padded entries repeat the first real one, so that a slot is only ever written with its state.
    is_real = checkpoint_slots >= 0
    entries = torch.arange(len(is_real), device=is_real.device)
    entries = torch.where(is_real, entries, is_real.long().argmax())
    slots = checkpoint_slots[entries].long().clamp(min=0)
    windows = _conv_windows(
        live_conv[checkpoint_rows[entries].long().clamp(min=0)],
        conv_input,
        checkpoint_seq_starts[entries].long(),
        checkpoint_conv_ends[entries].long(),
    )
    states = chunk_states[checkpoint_chunks[entries].long().clamp(min=0)]
    # If no entry is real, slot 0 is written with what it holds.
    any_real = is_real.any()
    slot_conv[slots] = torch.where(any_real, windows, slot_conv[slots])
    slot_ssm[slots] = torch.where(any_real, states, slot_ssm[slots])


def _conv_windows(
    live_windows: torch.Tensor,
    conv_input: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Gathers the last W inputs before each of ``ends``.

    Args:
        live_windows: [n, conv_dim, W], the inputs before ``starts``, newest last.
        conv_input: [num_prefill_tokens, conv_dim].
        starts: [n] int64. Inputs before it come from ``live_windows``.
        ends: [n] int64.

    Returns:
        [n, conv_dim, W], newest last.
    """
    width = live_windows.shape[2]
    # [n, W]: packed position of each input of the window, counted from the request's start.
    positions = (ends - starts)[:, None] + torch.arange(-width, 0, device=ends.device)
    packed = (starts[:, None] + positions).clamp(0, len(conv_input) - 1)
    new = conv_input[packed].transpose(1, 2)
    columns = (width + positions).clamp(0, width - 1)
    old = live_windows.gather(2, columns[:, None].expand_as(live_windows))
    return torch.where((positions >= 0)[:, None], new, old)


def _check(
    slot_conv: torch.Tensor,
    slot_ssm: torch.Tensor,
    live_conv: torch.Tensor,
    chunk_states: torch.Tensor,
    conv_input: torch.Tensor,
) -> None:
    conv = [(t.dtype, tuple(t.shape[1:])) for t in (slot_conv, live_conv)]
    inputs = (conv_input.dtype, tuple(conv_input.shape[1:]))
    if conv[0] != conv[1] or inputs != (slot_conv.dtype, tuple(slot_conv.shape[1:2])):
        raise InvalidArgumentError(
            f"slot_conv, live_conv and conv_input must share dtype, conv_dim and width, "
            f"got {conv[0]}, {conv[1]} and {inputs}"
        )
    ssm = [(t.dtype, tuple(t.shape[1:])) for t in (slot_ssm, chunk_states)]
    if ssm[0] != ssm[1] or len(slot_ssm) != len(slot_conv):
        raise InvalidArgumentError(
            f"slot_ssm and chunk_states must share dtype and shape, and slot_ssm must have as many "
            f"slots as slot_conv, got {ssm[0]} and {ssm[1]}, "
            f"{len(slot_ssm)} and {len(slot_conv)} slots"
        )
