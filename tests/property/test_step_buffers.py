"""The tensors of a step against plain-Python loops over its plan."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_plans import decode_batch

from mamba_cache._indices import PAD_SLOT_ID
from mamba_cache.metadata import (
    CheckpointEntry,
    SequenceSlice,
    StepBuffers,
    StepPlan,
    step_buffers,
)

MAX_REQUESTS, MAX_BLOCKS, MAX_TOKENS, MAX_CHECKPOINTS = 5, 6, 64, 7
MAX_DECODE_TOKENS = 3


def chunk_ends(prefills, chunk):
    return [
        (which, position)
        for which, piece in enumerate(prefills)
        for position in range(piece.start + 1, piece.start + len(piece.token_ids) + 1)
        if position % chunk == 0
    ]


SIZES = st.tuples(st.sampled_from([2, 4]), st.integers(1, 2), st.sampled_from([1, 4]))
"""Tokens of a chunk, chunks of a block, live rows of a request."""


@st.composite
def plans(draw, sizes=SIZES):
    chunk, chunks_of_a_block, live_rows = draw(sizes)
    block = chunk * chunks_of_a_block
    rows = draw(st.permutations(range(MAX_REQUESTS)))
    num_decodes = draw(st.integers(0, MAX_REQUESTS))
    num_prefills = draw(st.integers(0, MAX_REQUESTS - num_decodes))
    longest = block * MAX_BLOCKS
    slices = []
    for index in range(num_decodes + num_prefills):
        most = MAX_DECODE_TOKENS if index < num_decodes else 11
        length = draw(st.integers(1, min(most, longest)))
        start = draw(st.integers(0, longest - length))
        tokens = np.array(draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)))
        writable = 0 if index < num_decodes else draw(st.integers(0, longest))
        slices.append(SequenceSlice(rows[index], start, tokens, writable))
    prefills = slices[num_decodes:]
    ends = chunk_ends(prefills, chunk)
    chosen = (
        draw(st.lists(st.sampled_from(ends), unique=True, max_size=MAX_CHECKPOINTS)) if ends else []
    )
    pairs = st.lists(st.tuples(st.integers(-2, 9), st.integers(0, 4)), max_size=MAX_REQUESTS)
    saved = draw(st.lists(st.sampled_from(range(len(slices))), unique=True)) if slices else []
    boundaries = [
        CheckpointEntry(i, draw(st.integers(0, 99)), draw(st.integers(0, 9))) for i in saved
    ]
    return (
        chunk,
        block,
        StepPlan(
            decodes=decode_batch(slices[:num_decodes]),
            prefills=prefills,
            checkpoints=[CheckpointEntry(w, p, 100 + i) for i, (w, p) in enumerate(chosen)],
            restores=draw(pairs),
            boundaries=boundaries,
        ),
        live_rows,
        slices[:num_decodes],
    )


def oracle(plan, decodes, tables, block, chunk, live_rows):
    """Every tensor as a list without padding, by loops."""
    out = {name: [] for name in (
        "token_ids", "positions", "kv_slot_mapping", "num_computed_tokens", "seq_lens",
        "request_rows", "state_rows", "last_chunk_indices", "chunk_seq_idx", "checkpoint_chunks",
        "checkpoint_conv_ends", "checkpoint_seq_starts", "checkpoint_rows", "checkpoint_slots",
    )}  # fmt: skip
    out["query_start_loc"], out["cu_chunk_seqlens"] = [0], []
    list_tokens(out, [*decodes, *plan.prefills], tables, block, live_rows)
    starts, chunk_ending = list_chunks(out, plan, chunk)
    list_checkpoints(out, plan, starts, chunk_ending, live_rows)
    list_saved(out, plan, decodes, live_rows)
    return out


def list_tokens(out, pieces, tables, block, live_rows):
    for piece in pieces:
        for position, token in enumerate(piece.token_ids.tolist(), piece.start):
            out["token_ids"].append(token)
            out["positions"].append(position)
            place = int(tables[piece.row, position // block]) * block + position % block
            out["kv_slot_mapping"].append(
                place if position >= piece.first_writable else PAD_SLOT_ID
            )
        out["num_computed_tokens"].append(piece.start)
        out["seq_lens"].append(piece.start + len(piece.token_ids))
        out["request_rows"].append(piece.row)
        out["state_rows"].append(piece.row * live_rows)
        out["query_start_loc"].append(len(out["token_ids"]))


def list_chunks(out, plan, chunk):
    chunk_ending, starts, packed = {}, [], 0
    for which, piece in enumerate(plan.prefills):
        starts.append(packed)
        for position in range(piece.start, piece.start + len(piece.token_ids)):
            if position == piece.start or position % chunk == 0:
                out["cu_chunk_seqlens"].append(packed)
                out["chunk_seq_idx"].append(which)
            packed += 1
            chunk_ending[which, position + 1] = len(out["chunk_seq_idx"]) - 1
        out["last_chunk_indices"].append(len(out["chunk_seq_idx"]) - 1)
    out["cu_chunk_seqlens"].append(packed)
    return starts, chunk_ending


def list_saved(out, plan, decodes, live_rows):
    pieces = [*decodes, *plan.prefills]
    out["decode_state_rows"] = [
        [piece.row * live_rows] * (1 + MAX_DECODE_TOKENS) for piece in decodes
    ]
    out["restore_sources"] = [source for source, _ in plan.restores]
    out["restore_rows"] = [row * live_rows for _, row in plan.restores]
    out["boundary_rows"] = [pieces[entry.index].row * live_rows for entry in plan.boundaries]
    out["boundary_slots"] = [entry.slot for entry in plan.boundaries]
    by_index = {entry.index: number for number, entry in enumerate(plan.boundaries)}
    out["boundary_entries"] = [by_index.get(index, -1) for index in range(len(pieces))]
    out["boundary_positions"] = [
        plan.boundaries[by_index[index]].position if index in by_index else -1
        for index in range(len(pieces))
    ]


def list_checkpoints(out, plan, starts, chunk_ending, live_rows):
    for entry in plan.checkpoints:
        piece = plan.prefills[entry.index]
        start = starts[entry.index]
        out["checkpoint_chunks"].append(chunk_ending[entry.index, entry.position])
        out["checkpoint_conv_ends"].append(start + entry.position - piece.start)
        out["checkpoint_seq_starts"].append(start)
        out["checkpoint_rows"].append(piece.row * live_rows)
        out["checkpoint_slots"].append(entry.slot)


def make_buffers(tables, stamps, chunk, block, live_rows):
    return StepBuffers(
        tables,
        table_stamps=stamps,
        block_size_tokens=block,
        chunk_size=chunk,
        max_tokens=MAX_TOKENS,
        max_checkpoints=MAX_CHECKPOINTS,
        max_decode_tokens=MAX_DECODE_TOKENS,
        live_rows_per_request=live_rows,
        device=torch.device("cpu"),
    )


def assert_equals_loops(metadata, drawn, tables):
    """Return what the loops give."""
    chunk, block, plan, live_rows, decodes = drawn
    wanted = oracle(plan, decodes, tables, block, chunk, live_rows)
    padding = {
        "token_ids": 0, "positions": 0, "num_computed_tokens": 0, "seq_lens": 0,
        "query_start_loc": metadata.num_tokens,
        "cu_chunk_seqlens": metadata.num_prefill_tokens,
    }  # fmt: skip
    for name, values in wanted.items():
        tensor = getattr(metadata, name)
        assert tensor[: len(values)].tolist() == values, name
        assert set(tensor[len(values) :].flatten().tolist()) <= {padding.get(name, -1)}, name
    rows = [piece.row for piece in (*decodes, *plan.prefills)]
    assert metadata.block_tables[: len(rows)].tolist() == tables[rows].tolist()
    assert metadata.num_requests == len(rows)
    assert metadata.num_tokens == len(wanted["token_ids"])
    lengths = [len(piece.token_ids) for piece in decodes]
    assert metadata.num_decode_tokens == sum(lengths)
    assert metadata.max_decode_len == max(lengths, default=0)
    assert metadata.num_chunks == len(wanted["chunk_seq_idx"])
    assert metadata.num_checkpoints == len(plan.checkpoints)
    assert metadata.max_seq_len == max(wanted["seq_lens"], default=0)
    return wanted


@given(plans(), plans(), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_tensors_equal_loops(before, drawn, seed, has_stamps, changes):
    """Also after another plan, whose values must not shine through the padding.

    Where the caller says which tables have changed, those that have not are not copied again.
    """
    chunk, block, plan, live_rows, _ = drawn
    tables = np.random.default_rng(seed).integers(
        0, 1000, (MAX_REQUESTS, MAX_BLOCKS), dtype=np.int32
    )
    stamps = np.arange(MAX_REQUESTS) if has_stamps else None
    buffers = make_buffers(tables, stamps, chunk, block, live_rows)
    if before[:2] == drawn[:2]:
        buffers.fill(before[2])
    addresses = None
    for _ in range(2):
        metadata = buffers.fill(plan)
        wanted = assert_equals_loops(metadata, drawn, tables)
        now = [getattr(metadata, name).data_ptr() for name in wanted]
        assert addresses in (None, now)
        addresses = now
        if changes:
            tables[0] += 1
            if has_stamps:
                stamps[0] += MAX_REQUESTS


class Sent(step_buffers._HostSide):
    """A host side with memory of its own, as there are several on a GPU."""

    def __init__(self, layout, device_buffer):
        self._device_buffer, self._buffer = device_buffer, torch.zeros_like(device_buffer)
        super().__init__(layout, self._buffer)

    def send(self, num_bytes):
        self._device_buffer[:num_bytes] = self._buffer[:num_bytes]


@given(
    SIZES.flatmap(lambda sizes: st.lists(plans(st.just(sizes)), min_size=2, max_size=9)),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_steps_leave_nothing_behind_in_host_buffers_that_take_turns(steps, seed, data):
    """What one of them was told is not asked of another, with the group of decodes before, too."""
    chunk, block, _, live_rows, _ = steps[0]
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, 1000, (MAX_REQUESTS, MAX_BLOCKS), dtype=np.int32)
    stamps = np.arange(MAX_REQUESTS)
    buffers = make_buffers(tables, stamps, chunk, block, live_rows)
    hosts = [Sent(buffers._layout, buffers._device_buffer) for _ in range(3)]
    buffers._host_buffers, buffers._cpu_arrays = itertools.cycle(hosts), None
    groups = {}
    for number in data.draw(st.lists(st.sampled_from(range(len(steps))), max_size=20)):
        *sizes, plan, live_rows, decodes = steps[number]
        # A group that goes on is the same array.
        rows = groups.setdefault(tuple(plan.decodes.rows.tolist()), plan.decodes.rows)
        plan = plan._replace(decodes=plan.decodes._replace(rows=rows))
        metadata = buffers.fill(plan)
        assert_equals_loops(metadata, (*sizes, plan, live_rows, decodes), tables)
        changed = rng.integers(MAX_REQUESTS)
        tables[changed] += 1
        stamps[changed] = stamps.max() + 1
