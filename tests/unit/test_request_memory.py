"""Rows and KV blocks of requests: what each is given, and that all of it is given back."""

from dataclasses import fields

import numpy as np
import pytest

from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.context import Request
from mamba_cache.context.request_memory import RequestMemory
from mamba_cache.context.requests import ActiveRequest

BLOCK, MAX_REQUESTS, MAX_BLOCKS, POOL = 4, 3, 6, 17
DUMMY = POOL - 1


@pytest.fixture
def kv_blocks():
    return KVBlockAllocator(POOL)


@pytest.fixture
def memory(kv_blocks):
    return RequestMemory(
        kv_blocks, max_requests=MAX_REQUESTS, max_blocks=MAX_BLOCKS, block_size_tokens=BLOCK
    )


def make_request(name="a"):
    request = Request(request_id=name, prompt_tokens=[1])
    return ActiveRequest(request, np.array([1], dtype=np.int32), chain=None)


def record(active):
    values = {field.name: getattr(active, field.name) for field in fields(active)}
    return {name: value for name, value in values.items() if name not in ("request", "prompt")}


def test_tables_name_the_dummy_block_where_there_is_none(memory):
    assert memory.block_tables.dtype == np.int32
    assert memory.block_tables.tolist() == [[DUMMY] * MAX_BLOCKS] * MAX_REQUESTS


def test_rows_are_given_from_the_first_on(memory, kv_blocks):
    for _ in range(2):
        requests = [make_request(name) for name in "abc"]
        for number, active in enumerate(requests):
            assert memory.num_free_rows == MAX_REQUESTS - number
            memory.admit(active, [], 1)
        assert [active.row for active in requests] == [0, 1, 2]
        kv_blocks.reset()
        memory.reset()


@pytest.mark.parametrize(("num_tokens", "num_new"), [(1, 0), (8, 0), (9, 1), (16, 2), (17, 3)])
def test_a_request_gets_the_blocks_that_it_lacks(memory, kv_blocks, num_tokens, num_new):
    shared = kv_blocks.allocate_memory_blocks(2)[::-1]
    free = kv_blocks.num_free_blocks
    active = make_request()
    memory.admit(active, shared, num_tokens)
    assert active.block_ids[:2] == shared
    assert len(active.block_ids) == 2 + num_new
    assert kv_blocks.num_free_blocks == free - num_new
    assert (active.num_shared_blocks, active.num_shared_tokens) == (2, 2 * BLOCK)
    table = active.block_ids + [DUMMY] * (MAX_BLOCKS - len(active.block_ids))
    assert memory.block_tables[active.row].tolist() == table


def test_a_request_without_memory_is_as_one_that_never_had_any(memory, kv_blocks):
    shared = kv_blocks.allocate_memory_blocks(2)
    active, untouched = make_request(), make_request()
    memory.admit(active, shared, 3 * BLOCK)
    memory.release(active)
    assert record(active) == record(untouched)
    kv_blocks.release_memory_blocks(shared)
    assert kv_blocks.num_free_blocks == POOL - 1
    memory.check_invariants([])
