"""The tensors of a step: one batch worked out by hand, an empty one, and what is sent of them."""

import numpy as np
import pytest
import torch
from step_plans import decode_batch

from mamba_cache.metadata import (
    CheckpointEntry,
    SequenceSlice,
    StepBuffers,
    StepPlan,
    step_buffers,
)
from mamba_cache.states import ZERO_SOURCE

MAX_REQUESTS, MAX_BLOCKS, MAX_TOKENS, MAX_CHECKPOINTS = 5, 4, 24, 4
BLOCK, CHUNK, LIVE_ROWS, DECODE_TOKENS = 4, 2, 3, 2
MAX_CHUNKS = MAX_TOKENS // CHUNK + 2 * MAX_REQUESTS  # each may begin and end inside a chunk
TABLES = np.arange(100, 100 + MAX_REQUESTS * MAX_BLOCKS, dtype=np.int32).reshape(MAX_REQUESTS, -1)
POISON = 77

DECODES = [SequenceSlice(3, 9, np.array([11, 12])), SequenceSlice(1, 5, np.array([13]))]
# A decode with a draft, one without, a prefill behind a shared block, and another.
PLAN = StepPlan(
    decodes=decode_batch(DECODES),
    prefills=[
        SequenceSlice(4, 3, np.array([21, 22, 23, 24, 25, 26]), first_writable=5),
        SequenceSlice(2, 6, np.array([31, 32, 33, 34, 35])),
    ],
    checkpoints=[CheckpointEntry(1, 8, 70), CheckpointEntry(0, 8, 71), CheckpointEntry(1, 10, 72)],
    restores=[(6, 4), (ZERO_SOURCE, 2)],
    boundaries=[CheckpointEntry(0, 10, 73), CheckpointEntry(3, 11, 74)],
)
ROWS = [3, 1, 4, 2]
COUNTS = {
    "num_decodes": 2,
    "num_prefills": 2,
    "num_tokens": 14,
    "num_decode_tokens": 3,
    "max_decode_len": 2,
    "num_chunks": 7,
    "chunk_size": CHUNK,
    "num_checkpoints": 3,
    "max_seq_len": 11,
}
# Values, how many there is room for, and the padding.
TENSORS = {
    "token_ids": ([11, 12, 13, 21, 22, 23, 24, 25, 26, 31, 32, 33, 34, 35], MAX_TOKENS, 0),
    "positions": ([9, 10, 5, 3, 4, 5, 6, 7, 8, 6, 7, 8, 9, 10], MAX_TOKENS, 0),
    "kv_slot_mapping": (
        [457, 458, 421, -1, -1, 469, 470, 471, 472, 438, 439, 440, 441, 442],
        MAX_TOKENS,
        -1,
    ),
    "query_start_loc": ([0, 2, 3, 9, 14], MAX_REQUESTS + 1, 14),
    "num_computed_tokens": ([9, 5, 3, 6], MAX_REQUESTS, 0),
    "seq_lens": ([11, 6, 9, 11], MAX_REQUESTS, 0),
    "request_rows": (ROWS, MAX_REQUESTS, -1),
    "state_rows": ([9, 3, 12, 6], MAX_REQUESTS, -1),
    "decode_state_rows": ([[9, 9, 9], [3, 3, 3]], MAX_REQUESTS, [-1, -1, -1]),
    "cu_chunk_seqlens": ([0, 1, 3, 5, 6, 8, 10], MAX_CHUNKS + 1, 11),
    "chunk_seq_idx": ([0, 0, 0, 0, 1, 1, 1], MAX_CHUNKS, -1),
    "last_chunk_indices": ([3, 6], MAX_REQUESTS, -1),
    "checkpoint_chunks": ([4, 2, 5], MAX_CHECKPOINTS, -1),
    "checkpoint_conv_ends": ([8, 5, 10], MAX_CHECKPOINTS, -1),
    "checkpoint_seq_starts": ([6, 0, 6], MAX_CHECKPOINTS, -1),
    "checkpoint_rows": ([6, 12, 6], MAX_CHECKPOINTS, -1),
    "checkpoint_slots": ([70, 71, 72], MAX_CHECKPOINTS, -1),
    "restore_sources": ([6, ZERO_SOURCE], MAX_REQUESTS, -1),
    "restore_rows": ([12, 6], MAX_REQUESTS, -1),
    "boundary_rows": ([9, 6], MAX_REQUESTS, -1),
    "boundary_slots": ([73, 74], MAX_REQUESTS, -1),
    "boundary_entries": ([0, -1, -1, 1], MAX_REQUESTS, -1),
    "boundary_positions": ([10, -1, -1, 11], MAX_REQUESTS, -1),
    # Rows past the batch stay as they were.
    "block_tables": (TABLES[ROWS].tolist(), MAX_REQUESTS, [POISON] * MAX_BLOCKS),
}


def make_buffers(tables=TABLES, **changes):
    sizes = {
        "block_size_tokens": BLOCK,
        "chunk_size": CHUNK,
        "max_tokens": MAX_TOKENS,
        "max_checkpoints": MAX_CHECKPOINTS,
        "max_decode_tokens": DECODE_TOKENS,
        "live_rows_per_request": LIVE_ROWS,
        "device": torch.device("cpu"),
    }
    return StepBuffers(tables, **(sizes | changes))


def poison(buffers):
    """Leave what no step would wherever there is room."""
    metadata = buffers.fill(StepPlan())
    buffers._device_buffer.zero_()
    for _ in range(buffers._num_host_buffers):
        next(buffers._host_buffers).clear()
    for name in TENSORS:
        getattr(metadata, name).fill_(POISON)


def fields(metadata):
    values = {name: getattr(metadata, name) for name in metadata.__slots__}
    return {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def padded(values, room, padding):
    return values + [padding] * (room - len(values))


def test_a_batch_of_decodes_and_prefills():
    buffers = make_buffers()
    poison(buffers)
    metadata = buffers.fill(PLAN)
    wanted = {name: padded(*tensor) for name, tensor in TENSORS.items()}
    assert fields(metadata) == COUNTS | wanted
    for name in TENSORS:
        wide = name in ("token_ids", "positions", "kv_slot_mapping")
        assert getattr(metadata, name).dtype == (torch.int64 if wide else torch.int32), name


def test_a_batch_of_nothing_is_all_padding():
    buffers = make_buffers()
    buffers.fill(PLAN)
    poison(buffers)
    none = {"query_start_loc": 0, "cu_chunk_seqlens": 0}
    wanted = {n: [none.get(n, padding)] * room for n, (_, room, padding) in TENSORS.items()}
    assert fields(buffers.fill(StepPlan())) == dict.fromkeys(COUNTS, 0) | wanted | {
        "chunk_size": CHUNK
    }


def test_there_is_room_for_no_more_chunks_than_tokens():
    metadata = make_buffers(max_tokens=7).fill(StepPlan())
    assert len(metadata.chunk_seq_idx) == 7
    assert len(metadata.cu_chunk_seqlens) == 8


@pytest.mark.parametrize("is_prefill", [False, True])
def test_where_a_key_goes_is_exact_in_64_bits(is_prefill):
    """Neither int32 nor the 53 bits of a float hold the largest."""
    block, block_size = 2**31 - 1, 2**23 + 1
    tables = np.full((1, 1), block, dtype=np.int32)
    pieces = [SequenceSlice(0, 6, np.array([1]))]
    plan = StepPlan(prefills=pieces) if is_prefill else StepPlan(decodes=decode_batch(pieces))
    metadata = make_buffers(tables, block_size_tokens=block_size).fill(plan)
    assert metadata.kv_slot_mapping[0].item() == block * block_size + 6


class StagedBuffer(step_buffers._HostSide):
    """A host side of its own, as on a GPU, whose copies are done at once."""

    def __init__(self, layout, device_buffer):
        self.buffer = torch.full_like(device_buffer, POISON)
        self.device_buffer = device_buffer
        super().__init__(layout, self.buffer)

    def send(self, num_bytes):
        self.num_sent = num_bytes
        self.device_buffer[:num_bytes] = self.buffer[:num_bytes]


@pytest.mark.parametrize("num_prefills", [0, 2])
@pytest.mark.parametrize("num_decodes", [0, 1, 2])
def test_block_tables_are_sent_as_far_as_the_batch_goes(monkeypatch, num_decodes, num_prefills):
    monkeypatch.setattr(step_buffers, "_HostSide", StagedBuffer)
    decodes = decode_batch(DECODES[:num_decodes])
    buffers = make_buffers()
    metadata = buffers.fill(StepPlan(decodes=decodes, prefills=PLAN.prefills[:num_prefills]))
    rows = [*ROWS[:num_decodes], *ROWS[2 : 2 + num_prefills]]
    row_bytes = 4 * MAX_BLOCKS
    before = metadata.block_tables.storage_offset() * 4
    assert next(buffers._host_buffers).num_sent == before + len(rows) * row_bytes
    wanted = TABLES[rows].tolist()
    assert metadata.block_tables.tolist() == padded(wanted, MAX_REQUESTS, [0] * MAX_BLOCKS)
    assert metadata.boundary_positions.tolist() == [-1] * MAX_REQUESTS


def test_nothing_of_a_longer_step_is_left_in_a_shorter_one():
    """Padding included: a captured graph reads all of it."""
    buffers = make_buffers()
    shorter = StepPlan(prefills=[SequenceSlice(2, 6, np.array([31, 32, 33]))])
    steps = [shorter, PLAN, shorter, StepPlan(decodes=decode_batch(DECODES[1:])), PLAN, StepPlan()]
    for plan in steps:
        found, wanted = fields(buffers.fill(plan)), fields(make_buffers().fill(plan))
        used = len(plan.decodes.rows) + len(plan.prefills)
        # Tables past the batch stay as they were.
        assert found.pop("block_tables")[:used] == wanted.pop("block_tables")[:used]
        assert found == wanted


def test_decodes_that_stay_the_same_are_right_around_prefills():
    """Their rows are not written again, whether prompts come between or not."""
    buffers = make_buffers()
    same, other = decode_batch(DECODES), decode_batch(DECODES[::-1])
    plans = [
        StepPlan(decodes=decodes, prefills=PLAN.prefills[:num_prefills])
        for decodes, num_prefills in [
            (same, 0), (same, 2), (same, 0), (same, 1), (other, 1), (same, 2), (same, 0),
        ]
    ]  # fmt: skip
    for plan in [*plans, StepPlan(prefills=PLAN.prefills), plans[0]]:
        found, wanted = fields(buffers.fill(plan)), fields(make_buffers().fill(plan))
        used = len(plan.decodes.rows) + len(plan.prefills)
        assert found.pop("block_tables")[:used] == wanted.pop("block_tables")[:used]
        assert found == wanted


def test_a_table_that_a_prompt_has_taken_the_place_of_is_copied_again():
    """Stamps say that a table is as it was, not that it is still where it was."""
    buffers = make_buffers(table_stamps=np.arange(1, 1 + len(TABLES)))
    decodes = StepPlan(decodes=decode_batch(DECODES))
    for plan in (decodes, StepPlan(prefills=PLAN.prefills), decodes):
        metadata = buffers.fill(plan)
    assert metadata.block_tables[: len(DECODES)].tolist() == TABLES[ROWS[:2]].tolist()


def test_the_first_entries_of_a_tensor_are_a_list_on_the_host():
    buffers = make_buffers()
    buffers.fill(PLAN)
    assert buffers.first_entries("boundary_slots", 2) == [73, 74]
    assert buffers.first_entries("restore_rows", 1) == [12]
