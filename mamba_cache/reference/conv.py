"""The causal depthwise convolution of a Mamba-2 layer over packed sequences.

out[t] = bias + sum over k < K of weight[:, k] * input[t - (K - 1) + k], where the inputs before a
sequence's first packed token are its *window*: the last K - 1 inputs before this step.

The sum runs tap by tap, in the same order for a chunk and for a single token, so that the result
has the same bits however a sequence is cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mamba_cache.reference.model_config import state_dtype_of

__all__ = ["causal_conv1d", "causal_conv1d_step", "place_windows"]


def place_windows(
    query_start_loc: Tensor, num_tokens: int, conv_kernel: int
) -> tuple[Tensor, Tensor]:
    """Return where the inputs of every output lie: the same for all layers of a step.

    Indices count rows of the *extended* input, all windows followed by all packed tokens. The first
    tensor, [K, num_tokens], has the input that tap k of each output reads; the second one,
    [num_sequences, K - 1], the last inputs of each sequence. Both are int64.
    """
    device, width = query_start_loc.device, conv_kernel - 1
    starts, ends = query_start_loc[:-1], query_start_loc[1:].contiguous()
    num_sequences = len(starts)

    def row(sequence: Tensor, token: Tensor) -> Tensor:
        offset = token - starts[sequence]
        in_window = (sequence + 1) * width + offset
        return torch.where(offset < 0, in_window, num_sequences * width + token)

    tokens = torch.arange(num_tokens, device=device)
    back = torch.arange(width, -1, -1, device=device)
    taps = row(torch.searchsorted(ends, tokens, right=True), tokens - back[:, None])
    sequences = torch.arange(num_sequences, device=device)
    return taps, row(sequences[:, None], ends[:, None] - back[:-1])


def causal_conv1d(
    inputs: Tensor, weight: Tensor, bias: Tensor, windows: Tensor, places: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Convolve packed sequences, each after its own window.

    ``inputs`` is [num_tokens, conv_dim], ``weight`` [conv_dim, K] with the token's own tap last,
    ``windows`` [num_sequences, conv_dim, K - 1] with the newest input last, and ``places`` is what
    ``place_windows`` returned. Outputs have at least float32; the windows after the last tokens
    are returned beside them.
    """
    extended = torch.cat([windows.transpose(1, 2).flatten(0, 1), inputs])
    taps, final_windows = places
    outputs = _sum_taps((extended[rows] for rows in taps), weight, bias)
    return outputs, extended[final_windows].transpose(1, 2)


def causal_conv1d_step(
    inputs: Tensor, weight: Tensor, bias: Tensor, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve one token of each sequence; ``inputs`` is [num_sequences, conv_dim]."""
    extended = torch.cat([windows, inputs[:, :, None]], dim=2)
    return _sum_taps(extended.unbind(2), weight, bias), extended[:, :, 1:]


def _sum_taps(taps: Iterable[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    dtype = state_dtype_of(weight.dtype)
    total = bias.to(dtype)
    for tap, scale in zip(taps, weight.to(dtype).unbind(1), strict=True):
        total = total + tap * scale
    return total
