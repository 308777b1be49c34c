"""A Mamba-2 layer over packed requests and their live states.

Source: Dao and Gu, 2024 (arXiv:2405.21060), section 7 and figure 6: one projection computes the
gate z, the convolution's input (x, B, C) and dt; the scan's output is gated, normalised and
projected back. The convolution is causal and depthwise:

    out[t] = bias + sum over k < K of weight[:, k] * input[t - (K - 1) + k]

The inputs before a sequence's first packed token are its *window*: the last K - 1 inputs before
this step.

The sum runs tap by tap, so that the bits of the result do not depend on how a sequence is cut.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from mamba_cache.context import DynamicInferenceContext
from mamba_cache.reference.batch import PackedBatch
from mamba_cache.reference.model_config import (
    HybridModelConfig,
    WeightMaker,
    rms_norm,
    state_dtype_of,
)
from mamba_cache.reference.ssd import SSDInputs, ssd_chunk_scan

__all__ = ["Mamba2Layer", "causal_conv1d"]


class Mamba2Layer:
    """Short convolution, SSD scan and gated RMSNorm.

    The scan and its parameters use at least float32 for any dtype of the weights. ``layer`` is the
    index among the Mamba layers: the first axis of the live states.
    """

    def __init__(self, config: HybridModelConfig, layer: int, weights: WeightMaker) -> None:
        self.config = config
        self.layer = layer
        inner, conv_dim, heads = config.mamba_inner_size, config.conv_dim, config.mamba_num_heads
        scan_dtype = state_dtype_of(weights.dtype)
        self.in_proj = weights.linear(inner + conv_dim + heads, config.hidden_size)
        self.out_proj = weights.linear(config.hidden_size, inner)
        self.conv_weight = weights.linear(conv_dim, config.conv_kernel)
        self.conv_bias = weights.normal(conv_dim, scale=0.1)
        self.norm_weight = torch.ones_like(self.out_proj[0])
        # Mamba-2's initial values: A uniform in [-16, -1], dt log-uniform in [1e-3, 1e-1], D one.
        self.a = -weights.uniform(1, 16, heads).to(scan_dtype)
        dt = weights.uniform(math.log(1e-3), math.log(1e-1), heads).exp()
        self.dt_bias = dt.expm1().log().to(scan_dtype)
        self.d = torch.ones_like(self.a)

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, caches: DynamicInferenceContext
    ) -> Tensor:
        """Advance every request's live state over its packed tokens, [num_tokens, hidden_size].

        A decoding request keeps its state after each of its tokens.
        """
        config = self.config
        gate, conv_input, dt = torch.split(
            F.linear(hidden, self.in_proj),
            [config.mamba_inner_size, config.conv_dim, config.mamba_num_heads],
            dim=1,
        )
        dt = F.softplus(dt + self.dt_bias)
        live = caches.live_states
        conv_live, ssm_live = live["conv"][self.layer], live["ssm"][self.layer]
        windows, places = conv_live[batch.state_rows], (batch.taps, batch.kept_tokens)
        mixed, windows = causal_conv1d(
            conv_input, self.conv_weight, self.conv_bias, windows, places
        )
        outputs, states = [], []
        for chunks, tokens, requests in batch.parts:
            inputs = self._scan_inputs(mixed[tokens], dt[tokens])
            initial = ssm_live[batch.state_rows[requests]]
            y, chunk_states = ssd_chunk_scan(inputs, initial, chunks)
            if chunks is batch.prefills:  # before the live state is overwritten, which windows need
                caches.extract_checkpoint_states(
                    self.layer, chunk_states, conv_input[tokens], batch.metadata
                )
            outputs.append((y + self.d[:, None] * inputs.x).flatten(1))
            states.append(chunk_states[chunks.kept])
        conv_live[batch.kept_rows] = windows
        ssm_live[batch.kept_rows] = torch.cat(states)
        # The gate comes before the norm, which is computed for each group separately.
        gated = torch.cat(outputs) * F.silu(gate)
        grouped = torch.unflatten(gated, 1, (config.num_groups, -1))
        weight = self.norm_weight.view(config.num_groups, -1)
        return F.linear(rms_norm(grouped, weight).flatten(1), self.out_proj)

    def _scan_inputs(self, mixed: Tensor, dt: Tensor) -> SSDInputs:
        """Split the convolution's output into x by head, and B and C by group."""
        config = self.config
        shared = config.num_groups * config.ssm_state_size
        x, b, c = torch.split(F.silu(mixed), [config.mamba_inner_size, shared, shared], dim=1)
        by_group = (config.num_groups, config.ssm_state_size)
        return SSDInputs(
            x=torch.unflatten(x, 1, (config.mamba_num_heads, config.mamba_head_dim)),
            dt=dt,
            a=self.a,
            b=torch.unflatten(b, 1, by_group),
            c=torch.unflatten(c, 1, by_group),
        )


def causal_conv1d(
    inputs: Tensor, weight: Tensor, bias: Tensor, windows: Tensor, places: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Convolve packed sequences, each continuing from its window.

    ``inputs`` is [num_tokens, conv_dim], ``weight`` [conv_dim, K] with the current token's tap
    last, ``windows`` [num_sequences, conv_dim, K - 1] with the newest input last. ``places`` is the
    result of ``place_taps`` and some token indices. Returns outputs in at least float32, and the
    windows after these tokens.
    """
    taps, tokens = places
    extended = torch.cat([windows.transpose(1, 2).flatten(0, 1), inputs])
    dtype = state_dtype_of(weight.dtype)
    total = bias.to(dtype)
    for tap in extended[taps] * weight.to(dtype).T[:, None]:
        total = total + tap
    return total, extended[taps[1:, tokens].T].transpose(1, 2)
