"""The attention of requests to their KV blocks: of one token each, and of chunks, in Triton."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["chunk_attention", "paged_attention"]

_TILE = 64
_QUERIES = 64
_PROGRAMS = 1024
_MOST_SPLITS = 32
_LOWEST = tl.constexpr(-3.0e38)
"""The peak of no scores: below all of them, and still a number to subtract from."""


@triton.jit  # type: ignore[untyped-decorator]
def _attend_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    places,
    lengths,
    sums,
    peaks,
    totals,
    scale,
    query_stride,
    table_stride,
    token_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Attend from the queries of one KV head of one row to one part of its tokens."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    place = tl.load(places + row).to(tl.int64)
    length = tl.load(lengths + place, mask=place >= 0, other=0)
    # How far a part reaches is found on the device: a captured graph serves any lengths.
    share = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE
    begin = split * share
    end = tl.minimum(begin + share, length)

    members = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    is_query = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    own = (head * GROUP + members)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + row.to(tl.int64) * query_stride + own, mask=is_query, other=0.0)

    peak = tl.full([GROUP_PAD], _LOWEST, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    summed = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for first in range(begin, end, TILE):
        tokens = first + tl.arange(0, TILE)
        is_token = tokens < end
        block = tl.load(tables + place * table_stride + tokens // BLOCK, mask=is_token, other=0)
        slot = block.to(tl.int64) * BLOCK + tokens % BLOCK
        at = (slot * token_stride + head * HEAD_DIM)[:, None] + dims[None, :]
        is_kept = is_token[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + at, mask=is_kept, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        decay = tl.exp(peak - new_peak)
        v = tl.load(values + at, mask=is_kept, other=0.0)
        total = total * decay + tl.sum(weights, 1)
        part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        summed = summed * decay[:, None] + part
        peak = new_peak

    cell = (row.to(tl.int64) * KV_HEADS + head) * SPLITS + split
    of_member = cell * GROUP + members
    tl.store(peaks + of_member, peak, mask=members < GROUP)
    tl.store(totals + of_member, total, mask=members < GROUP)
    tl.store(sums + of_member[:, None] * HEAD_DIM + dims[None, :], summed, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    sums,
    peaks,
    totals,
    output,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
) -> None:
    """Combine the parts of one query head of one row."""
    cell = tl.program_id(0).to(tl.int64)  # a row and a KV head
    member = tl.program_id(1)
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, HEAD_PAD)
    at = (cell * SPLITS + splits) * GROUP + member
    peak = tl.load(peaks + at, mask=splits < SPLITS, other=_LOWEST)
    total = tl.load(totals + at, mask=splits < SPLITS, other=0.0)
    highest = tl.max(peak, 0)
    # Of a row without tokens no part has a peak, and nothing is divided by nothing.
    weight = tl.where(total > 0, tl.exp(peak - highest), 0.0)
    is_part = (splits < SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(sums + at[:, None] * HEAD_DIM + dims[None, :], mask=is_part, other=0.0)
    whole = tl.sum(total * weight, 0)
    result = tl.sum(parts * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    to = output + (cell * GROUP + member) * HEAD_DIM + dims
    tl.store(to, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _chunk_kernel(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    places,
    starts,
    lengths,
    output,
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
) -> None:
    """Attend from some tokens of one row, the queries of one KV head, to all that they see."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.load(places + row).to(tl.int64)
    start = tl.load(starts + row).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    # The queries of a KV head's group lie side by side: its keys are read once for all of them.
    number = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    token, member = number // GROUP, number % GROUP
    first = tl.program_id(2) * QUERIES // GROUP
    last = tl.minimum(((tl.program_id(2) + 1) * QUERIES - 1) // GROUP, length - 1)
    end = tl.where(first < length, start + last + 1, 0)

    dims = tl.arange(0, HEAD_PAD)
    is_query = (token < length)[:, None] & (dims < HEAD_DIM)[None, :]
    own = row * row_stride + (head * GROUP + member).to(tl.int64) * head_stride
    own = own + token.to(tl.int64) * query_stride
    q = tl.load(query + own[:, None] + dims[None, :], mask=is_query, other=0.0)

    peak = tl.full([QUERIES], _LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, HEAD_PAD], tl.float32)
    for begin in range(0, end, TILE):
        tokens = begin + tl.arange(0, TILE)
        is_token = tokens < end
        block = tl.load(tables + place * table_stride + tokens // BLOCK, mask=is_token, other=0)
        slot = block.to(tl.int64) * BLOCK + tokens % BLOCK
        at = (slot * token_stride + head * HEAD_DIM)[:, None] + dims[None, :]
        is_kept = is_token[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + at, mask=is_kept, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        is_seen = is_token[None, :] & (tokens[None, :] <= (start + token)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        decay = tl.exp(peak - new_peak)
        v = tl.load(values + at, mask=is_kept, other=0.0)
        total = total * decay + tl.sum(weights, 1)
        part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        summed = summed * decay[:, None] + part
        peak = new_peak

    result = summed / tl.where(total > 0, total, 1.0)[:, None]
    result = tl.where(is_query, result, 0.0)
    heads = KV_HEADS * GROUP
    to = ((row * num_tokens + token) * heads + head * GROUP + member) * HEAD_DIM
    is_inside = (token < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    to = output + to[:, None] + dims[None, :]
    tl.store(to, result.to(output.dtype.element_ty), mask=is_inside)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Do what the twin does, in two launches whose grids depend on shapes alone."""
    query, places, lengths = (one.contiguous() for one in (query, places, lengths))
    rows, num_heads, head_dim = query.shape
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    group = num_heads // kv_heads
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // (rows * kv_heads)))
    cells = rows * kv_heads * splits
    sums = query.new_empty((cells, group, head_dim), dtype=torch.float32)
    peaks, totals = query.new_empty((2, cells, group), dtype=torch.float32)
    output = torch.empty_like(query)
    head_pad = triton.next_power_of_2(max(head_dim, 16))
    _attend_kernel[(rows, kv_heads, splits)](
        query, keys, values, block_tables, places, lengths, sums, peaks, totals,
        scale, query.stride(0), block_tables.stride(0), keys.stride(1),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(max(group, 16)),
        HEAD_DIM=head_dim, HEAD_PAD=head_pad, BLOCK=block_size, TILE=_TILE, SPLITS=splits,
        num_warps=4,
    )  # fmt: skip
    _combine_kernel[(rows * kv_heads, group)](
        sums, peaks, totals, output,
        GROUP=group, HEAD_DIM=head_dim, HEAD_PAD=head_pad, SPLITS=splits,
        SPLITS_PAD=triton.next_power_of_2(splits), num_warps=1,
    )  # fmt: skip
    return output


def _num_warps(head_pad: int) -> int:
    """Return how many warps hold the sums of a tile of chunks' queries in their registers."""
    return 8 if head_pad > 128 else 4


def chunk_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    places: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Do what the twin does, in one launch whose grid depends on shapes alone."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    places, starts, lengths = (one.contiguous() for one in (places, starts, lengths))
    rows, num_heads, num_tokens, head_dim = query.shape
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    group = num_heads // kv_heads
    output = query.new_empty((rows, num_tokens, num_heads, head_dim))
    head_pad = triton.next_power_of_2(max(head_dim, 16))
    _chunk_kernel[(rows, kv_heads, triton.cdiv(num_tokens * group, _QUERIES))](
        query, keys, values, block_tables, places, starts, lengths, output,
        scale, *query.stride()[:3], block_tables.stride(0), keys.stride(1), num_tokens,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, HEAD_PAD=head_pad, BLOCK=block_size,
        QUERIES=_QUERIES, TILE=_TILE, num_warps=_num_warps(head_pad),
    )  # fmt: skip
    return output
