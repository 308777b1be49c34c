"""Writes of new tokens' keys and values: the kernel and its twin."""

import pytest
import torch

from mamba_cache.integrations.transformers.batching.kernels import (
    paged_attention,
    paged_attention_torch,
)


@pytest.fixture(params=["torch", "triton"])
def kernels(request):
    return {"torch": paged_attention_torch, "triton": paged_attention}[request.param]


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 5), (3, 24), (9, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_tokens_of_the_step_are_written(
    kernels, device, generator, heads, head_dim, dtype
):
    pool = torch.rand(2, 50, heads, head_dim, generator=generator).to(device, dtype)
    slots = torch.randperm(50, generator=generator)[:6].to(device)
    # The layout of projections: the token axis precedes the head axis.
    new = torch.rand(2, 6, 1, heads, head_dim, generator=generator).to(device, dtype)
    keys, values = new.transpose(2, 3).unbind()
    expected = pool.clone()
    for half, states in zip(expected, new, strict=True):
        half[slots] = states[:, 0]
    kernels.write_tokens(pool, slots, keys, values)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("is_projected", [True, False])
def test_several_tokens_of_each_row_are_written(kernels, device, generator, is_projected):
    """The token axis precedes the head axis, or follows it."""
    pool = torch.zeros(2, 20, 3, 4, device=device)
    slots = torch.randperm(20, generator=generator)[:10].to(device)
    new = torch.rand(2, 2, 5, 3, 4, generator=generator).to(device)
    states = new.transpose(2, 3)
    kernels.write_tokens(pool, slots, *(states if is_projected else states.contiguous()).unbind())
    expected = torch.zeros_like(pool)
    expected[:, slots] = new.flatten(1, 2)
    assert torch.equal(pool, expected)


def test_heads_that_do_not_lie_together(kernels, device, generator):
    pool = torch.zeros(2, 9, 3, 4, device=device)
    keys = torch.rand(2, 3, 1, 8, generator=generator).to(device)[..., ::2]
    slots = torch.tensor([7, 2], device=device)
    kernels.write_tokens(pool, slots, keys, keys + 1)
    assert torch.equal(pool[0, slots], keys[:, :, 0])
    assert torch.equal(pool[1, slots], keys[:, :, 0] + 1)
    assert pool.flatten(2).any(-1).sum() == 4
