"""The PyTorch twin of what writes the keys and values of new tokens."""

from __future__ import annotations

import torch

__all__ = ["write_tokens"]


def write_tokens(
    pool: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write the keys and values of some tokens of each row.

    Args:
        pool: [2, tokens, kv_heads, head_dim] keys and values of one layer, contiguous.
        slots: [rows * n] int64 where each token's go, row by row; of tokens that go to the same
            place any is kept.
        keys: [rows, kv_heads, n, head_dim] of the pool's dtype.
        values: Likewise.
    """
    for half, new in zip(pool, (keys, values), strict=True):
        half.index_copy_(0, slots, new.transpose(1, 2).flatten(0, 1))
