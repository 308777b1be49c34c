"""The tensors of a step: their sizes and types, and what is sent of them.

tests/property/test_step_buffers.py compares their values and padding with loops over drawn plans.
"""

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
ROOM = {
    MAX_TOKENS: ("token_ids", "positions", "kv_slot_mapping"),
    MAX_REQUESTS + 1: ("query_start_loc",),
    MAX_REQUESTS: (
        "num_computed_tokens", "seq_lens", "request_rows", "state_rows", "decode_state_rows",
        "last_chunk_indices", "restore_sources", "restore_rows", "block_tables",
        "boundary_rows", "boundary_slots", "boundary_entries", "boundary_positions",
    ),
    MAX_CHUNKS + 1: ("cu_chunk_seqlens",),
    MAX_CHUNKS: ("chunk_seq_idx",),
    MAX_CHECKPOINTS: (
        "checkpoint_chunks", "checkpoint_conv_ends", "checkpoint_seq_starts", "checkpoint_rows",
        "checkpoint_slots",
    ),
}  # fmt: skip


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


def padded(values, room, padding):
    return values + [padding] * (room - len(values))


@pytest.mark.parametrize("plan", [PLAN, StepPlan()], ids=["full", "empty"])
def test_tensors_are_as_long_as_a_step_may_be(plan):
    """Kernels of a captured graph read all of them, whatever the step has."""
    metadata = make_buffers().fill(plan)
    for room, names in ROOM.items():
        for name in names:
            wide = name in ("token_ids", "positions", "kv_slot_mapping")
            tensor = getattr(metadata, name)
            assert (len(tensor), tensor.dtype) == (room, torch.int64 if wide else torch.int32), name
    assert {name for names in ROOM.values() for name in names} == {
        name for name in metadata.__slots__ if isinstance(getattr(metadata, name), torch.Tensor)
    }
    assert metadata.chunk_size == CHUNK


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
