"""The attention of requests to their KV blocks: the kernels and their twins."""

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
}


@pytest.fixture(params=["torch", "triton"])
def attend_chunks(request):
    kernels = {"torch": paged_attention_torch, "triton": paged_attention}
    return kernels[request.param].paged_attention


@pytest.fixture
def attend(attend_chunks):
    """From the last token of each row's request."""

    def attend(query, keys, values, table, places, lengths, scale):
        starts = lengths[places.clamp(min=0)].long() - 1
        has_request = (places >= 0).long()
        found = attend_chunks(
            query[:, :, None], keys, values, table, places, starts, has_request, scale
        )
        return found[:, 0]

    return attend


def make(generator, device, lengths, places, *, heads, kv_heads, head_dim, block, dtype):
    """Random queries, and requests of these lengths in blocks in any order."""
    counts = [-(-length // block) for length in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator)
    table = torch.full((len(lengths), max(counts) + 2), num_blocks - 1, dtype=torch.int32)
    first = 0
    for place, count in enumerate(counts):
        table[place, :count] = order[first : first + count].int()
        first += count
    pool = torch.randn(2, num_blocks, block, kv_heads, head_dim, generator=generator)
    query = torch.randn(len(places), heads, head_dim, generator=generator)
    return (
        query.to(device, dtype),
        *pool.to(device, dtype),
        table.to(device),
        torch.tensor(places, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def expected(query, keys, values, table, places, lengths, scale):
    """Row by row, in double precision."""
    rows = []
    for row, place in zip(query.double(), places.tolist(), strict=True):
        if place < 0:
            rows.append(torch.zeros_like(row))
            continue
        count = int(lengths[place])
        tokens = [
            pool.double()[table[place].long()].flatten(0, 1)[:count] for pool in (keys, values)
        ]
        k, v = (x.repeat_interleave(len(row) // x.shape[1], dim=1) for x in tokens)
        shares = (torch.einsum("hd,thd->ht", row, k) * scale).softmax(-1)
        rows.append(torch.einsum("ht,thd->hd", shares, v))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_every_row_attends_to_its_own_request(
    attend, device, generator, monkeypatch, shape, splits
):
    """Requests shorter and longer than a tile, in any order, and rows of nobody."""
    monkeypatch.setattr(paged_attention, "_TILE", 16)
    monkeypatch.setattr(paged_attention, "_MAX_SPLITS", splits)
    lengths, places = [1, 16, 33, 70], [2, -1, 0, 3, 1, -1]
    given = make(generator, device, lengths, places, dtype=torch.float32, **shape)
    pools = [given[1].clone(), given[2].clone()]
    scale = 0.3
    found = attend(*given, scale)
    torch.testing.assert_close(found, expected(*given, scale).float(), rtol=0, atol=2e-6)
    assert torch.equal(given[1], pools[0])
    assert torch.equal(given[2], pools[1])


def test_half_precision(attend, device, generator):
    """Triton's interpreter multiplies no bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    given = make(generator, device, [40, 9], [1, 0], dtype=dtype, **SHAPES["grouped queries"])
    found = attend(*given, 0.25)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected(*given, 0.25), rtol=0, atol=0.03)


def test_nobody_decodes(attend, device, generator):
    given = make(generator, device, [4], [-1, -1], dtype=torch.float32, **SHAPES["grouped queries"])
    assert not attend(*given, 1.0).any()


def test_what_lies_behind_a_request_is_not_read(attend, device, generator):
    """Blocks that it has not filled may hold anything, numbers or none."""
    shape = SHAPES["grouped queries"]
    given = make(generator, device, [13], [0], dtype=torch.float32, **shape)
    wanted = expected(*given, 1.0)
    _, keys, values, table, _, _ = given
    is_its = torch.zeros(keys.shape[:2], dtype=torch.bool, device=device)
    for position in range(13):
        is_its[table[0, position // shape["block"]].long(), position % shape["block"]] = True
    keys[~is_its], values[~is_its] = math.inf, 1e30
    torch.testing.assert_close(attend(*given, 1.0), wanted.float(), rtol=0, atol=2e-6)


STARTS, COUNTS, PLACES = [0, 13, 40, 2], [20, 7, 33, 1], [2, 0, 1, 3]


def make_chunks(generator, device, dtype, *, num_tokens, **shape):
    """Random chunks of several lengths, each after what its request has, padded behind."""
    lengths = [0] * len(PLACES)
    for place, start, count in zip(PLACES, STARTS, COUNTS, strict=True):
        lengths[place] = start + count
    _, keys, values, table, _, _ = make(generator, device, lengths, PLACES, dtype=dtype, **shape)
    size = len(PLACES), num_tokens, shape["heads"], shape["head_dim"]
    query = torch.randn(size, generator=generator).to(device, dtype).transpose(1, 2)
    # Columns of one tensor, as those of a rectangle are.
    numbers = torch.tensor([*zip(PLACES, STARTS, COUNTS, strict=True)], device=device)
    return query, keys, values, table, *numbers.unbind(1)


def expected_of_chunks(query, keys, values, table, places, starts, counts, scale):
    """Token by token: each sees what its request has up to itself."""
    output = torch.zeros_like(query.transpose(1, 2), dtype=torch.float64)
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        for token in range(count):
            output[row, token] = expected(
                query[row : row + 1, :, token], keys, values, table, places[row : row + 1],
                torch.full((len(table),), start + token + 1), scale,
            )[0]  # fmt: skip
    return output


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_every_token_of_a_chunk_sees_what_is_before_it(
    attend_chunks, device, generator, monkeypatch, shape, splits
):
    """Chunks and keys of more than one tile; padding attends to nothing, whatever is in it."""
    monkeypatch.setattr(paged_attention, "_TILE", 16)
    monkeypatch.setattr(paged_attention, "_QUERIES", 32)
    monkeypatch.setattr(paged_attention, "_MAX_SPLITS", splits)
    given = make_chunks(generator, device, torch.float32, num_tokens=35, **shape)
    wanted = expected_of_chunks(*given, 0.3)
    for row, count in enumerate(COUNTS):
        given[0][row, :, count:] = math.nan
    pools = [given[1].clone(), given[2].clone()]
    found = attend_chunks(*given, 0.3)
    torch.testing.assert_close(found, wanted.float(), rtol=0, atol=2e-6)
    assert torch.equal(given[1], pools[0])
    assert torch.equal(given[2], pools[1])
    # Rows do not know of each other: alone, without padding, each is the same to the bit. But keys
    # have as many parts as fill the device, and the twin computes single tokens in its own way.
    for row, count in enumerate(COUNTS):
        one = slice(row, row + 1)
        query, keys, values, table, *rest = given
        own = attend_chunks(
            query[one, :, :count], keys, values, table, *(x[one] for x in rest), 0.3
        )
        if splits == 1 and count > 1:
            assert torch.equal(own[0], found[row, :count])
        torch.testing.assert_close(own[0], found[row, :count], rtol=0, atol=2e-6)


def test_chunks_in_half_precision(attend_chunks, device, generator):
    """Triton's interpreter multiplies no bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    shape = SHAPES["grouped queries"]
    given = make_chunks(generator, device, dtype, num_tokens=33, **shape)
    found = attend_chunks(*given, 0.25)
    assert found.dtype is dtype
    wanted = expected_of_chunks(*given, 0.25)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.03)


def test_what_lies_behind_a_chunk_is_not_read(attend_chunks, device, generator):
    shape = SHAPES["grouped queries"]
    given = make_chunks(generator, device, torch.float32, num_tokens=33, **shape)
    _, keys, values, table, *_ = given
    wanted = attend_chunks(*given, 1.0)
    is_its = torch.zeros(keys.shape[:2], dtype=torch.bool, device=device)
    for place, start, count in zip(PLACES, STARTS, COUNTS, strict=True):
        for position in range(start + count):
            block = table[place, position // shape["block"]].long()
            is_its[block, position % shape["block"]] = True
    keys[~is_its], values[~is_its] = math.inf, math.nan
    assert torch.equal(attend_chunks(*given, 1.0), wanted)
