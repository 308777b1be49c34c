"""PyTorch twins of the kernels that attend to KV blocks and write them: the reference."""

# As many arguments as the kernel has tensors.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["paged_attention", "write_tokens"]


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
    """Attend from each token of each row to all tokens of its request up to this token.

    Args:
        query: [rows, heads, tokens, head_dim]; a row's tokens from ``lengths`` on are padding.
        keys: [num_blocks, block_size, kv_heads, head_dim] of one layer, with those of the queries'
            tokens.
        values: Of the shape of ``keys``.
        block_tables: [places, max_blocks] int32 KV blocks by the request's index in the step.
        places: [rows] int64 index of each row's request in the step; any if a row has no tokens.
        starts: [rows] int64 number of tokens of each row's request before its first query.
        lengths: [rows] int64 number of each row's tokens without padding.
        scale: The factor of products of queries and keys.

    Returns:
        [rows, tokens, heads, head_dim] of the dtype of ``query``; zeros for padding.
    """
    rows, num_heads, num_tokens, head_dim = query.shape
    if num_tokens == 1:
        ends = torch.where(lengths > 0, starts + 1, 0)
        places = places.clamp(min=0)
        return _attend_once(query, keys, values, block_tables[places], ends, scale)
    output = query.new_zeros((rows, num_tokens, num_heads, head_dim))
    each = zip(places.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    for row, (place, start, length) in enumerate(each):
        end = start + length
        blocks = block_tables[place, : -(-end // keys.shape[1])].long()
        k, v = (pool[blocks].flatten(0, 1)[:end].transpose(0, 1) for pool in (keys, values))
        if num_heads != len(k):
            k, v = (x.repeat_interleave(num_heads // len(x), dim=0) for x in (k, v))
        mask = None
        if start:
            positions = torch.arange(end, device=query.device)
            mask = positions <= positions[start:, None]
        found = functional.scaled_dot_product_attention(
            query[row : row + 1, :, :length], k[None], v[None],
            attn_mask=mask, is_causal=not start, scale=scale,
        )  # fmt: skip
        output[row, :length] = found[0].transpose(0, 1)
    return output


def _attend_once(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend from one token of each row to the ``ends`` first tokens of its request."""
    num_heads, block_size, kv_heads = query.shape[1], keys.shape[1], keys.shape[2]
    num_blocks = -(-int(ends.max()) // block_size)
    if not num_blocks:
        return torch.zeros_like(query).transpose(1, 2)
    # Ids behind a request's blocks may be invalid; these blocks are masked, so any id will do.
    blocks = blocks[:, :num_blocks].long().clamp(0, keys.shape[0] - 1)
    shape = (len(query), num_blocks * block_size, kv_heads, query.shape[3])
    k, v = (pool[blocks].view(shape).transpose(1, 2) for pool in (keys, values))
    if num_heads != kv_heads:
        k, v = (x.repeat_interleave(num_heads // kv_heads, dim=1) for x in (k, v))
    is_idle = (ends == 0)[:, None]
    mask = torch.arange(shape[1], device=query.device) < ends[:, None]
    mask[:, :1] |= is_idle  # a softmax of no scores is NaN
    # Unwritten places of a block may hold NaN, which stays NaN with a weight of zero.
    k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    output = functional.scaled_dot_product_attention(
        query, k, v, attn_mask=mask[:, None, None], scale=scale
    )
    return output.masked_fill(is_idle[:, :, None, None], 0).transpose(1, 2)


def write_tokens(
    pool: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write the keys and values of some tokens of each row.

    Args:
        pool: [2, tokens, kv_heads, head_dim] keys and values of one layer, contiguous.
        slots: [rows * n] int64 token index in the pool, row by row; of several tokens with the
            same index any one is kept.
        keys: [rows, kv_heads, n, head_dim] of the pool's dtype.
        values: Of the shape and dtype of ``keys``.
    """
    for half, new in zip(pool, (keys, values), strict=True):
        half.index_copy_(0, slots, new.transpose(1, 2).flatten(0, 1))
