"""The PyTorch twins of the attention to KV blocks: they say what is right."""

# As many arguments as the kernel has tensors.
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["chunk_attention", "paged_attention"]


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend from one token of each row to the keys and values of its request, block by block.

    Args:
        query: [rows, heads, head_dim].
        keys: [num_blocks, block_size, kv_heads, head_dim] of one layer, those of the queries'
            tokens included.
        values: Likewise.
        block_tables: [places, max_blocks] int32 KV blocks by place in the step.
        places: [rows] int64 place of each row's request in the step; -1: the row has none.
        lengths: [places] int32 tokens of each request, by place.
        scale: What products of queries and keys are multiplied by.

    Returns:
        [rows, heads, head_dim] of the dtype of ``query``; zeros for rows without a request.
    """
    num_heads, block_size, kv_heads = query.shape[1], keys.shape[1], keys.shape[2]
    is_known, places = places >= 0, places.clamp(min=0)
    lengths = torch.where(is_known, lengths[places], 0)
    num_blocks = -(-int(lengths.max()) // block_size)
    if not num_blocks:
        return torch.zeros_like(query)
    blocks = block_tables[places, :num_blocks].long()
    # A block that a request has not got any more, or not yet, is masked: any will do.
    blocks = blocks.clamp(0, keys.shape[0] - 1)
    shape = (len(query), num_blocks * block_size, kv_heads, query.shape[2])
    k, v = (pool[blocks].view(shape).transpose(1, 2) for pool in (keys, values))
    if num_heads != kv_heads:
        k, v = (x.repeat_interleave(num_heads // kv_heads, dim=1) for x in (k, v))
    mask = torch.arange(shape[1], device=query.device) < lengths[:, None]
    mask[:, 0] |= ~is_known  # a softmax of nothing is no number
    # What was left in a block by others may be no number, which no weight makes nothing of.
    k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    output = functional.scaled_dot_product_attention(
        query[:, :, None], k, v, attn_mask=mask[:, None, None], scale=scale
    )
    return output[:, :, 0].masked_fill(~is_known[:, None, None], 0)


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
    """Attend from several tokens of each row to what its request has up to each of them.

    Args:
        query: [rows, heads, tokens, head_dim]; a row's tokens from ``lengths`` on are padding.
        keys: [num_blocks, block_size, kv_heads, head_dim] of one layer, those of the queries'
            tokens included.
        values: Likewise.
        block_tables: [places, max_blocks] int32 KV blocks by place in the step.
        places: [rows] int64 place of each row's request in the step.
        starts: [rows] int64 tokens of each row's request before its first query.
        lengths: [rows] int64 how many of each row's tokens are no padding.
        scale: What products of queries and keys are multiplied by.

    Returns:
        [rows, tokens, heads, head_dim] of the dtype of ``query``; zeros for padding.
    """
    rows, num_heads, num_tokens, head_dim = query.shape
    block_size, kv_heads = keys.shape[1], keys.shape[2]
    output = query.new_zeros((rows, num_tokens, num_heads, head_dim))
    each = zip(places.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    for row, (place, start, length) in enumerate(each):
        end = start + length
        blocks = block_tables[place, : -(-end // block_size)].long()
        k, v = (pool[blocks].flatten(0, 1)[:end].transpose(0, 1) for pool in (keys, values))
        if num_heads != kv_heads:
            k, v = (x.repeat_interleave(num_heads // kv_heads, dim=0) for x in (k, v))
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
