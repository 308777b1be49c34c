"""Requests, caches and step metadata in plain Python: the model's tests need no context."""

from dataclasses import dataclass, field

import torch

from mamba_cache.metadata.step import PAD_SLOT_ID, StepMetadata
from mamba_cache.models import HybridModelConfig
from mamba_cache.states import StatePool, extract_checkpoint_states


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


class PlainCaches:
    """The tensors of a context, poisoned, without its bookkeeping."""

    def __init__(self, config, dtype, *, num_blocks, block_size, num_rows, num_slots=0):
        self.block_size = block_size
        self.kv_cache = config.kv_spec(dtype).allocate(num_blocks + 1, block_size, "cpu")
        self.live_states = StatePool(config.state_spec(dtype), num_rows, device="cpu")
        self.slots = StatePool(config.state_spec(dtype), num_slots, device="cpu")
        for tensor in (
            self.kv_cache,
            *self.live_states.tensors.values(),
            *self.slots.tensors.values(),
        ):
            tensor.fill_(torch.nan)

    @property
    def dummy_block(self):
        return self.kv_cache.shape[2] - 1

    def extract_checkpoint_states(self, layer, chunk_states, conv_input, metadata):
        extract_checkpoint_states(
            self.slots["conv"][layer],
            self.slots["ssm"][layer],
            self.live_states["conv"][layer],
            chunk_states,
            conv_input,
            checkpoint_chunks=metadata.checkpoint_chunks,
            checkpoint_conv_ends=metadata.checkpoint_conv_ends,
            checkpoint_seq_starts=metadata.checkpoint_seq_starts,
            checkpoint_rows=metadata.checkpoint_rows,
            checkpoint_slots=metadata.checkpoint_slots,
        )


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
    token_ids, positions, slots, starts, tables = [], [], [], [0], []
    for work in works:
        sequence, size = work.sequence, caches.block_size
        span = range(sequence.num_computed, sequence.num_computed + work.num_tokens)
        positions += span
        token_ids += [sequence.tokens[i] for i in span]
        slots += [
            PAD_SLOT_ID if i // size < sequence.filled_blocks
            else sequence.blocks[i // size] * size + i % size
            for i in span
        ]  # fmt: skip
        starts.append(starts[-1] + work.num_tokens)
        tables.append(sequence.blocks)
    width = max(map(len, tables)) + 1
    tables = [[*table, *[caches.dummy_block] * (width - len(table))] for table in tables]
    chunks, marks = _chunks_and_checkpoints(config.ssm_chunk_size, prefills)
    computed = [work.sequence.num_computed for work in works]
    seq_lens = [work.sequence.num_computed + work.num_tokens for work in works]

    def padded(values, value, dtype=torch.int32):
        return torch.tensor([*values, *[value] * padding], dtype=dtype)

    return StepMetadata(
        num_decodes=len(decodes),
        num_prefills=len(prefills),
        num_tokens=starts[-1],
        num_chunks=len(chunks["seq_idx"]),
        num_checkpoints=len(marks),
        max_seq_len=max(seq_lens),
        token_ids=padded(token_ids, 0, torch.int64),
        positions=padded(positions, 0, torch.int64),
        kv_slot_mapping=padded(slots, PAD_SLOT_ID, torch.int64),
        query_start_loc=padded(starts, starts[-1]),
        num_computed_tokens=padded(computed, 0),
        seq_lens=padded(seq_lens, 0),
        state_rows=padded([work.sequence.row for work in works], PAD_SLOT_ID),
        cu_chunk_seqlens=padded(chunks["starts"], chunks["starts"][-1]),
        chunk_seq_idx=padded(chunks["seq_idx"], -1),
        last_chunk_indices=padded(chunks["last"], -1),
        checkpoint_chunks=padded([mark[0] for mark in marks], -1),
        checkpoint_conv_ends=padded([mark[1] for mark in marks], -1),
        checkpoint_seq_starts=padded([mark[2] for mark in marks], -1),
        checkpoint_rows=padded([mark[3] for mark in marks], PAD_SLOT_ID),
        checkpoint_slots=padded([mark[4] for mark in marks], PAD_SLOT_ID),
        restore_sources=padded([], PAD_SLOT_ID),
        restore_rows=padded([], PAD_SLOT_ID),
        boundary_rows=padded([], PAD_SLOT_ID),
        boundary_slots=padded([], PAD_SLOT_ID),
        block_tables=torch.tensor([*tables, *[[-1] * width] * padding], dtype=torch.int32),
    )


def _chunks_and_checkpoints(chunk_size, prefills):
    chunks = {"starts": [0], "seq_idx": [], "last": []}
    marks = []  # (chunk, conv end, sequence start, live row, slot)
    for index, work in enumerate(prefills):
        start, position = chunks["starts"][-1], work.sequence.num_computed
        for length in chunk_lengths(position, work.num_tokens, chunk_size):
            position += length
            chunks["starts"].append(chunks["starts"][-1] + length)
            chunks["seq_idx"].append(index)
            if position in work.checkpoints:
                chunk, end = len(chunks["seq_idx"]) - 1, chunks["starts"][-1]
                marks.append((chunk, end, start, work.sequence.row, work.checkpoints[position]))
        chunks["last"].append(len(chunks["seq_idx"]) - 1)
    return chunks, marks
