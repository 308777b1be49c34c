"""A decode step sorted by row, and its keys and values written: the kernels and their twins."""

import pytest
import torch

from mamba_cache.integrations.transformers.batching.kernels import (
    decode_inputs,
    decode_inputs_torch,
)


@pytest.fixture(params=["torch", "triton"])
def kernels(request):
    return {"torch": decode_inputs_torch, "triton": decode_inputs}[request.param]


@pytest.mark.parametrize("num_rows", [1, 5, 16, 33])
@pytest.mark.parametrize("num_places", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_row_gets_what_is_packed_for_it(
    kernels, device, generator, num_rows, num_places, dtype
):
    """Rows of nobody, requests in rows beyond the batch, and places of the table that are empty."""
    order = torch.randperm(45, generator=generator)[:num_places]
    used = num_places - num_places // 3
    table = torch.full((num_places, 2), 3, dtype=torch.int32)  # the second column is not read
    table[:, 0] = -1
    table[:used, 0] = order[:used]
    packed = torch.randint(1, 99, (3, num_places + 4), generator=generator).to(dtype)
    packed[2, ::4] = -1
    found = kernels.sort_by_row(table.to(device)[:, 0], *packed.to(device).unbind(), num_rows, 777)
    place_of = {int(row): place for place, row in enumerate(table[:, 0]) if row >= 0}
    expected = []
    for row in range(num_rows):
        place = place_of.get(row, -1)
        token, position, slot = packed[:, place].tolist() if place >= 0 else (0, 0, -1)
        expected.append([place, token, position, 777 if slot < 0 else slot])
    assert torch.stack(found, 1).tolist() == expected
    assert {tensor.dtype for tensor in found} == {torch.int64}


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 5), (3, 24), (9, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_tokens_of_the_step_are_written(
    kernels, device, generator, heads, head_dim, dtype
):
    pool = torch.rand(2, 50, heads, head_dim, generator=generator).to(device, dtype)
    slots = torch.randperm(50, generator=generator)[:6].to(device)
    # As projections leave them: the axis of tokens comes before that of heads.
    new = torch.rand(2, 6, 1, heads, head_dim, generator=generator).to(device, dtype)
    keys, values = new.transpose(2, 3).unbind()
    expected = pool.clone()
    for half, states in zip(expected, new, strict=True):
        half[slots] = states[:, 0]
    kernels.write_tokens(pool, slots, keys, values)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("is_projected", [True, False])
def test_several_tokens_of_each_row_are_written(kernels, device, generator, is_projected):
    """Whether the axis of tokens comes before that of heads or behind it."""
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
