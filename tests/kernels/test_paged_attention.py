"""Attention of requests to their KV blocks: the kernels and their twins."""

import math

import pytest
import torch

from mamba_cache.integrations.transformers.batching.kernels import (
    paged_attention,
    paged_attention_torch,
)

SHAPES = {
    "grouped queries": {"heads": 6, "kv_heads": 2, "head_dim": 16, "block": 8},
    "one head, odd": {"heads": 1, "kv_heads": 1, "head_dim": 5, "block": 3},
    "as many heads": {"heads": 3, "kv_heads": 3, "head_dim": 24, "block": 16},
    "blocks of two tiles": {"heads": 2, "kv_heads": 1, "head_dim": 16, "block": 32},
}
# Each row: the place of its request, tokens before the first query, number of queries.
CHUNKS = [(2, 0, 20), (0, 13, 7), (1, 40, 33), (3, 2, 1)]
TOKENS = [(2, 32, 1), (-1, 0, 0), (0, 0, 1), (3, 69, 1), (1, 15, 1), (-1, 0, 0)]
BATCHES = {"chunks": (CHUNKS, 35), "a token of each": (TOKENS, 1)}
"""Rows, and tokens per row with padding. Some single-token rows have no request."""

every_batch = pytest.mark.parametrize(("rows", "num_tokens"), BATCHES.values(), ids=BATCHES)


@pytest.fixture(params=["torch", "triton"])
def attend(request):
    kernels = {"torch": paged_attention_torch, "triton": paged_attention}
    return kernels[request.param].paged_attention


def make(generator, device, dtype, rows, num_tokens, *, heads, kv_heads, head_dim, block):
    """Return random queries, and the rows' requests in blocks in any order."""
    lengths = [1] * (1 + max(0, *(place for place, _, _ in rows)))
    for place, start, count in rows:
        if place >= 0:
            lengths[place] = start + count
    counts = [-(-length // block) for length in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator)
    table = torch.full((len(lengths), max(counts) + 2), num_blocks - 1, dtype=torch.int32)
    first = 0
    for place, count in enumerate(counts):
        table[place, :count] = order[first : first + count].int()
        first += count
    pool = torch.randn(2, num_blocks, block, kv_heads, head_dim, generator=generator)
    query = torch.randn(len(rows), num_tokens, heads, head_dim, generator=generator)
    # Columns of one tensor, as in a batch's rectangle.
    numbers = torch.tensor(rows, device=device).unbind(1)
    query = query.to(device, dtype).transpose(1, 2)
    return query, *pool.to(device, dtype), table.to(device), *numbers


def expected(query, keys, values, table, places, starts, counts, scale):
    """Compute token by token in double precision: each sees its request's tokens up to itself."""
    output = torch.zeros_like(query.transpose(1, 2), dtype=torch.float64)
    rows = zip(places.tolist(), starts.tolist(), counts.tolist(), strict=True)
    for row, (place, start, count) in enumerate(rows):
        blocks = table[place].long()
        for token in range(count):
            seen = [
                pool.double()[blocks].flatten(0, 1)[: start + token + 1] for pool in (keys, values)
            ]
            its = query[row, :, token].double()
            k, v = (x.repeat_interleave(len(its) // x.shape[1], dim=1) for x in seen)
            shares = (torch.einsum("hd,thd->ht", its, k) * scale).softmax(-1)
            output[row, token] = torch.einsum("ht,thd->hd", shares, v)
    return output


@every_batch
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_every_token_sees_the_tokens_before_it(
    attend, device, generator, monkeypatch, shape, splits, rows, num_tokens
):
    """Chunks and keys have more than one tile; padding of any value attends to nothing."""
    monkeypatch.setattr(paged_attention, "_TILE", 16)
    monkeypatch.setattr(paged_attention, "_QUERIES", 32)
    monkeypatch.setattr(paged_attention, "_MAX_SPLITS", splits)
    given = make(generator, device, torch.float32, rows, num_tokens, **shape)
    wanted = expected(*given, 0.3)
    for row, (_, _, count) in enumerate(rows):
        given[0][row, :, count:] = math.nan
    pools = [given[1].clone(), given[2].clone()]
    found = attend(*given, 0.3)
    torch.testing.assert_close(found, wanted.float(), rtol=0, atol=2e-6)
    assert torch.equal(given[1], pools[0])
    assert torch.equal(given[2], pools[1])
    # Rows are independent: alone, without padding, each has the same bits. But the number of key
    # parts depends on the device, and the twin computes single tokens differently.
    for row, (_, _, count) in enumerate(rows):
        if not count:
            continue
        one = slice(row, row + 1)
        query, keys, values, table, *rest = given
        own = attend(query[one, :, :count], keys, values, table, *(x[one] for x in rest), 0.3)
        if splits == 1 and count > 1:
            assert torch.equal(own[0], found[row, :count])
        torch.testing.assert_close(own[0], found[row, :count], rtol=0, atol=2e-6)


@every_batch
def test_half_precision(attend, device, generator, rows, num_tokens):
    """Triton's interpreter multiplies no bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    given = make(generator, device, dtype, rows, num_tokens, **SHAPES["grouped queries"])
    found = attend(*given, 0.25)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected(*given, 0.25), rtol=0, atol=0.03)


def test_a_batch_without_decodes(attend, device, generator):
    rows = [(-1, 0, 0)] * 2
    given = make(generator, device, torch.float32, rows, 1, **SHAPES["grouped queries"])
    assert not attend(*given, 1.0).any()


@every_batch
def test_keys_behind_a_request_are_not_read(attend, device, generator, rows, num_tokens):
    """Unfilled blocks may hold any bits, NaN included."""
    shape = SHAPES["grouped queries"]
    given = make(generator, device, torch.float32, rows, num_tokens, **shape)
    _, keys, values, table, *_ = given
    wanted = attend(*given, 1.0)
    is_its = torch.zeros(keys.shape[:2], dtype=torch.bool, device=device)
    for place, start, count in rows:
        for position in range(start + count):
            block = table[place, position // shape["block"]].long()
            is_its[block, position % shape["block"]] = True
    keys[~is_its], values[~is_its] = math.inf, math.nan
    assert torch.equal(attend(*given, 1.0), wanted)
