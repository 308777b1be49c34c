"""The keys and values of new tokens, written to KV blocks in Triton."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["write_tokens"]

_TILE = 1024


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
    """Do what the twin does, in one launch."""
    size = pool.shape[2] * pool.shape[3]
    # A token's heads lie together already where a model projects them together.
    keys, values = (x.transpose(1, 2).reshape(-1, size).contiguous() for x in (keys, values))
    _write_kernel[(len(keys), triton.cdiv(size, _TILE))](
        keys, values, pool, slots, keys.stride(0), values.stride(0), pool.stride(0),
        SIZE=size, TILE=min(_TILE, triton.next_power_of_2(size)), num_warps=4,
    )  # fmt: skip
