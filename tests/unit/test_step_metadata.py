"""The tensors of a step: their sizes and types, and what is sent of them.

tests/property/test_step_buffers.py compares their values and padding with loops over drawn plans.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import step_plans
import torch
from step_plans import decode_work, make_table, part

from mamba_cache.cache.sequence import Checkpoint
from mamba_cache.states import ZERO_SOURCE

MAX_REQUESTS, MAX_BLOCKS, MAX_TOKENS, MAX_CHECKPOINTS = 5, 4, 24, 4
BLOCK, CHUNK, LIVE_ROWS, DECODE_TOKENS = 4, 2, 3, 2
MAX_CHUNKS = MAX_TOKENS // CHUNK + 2 * MAX_REQUESTS  # each may begin and end inside a chunk
TABLES = np.arange(100, 100 + MAX_REQUESTS * MAX_BLOCKS, dtype=np.int32).reshape(MAX_REQUESTS, -1)

# A decode with a draft, one without, a prefill behind a shared block, and another.
DECODES = [part(3, 9, [11, 12]), part(1, 5, [13])]
PREFILLS = [
    part(
        4, 3, [21, 22, 23, 24, 25, 26], 5,
        is_first=True, lease=SimpleNamespace(slot=6), inside=(Checkpoint(8, 71),),
    ),
    part(
        2, 6, [31, 32, 33, 34, 35],
        is_first=True,
        inside=(Checkpoint(8, 70), Checkpoint(10, 72)), boundary=Checkpoint(11, 74),
    ),
]  # fmt: skip
SAVED = [(0, Checkpoint(10, 73))]
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
        "ssm_chunk_size": CHUNK,
        "max_tokens": MAX_TOKENS,
        "checkpoints_per_step": MAX_CHECKPOINTS,
        "max_decode_tokens": DECODE_TOKENS,
        "live_rows_per_request": LIVE_ROWS,
    }
    return step_plans.make_buffers(make_table(tables), torch.device("cpu"), **(sizes | changes))


def fill(buffers, decodes=(), prefills=(), saved=(), block=BLOCK):
    return buffers.fill(decode_work(decodes, buffers._table, block), prefills, saved)


@pytest.mark.parametrize("step", [(DECODES, PREFILLS, SAVED), ()], ids=["full", "empty"])
def test_tensors_are_as_long_as_a_step_may_be(step):
    """Kernels of a captured graph read all of them, whatever the step has."""
    metadata = fill(make_buffers(), *step)
    for room, names in ROOM.items():
        for name in names:
            wide = name in ("token_ids", "positions", "kv_slot_mapping")
            tensor = getattr(metadata, name)
            assert (len(tensor), tensor.dtype) == (room, torch.int64 if wide else torch.int32), name
    assert {name for names in ROOM.values() for name in names} == {
        name for name in metadata.__slots__ if isinstance(getattr(metadata, name), torch.Tensor)
    }
    assert metadata.chunk_size == CHUNK
    few = fill(make_buffers(max_tokens=7))  # no more chunks than tokens
    assert (len(few.chunk_seq_idx), len(few.cu_chunk_seqlens)) == (7, 8)


@pytest.mark.parametrize("is_prefill", [False, True])
def test_where_a_key_goes_is_exact_in_64_bits(is_prefill):
    """Neither int32 nor the 53 bits of a float hold the largest."""
    block, block_size = 2**31 - 1, 2**23 + 1
    tables = np.full((1, 1), block, dtype=np.int32)
    pieces = [part(0, 6, [1])]
    step = ([], pieces) if is_prefill else (pieces,)
    buffers = make_buffers(tables, block_size_tokens=block_size)
    metadata = fill(buffers, *step, block=block_size)
    assert metadata.kv_slot_mapping[0].item() == block * block_size + 6


def test_a_table_that_a_prompt_has_taken_the_place_of_is_copied_again():
    """Stamps say that a table is as it was, not that it is still where it was."""
    buffers = make_buffers()
    for step in ((DECODES,), ([], PREFILLS), (DECODES,)):
        metadata = fill(buffers, *step)
    assert metadata.block_tables[: len(DECODES)].tolist() == TABLES[ROWS[:2]].tolist()


def test_the_entries_of_a_step_are_lists_on_the_host():
    buffers = make_buffers()
    fill(buffers, DECODES, PREFILLS, SAVED)
    assert buffers.entries("boundaries") == [[9, 6], [73, 74]]
    assert buffers.entries("restores") == [[6, ZERO_SOURCE], [12, 6]]
    fill(buffers, DECODES)
    assert buffers.entries("boundaries") == buffers.entries("restores") == []
