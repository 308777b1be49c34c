"""Rows and KV blocks of requests: what each is given, that all of it is given back, and tokens."""

import numpy as np
import pytest

from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.context import Request
from mamba_cache.context.request_table import RequestTable
from mamba_cache.context.requests import ActiveRequest
from mamba_cache.errors import BlockCapacityError, InvariantError

BLOCK, MAX_REQUESTS, MAX_BLOCKS, POOL = 4, 3, 6, 17


@pytest.fixture
def kv_blocks():
    return KVBlockAllocator(POOL)


@pytest.fixture
def rows(kv_blocks):
    return RequestTable(
        kv_blocks,
        max_requests=MAX_REQUESTS,
        max_blocks=MAX_BLOCKS,
        block_size_tokens=BLOCK,
        max_tokens=64,
        max_sequence_length=MAX_BLOCKS * BLOCK,
        max_decode_tokens=3,
    )


def arrays(rows):
    """All that is kept by row, but how often tables have changed."""
    kept = ("num_blocks", "num_tokens", "num_computed", "num_in_doubt", "block_tables")
    return {name: getattr(rows, name).tolist() for name in kept}


def test_a_row_that_no_request_has_holds_no_blocks(rows):
    rows.take([], 1, "a")
    rows._free_rows.append(0)
    with pytest.raises(InvariantError, match="block table of row 0"):
        rows.check_rows([])


def test_several_rows_grow_together_or_not_at_all(rows, kv_blocks):
    taken = np.array([rows.take([], BLOCK, name) for name in "ab"])
    stamps = rows.table_stamps.copy()
    rows.grow_by_one(taken, BLOCK + 1, "ab")
    assert rows.num_blocks.tolist() == [2, 2, 0]
    assert (rows.table_stamps > stamps).tolist() == [True, True, False]
    rows.check_rows([0, 1])
    kv_blocks.allocate_memory_blocks(kv_blocks.num_free_blocks - 1)
    before = arrays(rows)
    with pytest.raises(BlockCapacityError, match="for request 'a', 'b', of up to 9 tokens"):
        rows.grow_by_one(taken, 2 * BLOCK + 1, "ab")
    assert arrays(rows) == before


def test_newest_tokens_are_kept_around_the_end_of_a_block(rows):
    """As many as a block and a step have: the room for them is a ring."""
    request = ActiveRequest(
        Request(request_id="a", prompt_tokens=[1, 2]), np.array([1, 2]), None, rows
    )
    row = rows.take([], 1, "a")
    request.enter_row(row, num_tokens=request.num_tokens, num_computed=0)
    wanted = []
    for token in range(100, 120):
        rows.append_token(np.array([row]), np.array([token]))
        wanted.append(token)
        assert rows.last_tokens[row] == token
        if token % 3 == 0:
            assert request.generated == wanted
    tokens = np.array([[5, 6, 7], [8, 9, 9]])
    other = rows.take([], 1, "b")
    rows.append_tokens(np.array([row, other]), tokens, np.array([2, 0]))
    assert request.generated == [*wanted, 5, 6]
    assert rows.num_tokens[[row, other]].tolist() == [2 + len(wanted) + 2, 0]
    assert rows.last_tokens[[row, other]].tolist() == [6, 0]
    request.leave_row()
    rows.give_back(row)
    assert (request.generated, request.num_tokens) == ([*wanted, 5, 6], 2 + len(wanted) + 2)


def test_what_rows_do_next_is_counted(rows):
    rows.mark(0, num_due=5, is_decoding=False)
    rows.mark(1, num_due=7, is_decoding=False)
    assert (rows.scheduled_rows, rows.num_scheduled_tokens) == ({0: 5, 1: 7}, 12)
    assert rows.num_changes == 1
    rows.mark(0, num_due=0, is_decoding=True)
    assert (rows.decoding_rows, rows.num_scheduled_tokens, rows.num_changes) == ({0}, 7, 2)
    rows.mark(0, num_due=0, is_decoding=True)
    assert rows.num_changes == 2
    rows.reset()
    assert (rows.scheduled_rows, rows.decoding_rows, rows.num_scheduled_tokens) == ({}, set(), 0)
    assert rows.num_changes == 3


def test_where_keys_go_is_exact_in_64_bits(kv_blocks):
    """Neither int32 nor the 53 bits of a float hold the largest."""
    block, size = 2**31 - 1, 2**23 + 1
    rows = RequestTable(
        kv_blocks,
        max_requests=1,
        max_blocks=1,
        block_size_tokens=size,
        max_tokens=1,
        max_sequence_length=size,
    )
    rows.block_tables[0, 0] = block
    rows.expect_events(np.array([0]))
    assert rows.place_shifts.tolist() == [block * size]
    rows.place_shifts[0], rows.next_events[0], rows.num_computed[0] = 0, -1, 0
    assert rows.expect_event(0) == size - 1
    assert rows.place_shifts.tolist() == [block * size]
