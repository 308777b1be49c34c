"""The scan of ``mamba_cache.reference.ssd`` as its plain recurrence: slow, and easy to believe."""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_cache.reference.ssd import SSDInputs

__all__ = ["ssd_naive"]


def ssd_naive(inputs: SSDInputs, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan one sequence, token by token and head by head.

    Args:
        inputs: Of one sequence.
        initial_state: [heads, head_dim, state_size]; left as it is.

    Returns:
        Outputs [num_tokens, heads, head_dim], and the state after every token
        [num_tokens, heads, head_dim, state_size].
    """
    x, dt, a, b, c = inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c
    num_tokens, heads, _ = x.shape
    outputs = torch.empty_like(x)
    states = x.new_empty(num_tokens, *initial_state.shape)
    for head in range(heads):
        state, group = initial_state[head], head * b.shape[1] // heads
        for t in range(num_tokens):
            added = dt[t, head] * torch.outer(x[t, head], b[t, group])
            state = torch.exp(dt[t, head] * a[head]) * state + added
            states[t, head] = state
            outputs[t, head] = state @ c[t, group]
    return outputs, states
