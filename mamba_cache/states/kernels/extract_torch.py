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

    Slots without ``slot_scales`` are not quantised. It waits for fields on a device, so it serves
    the CPU and as a reference.
    """
    real = (slots >= 0).nonzero()[:, 0]
    if not len(real):
        return
    fields = (chunks, conv_ends, seq_starts, rows, slots)
    chunks, conv_ends, seq_starts, rows, slots = (field[real].long() for field in fields)
    if slot_conv is not None and live_conv is not None and conv_input is not None:
        slot_conv[slots] = _conv_windows(live_conv[rows], conv_input, seq_starts, conv_ends)
    if slot_ssm is not None and chunk_states is not None:
        states = chunk_states[chunks]
        if slot_scales is None:
            slot_ssm[slots] = states
        else:
            slot_ssm[slots], slot_scales[slots] = quantize_states(states)


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
