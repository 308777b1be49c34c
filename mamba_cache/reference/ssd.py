"""The scan of a Mamba-2 layer: state space duality (SSD) in chunks.

Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality", 2024 (arXiv:2405.21060): the recurrence is equation 1 with A a
scalar per head, the chunked algorithm section 6 and listing 1. With step size dt and per head

    h[t] = exp(dt[t] * A) * h[t-1] + dt[t] * x[t] (outer) B[t]
    y[t] = h[t] @ C[t]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ChunkLayout", "SSDInputs", "ssd_chunk_scan"]


@dataclass(frozen=True, slots=True)
class SSDInputs:
    """Inputs of a scan for packed tokens, besides states; all of one dtype and device."""

    x: Tensor  # [num_tokens, heads, head_dim]
    dt: Tensor  # [num_tokens, heads], step sizes, positive
    a: Tensor  # [heads], negative
    b: Tensor  # [num_tokens, groups, state_size]; a group serves heads / groups heads in a row
    c: Tensor  # [num_tokens, groups, state_size]


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Packed tokens as a rectangle of chunks, each of one sequence; the same for all layers."""

    rows: Tensor  # [num_chunks, chunk_size] int64, packed tokens; num_tokens for empty places
    num_tokens: int
    sequences: Tensor  # [num_chunks] int64, the sequence of each chunk
    is_first: Tensor  # [num_chunks] bool, whether the chunk is its sequence's first in this step
    is_chained: bool  # whether a sequence may have several chunks
    kept: Tensor  # int64, chunks after which the state is kept: the last chunk of each sequence

    @classmethod
    def build(
        cls,
        cu_chunk_seqlens: Tensor,
        chunk_seq_idx: Tensor,
        kept: Tensor,
        chunk_size: int,
        num_tokens: int,
        *,
        is_chained: bool = True,
    ) -> ChunkLayout:
        """Build the layout of chunks of at most ``chunk_size`` tokens from a step's metadata."""
        offsets = torch.arange(chunk_size, device=cu_chunk_seqlens.device)
        rows = cu_chunk_seqlens[:-1, None] + offsets
        rows = torch.where(rows < cu_chunk_seqlens[1:, None], rows, num_tokens)
        previous = torch.cat([chunk_seq_idx.new_full((1,), -1), chunk_seq_idx[:-1]])
        return cls(rows, num_tokens, chunk_seq_idx, chunk_seq_idx != previous, is_chained, kept)

    def split(self, packed: Tensor) -> Tensor:
        """Convert [num_tokens, ...] to [num_chunks, chunk_size, ...]; empty places are zero."""
        if self.rows.shape[1] == 1:  # each token is a chunk
            return packed[:, None]
        return torch.cat([packed, packed.new_zeros(1, *packed.shape[1:])])[self.rows]

    def join(self, chunks: Tensor) -> Tensor:
        """Undo ``split``: [num_chunks, chunk_size, ...] to [num_tokens, ...]."""
        if self.rows.shape[1] == 1:
            return chunks[:, 0]
        packed = chunks.new_empty(self.num_tokens + 1, *chunks.shape[2:])
        packed[self.rows] = chunks
        return packed[:-1]


def ssd_chunk_scan(
    inputs: SSDInputs, initial_states: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor]:
    """Scan packed sequences, each from its initial state.

    Every chunk is computed separately at a fixed size, and states are chained elementwise. So a
    scan that starts at a chunk boundary has the same bits as a longer scan from there on.
    Returns outputs [num_tokens, heads, head_dim], and the state at the end of every chunk
    [num_chunks, heads, head_dim, state_size].
    """
    by_group = (inputs.b.shape[1], -1)
    # An empty place has dt = 0: it neither decays the state nor adds to it.
    dx = torch.unflatten(layout.split(inputs.x * inputs.dt[..., None]), 2, by_group)
    decay = torch.unflatten(layout.split(inputs.dt * inputs.a), 2, by_group).cumsum(dim=1)
    b, c = layout.split(inputs.b), layout.split(inputs.c)

    to_end = torch.exp(decay[:, -1:] - decay)
    added = torch.einsum("zsgn,zsgrp->zgrpn", b, dx * to_end[..., None]).flatten(1, 2)
    ends, starts = _chain(added, decay[:, -1].exp().flatten(1), initial_states, layout)

    within = torch.einsum("zgrls,zsgrp->zlgrp", _scores(b, c, decay), dx)
    carried = torch.einsum("zlgn,zgrpn->zlgrp", c, torch.unflatten(starts, 1, by_group))
    outputs = within + carried * decay.exp()[..., None]
    return layout.join(outputs.flatten(2, 3)), ends


def _scores(b: Tensor, c: Tensor, decay: Tensor) -> Tensor:
    """Return the weight of token s <= l in token l's output: [chunk, group, head, l, s]."""
    scores = torch.einsum("zlgn,zsgn->zgls", c, b)[:, :, None]
    decay = decay.permute(0, 2, 3, 1)
    if decay.shape[-1] == 1:  # nothing decays
        return scores.expand(-1, -1, decay.shape[2], -1, -1)
    past = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=b.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill_(~past, -torch.inf).exp_()
    return between.mul_(scores)


def _chain(
    added: Tensor, decay: Tensor, initial_states: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor]:
    """Return states at every chunk's end and start, from each chunk's added state and decay."""
    initial = initial_states[layout.sequences]
    if not layout.is_chained:
        return initial * decay[:, :, None, None] + added, initial
    ends, starts = torch.empty_like(added), torch.empty_like(added)
    is_first = layout.is_first[:, None, None, None]
    state = torch.zeros_like(added[0])
    for chunk in range(len(added)):
        torch.where(is_first[chunk], initial[chunk], state, out=starts[chunk])
        state = torch.add(
            starts[chunk] * decay[chunk, :, None, None], added[chunk], out=ends[chunk]
        )
    return ends, starts
