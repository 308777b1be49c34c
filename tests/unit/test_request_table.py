"""Rows and KV blocks of requests: allocation, complete release, and tokens."""

from types import SimpleNamespace

import numpy as np
import pytest

from mamba_cache.cache import KVBlockAllocator
from mamba_cache.config import CacheConfig
from mamba_cache.context.request_table import RequestTable
from mamba_cache.errors import BlockCapacityError, InvariantError

BLOCK, MAX_REQUESTS, MAX_BLOCKS, POOL = 4, 3, 6, 17


@pytest.fixture
def kv_blocks():
    return KVBlockAllocator(POOL)


def make_rows(kv_blocks, max_requests, max_blocks, block_size):
    config = CacheConfig(
        max_requests=max_requests,
        max_tokens=64,
        max_sequence_length=max_blocks * block_size,
        block_size_tokens=block_size,
        ssm_chunk_size=1,
        num_kv_blocks=1,
        max_slots=1,
        num_speculative_tokens=1,
    )
    return RequestTable(kv_blocks, config)


@pytest.fixture
def rows(kv_blocks):
    return make_rows(kv_blocks, MAX_REQUESTS, MAX_BLOCKS, BLOCK)


def arrays(rows):
    """Return all arrays by row, except the change counts of tables."""
    kept = ("num_blocks", "num_tokens", "num_computed", "num_uncollected", "block_tables")
    return {name: getattr(rows, name).tolist() for name in kept}


def test_a_row_that_no_request_has_holds_no_blocks(rows):
    rows.take([], 1, "a")
    rows._free_rows.append(0)
    with pytest.raises(InvariantError, match="block table of row 0"):
        rows.check_rows([])


def test_an_event_lies_in_a_block_that_its_row_holds(rows, kv_blocks):
    row = rows.take([], BLOCK, "a")
    rows.decoding_rows.add(row)
    rows.next_events[row] = 2 * BLOCK - 1
    rows.place_shifts[row] = (kv_blocks.dummy_block_id - 1) * BLOCK
    with pytest.raises(InvariantError, match="events of rows"):
        rows.check_rows([row])


def open_blocks(rows, its_rows, end):
    group = SimpleNamespace(rows=np.array(its_rows), ids="abc"[: len(its_rows)])
    places = np.arange(len(its_rows))
    return rows.open_blocks(group, np.full_like(places, end), places)


def test_several_rows_grow_together_or_not_at_all(rows, kv_blocks):
    taken = [rows.take([], BLOCK, name) for name in "ab"]
    stamps = rows.table_stamps.copy()
    open_blocks(rows, taken, BLOCK + 1)
    assert rows.num_blocks.tolist() == [2, 2, 0]
    assert (rows.table_stamps > stamps).tolist() == [True, True, False]
    rows.check_rows([0, 1])
    kv_blocks.allocate_memory_blocks(kv_blocks.num_free_blocks - 1)
    before = arrays(rows)
    with pytest.raises(BlockCapacityError, match="for request 'a', 'b', of up to 9 tokens"):
        open_blocks(rows, taken, 2 * BLOCK + 1)
    assert arrays(rows) == before


def test_where_keys_go_is_exact_in_64_bits(kv_blocks):
    """The largest index fits neither int32 nor the 53 bits of a float."""
    block, size = 2**31 - 1, 2**23 + 1
    rows = make_rows(kv_blocks, 1, 1, size)
    rows.block_tables[0, 0] = block
    rows.num_blocks[0], rows.next_events[0] = 1, -1
    open_blocks(rows, [0], 1)
    assert rows.next_events.tolist() == [size - 1]
    assert rows.place_shifts.tolist() == [block * size]
