"""Requests, caches and step metadata in plain Python: the model's tests need no context."""

import itertools
from dataclasses import dataclass, field

import torch

from mamba_cache.metadata import StepMetadata
from mamba_cache.reference import HybridModelConfig
from mamba_cache.states import CHECKPOINT_FIELDS, PAD_SLOT_ID, StatePool, plan_extraction

CONFIG = HybridModelConfig(
    layer_pattern="M*M-",
    hidden_size=16,
    num_attention_heads=2,
    num_kv_heads=1,
    attention_head_dim=8,
    mamba_num_heads=4,
    mamba_head_dim=4,
    ssm_state_size=5,
    num_groups=2,
    ssm_chunk_size=4,
    mlp_size=16,
    vocab_size=32,
)
"""A model of every kind of layer, small enough for many runs."""


@dataclass
class Sequence:
    """One request: its tokens so far, its live-state row and its KV blocks."""

    tokens: list[int]
    row: int
    blocks: list[int]
    num_computed: int = 0
    filled_blocks: int = 0
    """Leading blocks that are shared and filled already, which nothing may write."""


@dataclass
class Work:
    """What one step computes of a sequence, and the slots that it saves at which positions."""

    sequence: Sequence
    num_tokens: int
    checkpoints: dict[int, int] = field(default_factory=dict)
    written_rows: list[int] = field(default_factory=list)
    """Of a decode with drafts: the live-state row for the state after each token. None: its own."""


class PlainCaches:
    """The tensors of a context, poisoned, without its bookkeeping."""

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


def chunk_lengths(num_computed, num_tokens, chunk_size):
    """The chunks of one sequence in one step: a started chunk is finished first."""
    lengths = []
    while num_tokens:
        lengths.append(min(chunk_size - num_computed % chunk_size, num_tokens))
        num_computed += lengths[-1]
        num_tokens -= lengths[-1]
    return lengths


def run_step(model, caches, decodes, prefills):
    """Compute one step and advance its sequences; returns the logits, decodes first."""
    metadata = build_metadata(model.config, caches, decodes, prefills)
    logits = model.forward(metadata, caches)
    for work in [*decodes, *prefills]:
        work.sequence.num_computed += work.num_tokens
    return logits


def build_metadata(config: HybridModelConfig, caches, decodes, prefills, *, padding=3):
    """Metadata of one step, padded by ``padding`` rows in every tensor."""
    works = [*decodes, *prefills]
    starts = [0, *itertools.accumulate(work.num_tokens for work in works)]
    seq_lens = [work.sequence.num_computed + work.num_tokens for work in works]

    def padded(values, value, dtype=torch.int32):
        return torch.tensor([*values, *[value] * padding], dtype=dtype)

    nothing = padded([], PAD_SLOT_ID)
    return StepMetadata(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        num_tokens=starts[-1],
        num_decode_tokens=sum(work.num_tokens for work in decodes),
        max_decode_len=max((work.num_tokens for work in decodes), default=0),
        max_seq_len=max(seq_lens),
        chunk_size=config.ssm_chunk_size,
        query_start_loc=padded(starts, starts[-1]),
        num_computed_tokens=padded([work.sequence.num_computed for work in works], 0),
        seq_lens=padded(seq_lens, 0),
        request_rows=padded([work.sequence.row for work in works], PAD_SLOT_ID),
        state_rows=padded([work.sequence.row for work in works], PAD_SLOT_ID),
        decode_state_rows=_decode_state_rows(decodes, len(prefills) + padding),
        restore_sources=nothing,
        restore_rows=nothing,
        boundary_rows=nothing,
        boundary_slots=nothing,
        boundary_entries=nothing,
        boundary_positions=nothing,
        block_tables=_block_tables(caches, works, padding),
        **_token_fields(caches, works, padded),
        **_chunk_fields(config.ssm_chunk_size, prefills, padded),
    )


def _token_fields(caches, works, padded):
    token_ids, positions, places = [], [], []
    for sequence, count in ((work.sequence, work.num_tokens) for work in works):
        for position in range(sequence.num_computed, sequence.num_computed + count):
            block, offset = divmod(position, caches.block_size)
            filled = block < sequence.filled_blocks
            place = sequence.blocks[block] * caches.block_size + offset
            token_ids.append(sequence.tokens[position])
            positions.append(position)
            places.append(PAD_SLOT_ID if filled else place)
    return {
        "token_ids": padded(token_ids, 0, torch.int64),
        "positions": padded(positions, 0, torch.int64),
        "kv_slot_mapping": padded(places, PAD_SLOT_ID, torch.int64),
    }


def _decode_state_rows(decodes, num_others):
    rows = [[d.sequence.row, *(d.written_rows or [d.sequence.row])] for d in decodes]
    width = max(map(len, rows), default=2)
    return torch.tensor([*rows, *[[PAD_SLOT_ID] * width] * num_others], dtype=torch.int32)


def _block_tables(caches, works, padding):
    """Every row ends in the dummy block; rows past the batch hold what no kernel may follow."""
    tables = [work.sequence.blocks for work in works]
    width = max(map(len, tables)) + 1
    tables = [[*table, *[caches.dummy_block] * (width - len(table))] for table in tables]
    return torch.tensor([*tables, *[[-1] * width] * padding], dtype=torch.int32)


def _chunk_fields(chunk_size, prefills, padded):
    starts, seq_idx, last = [0], [], []
    marks = []  # (chunk, conv end, sequence start, live row, slot)
    for index, work in enumerate(prefills):
        first_token, position = starts[-1], work.sequence.num_computed
        for length in chunk_lengths(position, work.num_tokens, chunk_size):
            position += length
            starts.append(starts[-1] + length)
            if position in work.checkpoints:
                slot = work.checkpoints[position]
                marks.append((len(seq_idx), starts[-1], first_token, work.sequence.row, slot))
            seq_idx.append(index)
        last.append(len(seq_idx) - 1)
    names = ("chunks", "conv_ends", "seq_starts", "rows", "slots")
    columns = zip(*marks, strict=True) if marks else [[]] * len(names)
    return {
        "num_chunks": len(seq_idx),
        "num_checkpoints": len(marks),
        "cu_chunk_seqlens": padded(starts, starts[-1]),
        "chunk_seq_idx": padded(seq_idx, -1),
        "last_chunk_indices": padded(last, -1),
        **{
            f"checkpoint_{name}": padded(column, PAD_SLOT_ID)
            for name, column in zip(names, columns, strict=True)
        },
    }


def ssd_naive(inputs, initial_state):
    """Scan one sequence, token by token and head by head: slow, and easy to believe.

    Returns the outputs and the state after every token.
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
