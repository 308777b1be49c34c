"""The tensors of a step compared with plain-Python loops over its plan."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock, call, patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_plans import decode_work, group_of, make_buffers, make_table, part, stamp_row

from mamba_cache._torch import PAD_SLOT_ID, ZERO_SOURCE
from mamba_cache.cache.sequence import Checkpoint
from mamba_cache.context import step_buffers

MAX_REQUESTS, MAX_BLOCKS, MAX_TOKENS, MAX_CHECKPOINTS = 5, 6, 64, 7
MAX_DECODE_TOKENS = 3


def chunk_ends(prefills, chunk):
    return [
        (which, position)
        for which, piece in enumerate(prefills)
        for position in range(piece.start + 1, piece.start + len(piece.token_ids) + 1)
        if position % chunk == 0
    ]


SIZES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 2), st.sampled_from([1, 4]))
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
        is_decode = index < num_decodes
        length = draw(st.integers(1, min(MAX_DECODE_TOKENS if is_decode else 11, longest)))
        start = draw(st.integers(0, longest - length))
        tokens = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        rest = {} if is_decode else draw_rest(draw, start + length, longest)
        slices.append(part(rows[index], start, tokens, **rest))
    prefills = slices[num_decodes:]
    ends = chunk_ends(prefills, chunk)
    chosen = (
        draw(st.lists(st.sampled_from(ends), unique=True, max_size=MAX_CHECKPOINTS)) if ends else []
    )
    for index, (which, position) in enumerate(chosen):
        prefills[which].inside += (Checkpoint(position, 100 + index),)
    decodes = range(num_decodes)
    saved = draw(st.lists(st.sampled_from(decodes), unique=True)) if decodes else []
    boundaries = [(i, Checkpoint(draw(st.integers(0, 99)), draw(st.integers(0, 9)))) for i in saved]
    return chunk, block, live_rows, slices[:num_decodes], prefills, boundaries


def draw_rest(draw, end, longest):
    """Draw the other facts of a prompt's chunk: where it resumes, and whether it saves its end."""
    slots = st.none() | st.integers(0, 9)
    source, saved = draw(slots), draw(slots)
    return {
        "first_writable": draw(st.integers(0, longest)),
        "is_first": draw(st.booleans()),
        "lease": None if source is None else SimpleNamespace(slot=source),
        "boundary": None if saved is None else Checkpoint(end, saved),
    }


def oracle(drawn, tables):
    """Return every tensor as a list without padding, by loops."""
    chunk, block, live_rows, decodes, prefills, saved = drawn
    out = {name: [] for name in (
        "token_ids", "positions", "kv_slot_mapping", "num_computed_tokens", "seq_lens",
        "request_rows", "state_rows", "last_chunk_indices", "chunk_seq_idx", "checkpoint_chunks",
        "checkpoint_conv_ends", "checkpoint_seq_starts", "checkpoint_rows", "checkpoint_slots",
    )}  # fmt: skip
    out["query_start_loc"], out["cu_chunk_seqlens"] = [0], []
    list_tokens(out, [*decodes, *prefills], tables, block, live_rows)
    starts, chunk_ending = list_chunks(out, prefills, chunk)
    list_checkpoints(out, prefills, starts, chunk_ending, live_rows)
    list_copies(out, decodes, prefills, saved, live_rows)
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


def list_chunks(out, prefills, chunk):
    chunk_ending, starts, packed = {}, [], 0
    for which, piece in enumerate(prefills):
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


def list_copies(out, decodes, prefills, saved, live_rows):
    pieces = [*decodes, *prefills]
    out["decode_state_rows"] = [
        [piece.row * live_rows] * (1 + MAX_DECODE_TOKENS) for piece in decodes
    ]
    firsts = [piece for piece in prefills if piece.is_first]
    out["restore_sources"] = [p.lease.slot if p.lease else ZERO_SOURCE for p in firsts]
    out["restore_rows"] = [piece.row * live_rows for piece in firsts]
    ends = enumerate(prefills, len(decodes))
    saved = [*saved, *((index, piece.boundary) for index, piece in ends if piece.boundary)]
    out["boundary_rows"] = [pieces[index].row * live_rows for index, _ in saved]
    out["boundary_slots"] = [each.slot for _, each in saved]
    by_index = {index: number for number, (index, _) in enumerate(saved)}
    out["boundary_entries"] = [by_index.get(index, -1) for index in range(len(pieces))]
    out["boundary_positions"] = [
        saved[by_index[index]][1].position if index in by_index else -1
        for index in range(len(pieces))
    ]


def list_checkpoints(out, prefills, starts, chunk_ending, live_rows):
    for which, (piece, start) in enumerate(zip(prefills, starts, strict=True)):
        for position, slot, _ in piece.inside:
            out["checkpoint_chunks"].append(chunk_ending[which, position])
            out["checkpoint_conv_ends"].append(start + position - piece.start)
            out["checkpoint_seq_starts"].append(start)
            out["checkpoint_rows"].append(piece.row * live_rows)
            out["checkpoint_slots"].append(slot)


ROOM = {
    MAX_TOKENS: ("token_ids", "positions", "kv_slot_mapping"),
    MAX_REQUESTS + 1: ("query_start_loc",),
    MAX_REQUESTS: (
        "num_computed_tokens", "seq_lens", "request_rows", "state_rows", "decode_state_rows",
        "last_chunk_indices", "restore_sources", "restore_rows", "block_tables",
        "boundary_rows", "boundary_slots", "boundary_entries", "boundary_positions",
    ),
    MAX_CHECKPOINTS: (
        "checkpoint_chunks", "checkpoint_conv_ends", "checkpoint_seq_starts", "checkpoint_rows",
        "checkpoint_slots",
    ),
}  # fmt: skip
ROOM_OF = {name: room for room, names in ROOM.items() for name in names}


def assert_as_long_as_a_step_may_be(metadata, chunk):
    """Tensors have full length: kernels of a captured graph read all of each tensor."""
    # Each request may begin and end inside a chunk; there are no more chunks than tokens.
    chunks = min(MAX_TOKENS // chunk + 2 * MAX_REQUESTS, MAX_TOKENS)
    expected = ROOM_OF | {"cu_chunk_seqlens": chunks + 1, "chunk_seq_idx": chunks}
    tensors = {name: getattr(metadata, name) for name in metadata.__slots__}
    tensors = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    assert {name: len(tensor) for name, tensor in tensors.items()} == expected
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.int64}
    assert wide == set(ROOM[MAX_TOKENS])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32, torch.int64}
    assert metadata.chunk_size == chunk


def buffers_for(table, drawn):
    chunk, block, live_rows, *_ = drawn
    return make_buffers(
        table,
        torch.device("cpu"),
        block_size_tokens=block,
        ssm_chunk_size=chunk,
        max_tokens=MAX_TOKENS,
        checkpoints_per_step=MAX_CHECKPOINTS,
        max_decode_tokens=MAX_DECODE_TOKENS,
        live_rows_per_request=live_rows,
    )


def fill(buffers, table, drawn, group=None):
    _, block, _, decodes, prefills, saved = drawn
    work = decode_work(decodes, table, block)
    return buffers.fill(work if group is None else work._replace(group=group), prefills, saved)


def assert_equals_loops(metadata, drawn, tables):
    """Assert equality with the loops; return the loops' tensors."""
    chunk, *_, decodes, prefills, _ = drawn
    wanted = oracle(drawn, tables)
    assert_as_long_as_a_step_may_be(metadata, chunk)
    padding = {
        "token_ids": 0, "positions": 0, "num_computed_tokens": 0, "seq_lens": 0,
        "query_start_loc": metadata.num_tokens,
        "cu_chunk_seqlens": metadata.num_prefill_tokens,
    }  # fmt: skip
    for name, values in wanted.items():
        tensor = getattr(metadata, name)
        assert tensor[: len(values)].tolist() == values, name
        assert set(tensor[len(values) :].flatten().tolist()) <= {padding.get(name, -1)}, name
    rows = [piece.row for piece in (*decodes, *prefills)]
    assert metadata.block_tables[: len(rows)].tolist() == tables[rows].tolist()
    assert metadata.num_requests == len(rows)
    assert metadata.num_tokens == len(wanted["token_ids"])
    lengths = [len(piece.token_ids) for piece in decodes]
    assert metadata.num_decode_tokens == sum(lengths)
    assert metadata.max_decode_len == max(lengths, default=0)
    assert metadata.num_chunks == len(wanted["chunk_seq_idx"])
    assert metadata.num_checkpoints == len(wanted["checkpoint_slots"])
    assert metadata.max_seq_len == max(wanted["seq_lens"], default=0)
    return wanted


@given(plans(), plans(), st.integers(0, 2**32 - 1), st.booleans())
def test_tensors_equal_loops(before, drawn, seed, changes):
    """Values of an earlier plan must not remain in the padding.

    Tables whose stamps have not changed are not copied again.
    """
    tables = np.random.default_rng(seed).integers(
        0, 1000, (MAX_REQUESTS, MAX_BLOCKS), dtype=np.int32
    )
    table = make_table(tables)
    buffers = buffers_for(table, drawn)
    if before[:3] == drawn[:3]:
        fill(buffers, table, before)
    addresses = None
    for _ in range(2):
        metadata = fill(buffers, table, drawn)
        wanted = assert_equals_loops(metadata, drawn, tables)
        for entries, names in (
            ("boundaries", ("boundary_rows", "boundary_slots")),
            ("restores", ("restore_sources", "restore_rows")),
        ):  # lists on the host
            listed = [wanted[name] for name in names]
            assert buffers.entries(entries) == (listed if any(listed) else [])
        now = [getattr(metadata, name).data_ptr() for name in wanted]
        assert addresses in (None, now)
        addresses = now
        if changes:
            tables[0] += 1
            stamp_row(table, 0)


class Sent(step_buffers._HostSide):
    """A host side with separate memory; a GPU has several."""

    def __init__(self, fields, device_buffer):
        super().__init__(fields, torch.zeros_like(device_buffer))
        self.copied = Mock()


@given(
    SIZES.flatmap(lambda sizes: st.lists(plans(st.just(sizes)), min_size=2, max_size=9)),
    st.integers(0, 2**32 - 1),
    st.data(),
)
@pytest.mark.parametrize("few", [0, 8])
def test_steps_leave_nothing_behind_in_host_buffers_that_take_turns(few, steps, seed, data):
    """Cached facts of one host buffer do not apply to another, with the same group, too."""
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, 1000, (MAX_REQUESTS, MAX_BLOCKS), dtype=np.int32)
    table = make_table(tables)
    buffers = buffers_for(table, steps[0])
    hosts = [Sent(buffers._fields, buffers._device_buffer) for _ in range(3)]
    buffers._host_buffers, buffers._cpu_arrays = itertools.cycle(hosts), None
    groups = {}
    for number in data.draw(st.lists(st.sampled_from(range(len(steps))), max_size=20)):
        *_, decodes, _, _ = drawn = steps[number]
        # A continuing group is the same array.
        ids = tuple(piece.row for piece in decodes)
        group = groups.setdefault(ids, group_of(decodes))
        for host in hosts:
            host.copied.reset_mock()
        buffers.tensors["block_tables"].fill_(-7)
        with patch.object(step_buffers, "_FEW", few):
            metadata = fill(buffers, table, drawn, group)
        assert_equals_loops(metadata, drawn, tables)
        # Of the block tables, which come last, only the rows in use are sent.
        assert (metadata.block_tables[metadata.num_requests :] == -7).all()
        assert buffers._last.copied.mock_calls == [call.synchronize(), call.record()]
        changed = rng.integers(MAX_REQUESTS)
        tables[changed] += 1
        stamp_row(table, changed)


@pytest.mark.parametrize("is_prefill", [False, True])
def test_where_a_key_goes_is_exact_in_64_bits(is_prefill):
    """The largest index fits neither int32 nor the 53 bits of a float."""
    block, block_size = 2**31 - 1, 2**23 + 1
    pieces = [part(0, 6, [1])]
    decodes, prefills = ([], pieces) if is_prefill else (pieces, [])
    drawn = 2, block_size, 1, decodes, prefills, []
    table = make_table(np.full((1, 1), block, dtype=np.int32))
    metadata = fill(buffers_for(table, drawn), table, drawn)
    assert metadata.kv_slot_mapping[0].item() == block * block_size + 6


def test_a_table_that_a_prompt_has_taken_the_place_of_is_copied_again():
    """Equal stamps mean an unchanged table, but its place in the buffer may be overwritten."""
    decoding, prefilling = (
        (2, 4, 1, [part(3, 5, [1])], [], []),
        (2, 4, 1, [], [part(4, 3, [2])], []),
    )
    tables = np.arange(MAX_REQUESTS * MAX_BLOCKS, dtype=np.int32).reshape(MAX_REQUESTS, -1)
    table = make_table(tables)
    buffers = buffers_for(table, decoding)
    for drawn in (decoding, prefilling, decoding):
        assert_equals_loops(fill(buffers, table, drawn), drawn, tables)
