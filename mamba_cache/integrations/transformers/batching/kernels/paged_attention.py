"""Triton kernels that attend to KV blocks, and that write keys and values into them."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

__all__ = ["paged_attention", "write_tokens"]

_TILE = 64
_WRITE_TILE = 1024
_QUERIES = 128
_MIN_QUERIES = 16
"""Minimum number of rows that a matrix unit multiplies."""
_SUMS_OF_4_WARPS = 128 * 128
"""Number of sums, queries times dimensions, that fit into the registers of four warps."""
_PROGRAMS = 512
"""Keys are split among programs until there are this many in all, which fill a GPU."""
_MAX_SPLITS = 32
_LOG2_E = math.log2(math.e)
"""Converts scores to exponents of 2, because a GPU computes these without a multiplication."""
_LOWEST = tl.constexpr(-3.0e38)
"""Maximum of zero scores: below all scores, and finite, so that it can be subtracted."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_tile(  # type: ignore[no-untyped-def]
    q,
    keys,
    values,
    table,
    columns,
    is_dim,
    first,
    limits,
    end,
    scale,
    peak,
    total,
    summed,
    token_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Attend to a tile of tokens; return the peak, total and sum with them."""
    tokens = first + tl.arange(0, TILE)
    is_token = tokens < end
    if BLOCK % TILE == 0:  # the tile lies in one block
        block = tl.load(table + first // BLOCK).to(tl.int64)
        slots = block * BLOCK + first % BLOCK + tl.arange(0, TILE)
    elif TILE % BLOCK == 0:  # it has whole blocks
        own = tl.arange(0, TILE // BLOCK)
        blocks = tl.load(table + first // BLOCK + own, mask=first + own * BLOCK < end, other=0)
        slots = (blocks.to(tl.int64) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        slots = tl.reshape(slots, [TILE])
    else:
        blocks = tl.load(table + tokens // BLOCK, mask=is_token, other=0).to(tl.int64)
        slots = blocks * BLOCK + tokens % BLOCK
    at = (slots * token_stride)[:, None] + columns[None, :]
    is_kept = is_dim if IS_WHOLE else is_token[:, None] & is_dim
    k = tl.load(keys + at, mask=is_kept, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if not IS_WHOLE:
        is_seen = is_token[None, :] & (tokens[None, :] <= limits[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    v = tl.load(values + at, mask=is_kept, other=0.0)
    total = total * decay + tl.sum(weights, 1)
    added = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_peak, total, summed * decay[:, None] + added


@triton.jit  # type: ignore[untyped-decorator]
def _attend_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    places,
    starts,
    lengths,
    output,
    sums,
    peaks,
    totals,
    scale,
    row_stride,
    head_stride,
    query_stride,
    table_stride,
    token_stride,
    num_tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Attend from some queries of one KV head of one row to a part of what they see."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    place = tl.load(places + row).to(tl.int64)
    start = tl.load(starts + row).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    # The queries of a KV head's group lie side by side: its keys are read once for all of them.
    members = tl.arange(0, QUERIES)
    number = part * QUERIES + members
    token, member = number // GROUP, number % GROUP
    first = part * QUERIES // GROUP
    last = tl.minimum(((part + 1) * QUERIES - 1) // GROUP, length - 1)
    # How far a part reaches is found on the device: a captured graph serves any lengths.
    end = tl.where(first < length, start + last + 1, 0)
    share = tl.cdiv(tl.cdiv(end, TILE), SPLITS) * TILE
    begin = split * share
    end = tl.minimum(begin + share, end)

    dims = tl.arange(0, HEAD_PAD)
    is_dim = (dims < HEAD_DIM)[None, :]
    is_query = (token < length)[:, None] & is_dim
    own = row * row_stride + (head * GROUP + member).to(tl.int64) * head_stride
    own = own + token.to(tl.int64) * query_stride
    q = tl.load(query + own[:, None] + dims[None, :], mask=is_query, other=0.0)

    table = tables + place * table_stride
    columns = head * HEAD_DIM + dims
    limits = start + token
    peak = tl.full([QUERIES], _LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, HEAD_PAD], tl.float32)
    # Every query of the part sees the tiles before the first query whole: they need no mask.
    whole = tl.minimum(end, (start + first + 1) // TILE * TILE)
    for at in range(begin, whole, TILE):
        peak, total, summed = _add_tile(
            q, keys, values, table, columns, is_dim, at, limits, end, scale,
            peak, total, summed, token_stride, BLOCK, TILE, True,
        )  # fmt: skip
    for at in range(tl.maximum(begin, whole), end, TILE):
        peak, total, summed = _add_tile(
            q, keys, values, table, columns, is_dim, at, limits, end, scale,
            peak, total, summed, token_stride, BLOCK, TILE, False,
        )  # fmt: skip

    if SPLITS == 1:
        result = summed / tl.where(total > 0, total, 1.0)[:, None]
        result = tl.where(is_query, result, 0.0)
        to = (row * num_tokens + token) * (KV_HEADS * GROUP) + head * GROUP + member
        to = output + to[:, None] * HEAD_DIM + dims[None, :]
        is_inside = (token < num_tokens)[:, None] & is_dim
        tl.store(to, result.to(output.dtype.element_ty), mask=is_inside)
    else:
        cell = (row * KV_HEADS + head) * tl.num_programs(2) + tl.program_id(2)
        at = cell * QUERIES + members
        tl.store(peaks + at, peak)
        tl.store(totals + at, tl.where(token < length, total, 0.0))
        tl.store(sums + at[:, None] * HEAD_DIM + dims[None, :], summed, mask=is_dim)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    sums,
    peaks,
    totals,
    output,
    num_tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
) -> None:
    """Combine the parts of one query."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.program_id(2)
    token, member = number // GROUP, number % GROUP
    parts = tl.cdiv(num_tokens * GROUP, QUERIES)
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, HEAD_PAD)
    cell = ((row * KV_HEADS + head) * parts + number // QUERIES) * SPLITS + splits
    at = cell * QUERIES + number % QUERIES
    peak = tl.load(peaks + at, mask=splits < SPLITS, other=_LOWEST)
    total = tl.load(totals + at, mask=splits < SPLITS, other=0.0)
    highest = tl.max(peak, 0)
    # Of a row without tokens no part has a peak, and nothing is divided by nothing.
    weight = tl.where(total > 0, tl.exp2(peak - highest), 0.0)
    is_part = (splits < SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
    found = tl.load(sums + at[:, None] * HEAD_DIM + dims[None, :], mask=is_part, other=0.0)
    whole = tl.sum(total * weight, 0)
    result = tl.sum(found * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    to = (row * num_tokens + token) * (KV_HEADS * GROUP) + head * GROUP + member
    to = output + to * HEAD_DIM + dims
    tl.store(to, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def _tile_of(num_queries: int, head_pad: int) -> tuple[int, int]:
    """Return a program's number of queries and of warps, as measured on one NVIDIA H200."""
    queries = min(_QUERIES, max(triton.next_power_of_2(num_queries), _MIN_QUERIES))
    if queries == _MIN_QUERIES:
        return queries, 2
    return queries, 4 if queries * head_pad <= _SUMS_OF_4_WARPS else 8


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    places: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute the twin's function in one or two launches; grids depend on shapes alone."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    places, starts, lengths = (one.contiguous() for one in (places, starts, lengths))
    rows, num_heads, num_tokens, head_dim = query.shape
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    group = num_heads // kv_heads
    head_pad = triton.next_power_of_2(max(head_dim, 16))
    queries, num_warps = _tile_of(num_tokens * group, head_pad)
    parts = triton.cdiv(num_tokens * group, queries)
    splits = max(1, min(_MAX_SPLITS, _PROGRAMS // (rows * kv_heads * parts)))
    output = query.new_empty((rows, num_tokens, num_heads, head_dim))
    sums = peaks = totals = output  # placeholders, not used without splits
    if splits > 1:
        cells = rows * kv_heads * parts * splits
        sums = query.new_empty((cells, queries, head_dim), dtype=torch.float32)
        peaks, totals = query.new_empty((2, cells, queries), dtype=torch.float32)
    _attend_kernel[(rows, kv_heads, parts * splits)](
        query, keys, values, block_tables, places, starts, lengths, output, sums, peaks, totals,
        scale * _LOG2_E, *query.stride()[:3], block_tables.stride(0), keys.stride(1), num_tokens,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, HEAD_PAD=head_pad, BLOCK=block_size,
        QUERIES=queries, TILE=_TILE, SPLITS=splits, num_warps=num_warps,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(rows, kv_heads, num_tokens * group)](
            sums, peaks, totals, output, num_tokens,
            KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, HEAD_PAD=head_pad,
            QUERIES=queries, SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
    return output


@triton.jit  # type: ignore[untyped-decorator]
def _write_kernel(  # type: ignore[no-untyped-def]
    keys,
    values,
    pool,
    slots,
    key_stride,
    value_stride,
    half_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write a part of the keys and of the values of one token."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + row).to(tl.int64)
    to = pool + slot * SIZE + offset
    is_inside = offset < SIZE
    key = tl.load(keys + row * key_stride + offset, mask=is_inside)
    tl.store(to, key, mask=is_inside)
    value = tl.load(values + row * value_stride + offset, mask=is_inside)
    tl.store(to + half_stride, value, mask=is_inside)


def write_tokens(
    pool: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Compute the twin's function in one launch."""
    size = pool.shape[2] * pool.shape[3]
    # No copy if the model projects all heads of a token together.
    keys, values = (x.transpose(1, 2).reshape(-1, size).contiguous() for x in (keys, values))
    _write_kernel[(len(keys), triton.cdiv(size, _WRITE_TILE))](
        keys, values, pool, slots, keys.stride(0), values.stride(0), pool.stride(0),
        SIZE=size, TILE=min(_WRITE_TILE, triton.next_power_of_2(size)), num_warps=4,
    )  # fmt: skip
