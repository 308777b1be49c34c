"""Requests, caches and metadata of single steps, so that tests of the model need no context."""

from dataclasses import dataclass, field

import numpy as np
import torch
from step_plans import decode_work, make_buffers, make_table, part

from mamba_cache.cache.sequence import Checkpoint
from mamba_cache.reference import HybridModelConfig
from mamba_cache.states import CHECKPOINT_FIELDS, StatePool, plan_extraction


@dataclass
class Sequence:
    """One request: its tokens so far, its live-state row and its KV blocks."""

    tokens: list[int]
    row: int
    blocks: list[int]
    num_computed: int = 0
    filled_blocks: int = 0
    """Leading blocks that are shared and already filled, which must not be written."""


@dataclass
class Work:
    """The tokens of a sequence in one step, and the slots to save to by position."""

    sequence: Sequence
    num_tokens: int
    checkpoints: dict[int, int] = field(default_factory=dict)


class PlainCaches:
    """The poisoned tensors of a context, without its bookkeeping."""

    def __init__(self, config, dtype, *, num_blocks, block_size, num_rows, num_slots=0):
        self.block_size = block_size
        self.dummy_block = num_blocks
        self.kv_cache = config.kv_spec(dtype).allocate(num_blocks + 1, block_size, "cpu")
        self.live_states = StatePool(config.state_spec(dtype), num_rows, device="cpu")
        self.slots = StatePool(config.state_spec(dtype), num_slots, device="cpu")
        for tensor in (
            self.kv_cache,
            *self.live_states.tensors.values(),
            *self.slots.tensors.values(),
        ):
            tensor.fill_(torch.nan)

    def extract_checkpoint_states(self, layer, chunk_states, conv_input, metadata):
        plan_extraction(
            self.slots["conv"][layer],
            self.slots["ssm"][layer],
            self.live_states["conv"][layer],
            chunk_states,
            conv_input,
            fields=tuple(getattr(metadata, name) for name in CHECKPOINT_FIELDS),
        )()


def run_step(model, caches, decodes, prefills):
    """Compute one step and advance its sequences; return the logits, decodes first."""
    metadata = build_metadata(model.config, caches, decodes, prefills)
    logits = model.forward(metadata, caches)
    for work in [*decodes, *prefills]:
        work.sequence.num_computed += work.num_tokens
    return logits


def build_metadata(config: HybridModelConfig, caches, decodes, prefills, *, padding=3):
    """Metadata of one step, padded by ``padding`` requests, tokens and checkpoints."""
    works = [*decodes, *prefills]
    num_rows = max(work.sequence.row for work in works) + 1 + padding
    width = max(len(work.sequence.blocks) for work in works) + 1
    tables = np.full((num_rows, width), caches.dummy_block, dtype=np.int32)
    for work in works:
        tables[work.sequence.row, : len(work.sequence.blocks)] = work.sequence.blocks
    table = make_table(tables)
    buffers = make_buffers(
        table,
        torch.device("cpu"),
        block_size_tokens=caches.block_size,
        ssm_chunk_size=config.ssm_chunk_size,
        max_tokens=sum(work.num_tokens for work in works) + padding,
        checkpoints_per_step=sum(len(work.checkpoints) for work in prefills) + padding,
        max_decode_tokens=max((work.num_tokens for work in decodes), default=1),
        live_rows_per_request=1,
    )
    pieces = [_piece(work, caches.block_size) for work in works]
    split = len(decodes)
    work = decode_work(pieces[:split], table, caches.block_size)
    return buffers.fill(work, pieces[split:], [])


def _piece(work, block_size):
    sequence, start = work.sequence, work.sequence.num_computed
    end = start + work.num_tokens
    inside = [Checkpoint(at, slot) for at, slot in work.checkpoints.items() if start < at <= end]
    return part(
        sequence.row,
        start,
        sequence.tokens[start:end],
        sequence.filled_blocks * block_size,
        inside=tuple(inside),
    )


def ssd_naive(inputs, initial_state):
    """Scan one sequence, token by token and head by head: slow and obviously right.

    Return the outputs and the state after every token.
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
