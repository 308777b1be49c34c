"""Checkpoint states in PyTorch: what the kernel of ``extract`` must equal, bit for bit."""

# The launcher of the kernel takes the same tensors in the same order.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch

from mamba_cache.states.kernels.quantize_torch import quantize_states

__all__ = ["extract_states"]


def extract_states(
    slot_conv: torch.Tensor | None,
    slot_ssm: torch.Tensor | None,
    slot_scales: torch.Tensor | None,
    live_conv: torch.Tensor | None,
    chunk_states: torch.Tensor | None,
    conv_input: torch.Tensor | None,
    chunks: torch.Tensor,
    conv_ends: torch.Tensor,
    seq_starts: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write checked tensors as ``plan_extraction`` describes.

    Slots without ``slot_scales`` are not quantised. It gathers before it scatters, so it needs
    scratch memory and serves the CPU and as a reference.
    """
    # Nothing to read or nowhere to write: all entries must be padding.
    given = (slots, slot_conv, slot_ssm, live_conv, conv_input, chunk_states)
    if not all(len(tensor) for tensor in given if tensor is not None):
        return
    # Padded entries repeat the first real one, so that a slot is only ever written with its state.
    is_real = slots >= 0
    entries = torch.arange(len(is_real), device=is_real.device)
    entries = torch.where(is_real, entries, is_real.long().argmax())
    target_slots = slots[entries].long().clamp(min=0)
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    if slot_conv is not None and live_conv is not None and conv_input is not None:
        windows = _conv_windows(
            live_conv[rows[entries].long().clamp(min=0)],
            conv_input,
            seq_starts[entries].long(),
            conv_ends[entries].long(),
        )
        written.append((slot_conv, windows))
    if slot_ssm is not None and chunk_states is not None:
        states = chunk_states[chunks[entries].long().clamp(min=0)]
        if slot_scales is None:
            written.append((slot_ssm, states))
        else:
            codes, scales = quantize_states(states)
            written += [(slot_ssm, codes), (slot_scales, scales)]
    # If no entry is real, slot 0 is written with what it holds.
    any_real = is_real.any()
    for target, stored in written:
        target[target_slots] = torch.where(any_real, stored, target[target_slots])


def _conv_windows(
    live_windows: torch.Tensor,
    conv_input: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Gather the last W inputs before each of ``ends``."""
    width = live_windows.shape[2]
    # [n, W]: packed position of each input of the window, counted from the request's start.
    positions = (ends - starts)[:, None] + torch.arange(-width, 0, device=ends.device)
    packed = (starts[:, None] + positions).clamp(0, len(conv_input) - 1)
    new = conv_input[packed].transpose(1, 2)
    columns = (width + positions).clamp(0, width - 1)
    old = live_windows.gather(2, columns[:, None].expand_as(live_windows))
    return torch.where((positions >= 0)[:, None], new, old)
