"""A decode step sorted by row: the kernel and its twin."""

import pytest
import torch

from mamba_cache.integrations.transformers.batching.kernels import pieces, pieces_torch


@pytest.fixture(params=["torch", "triton"])
def kernels(request):
    return {"torch": pieces_torch, "triton": pieces}[request.param]


@pytest.mark.parametrize("num_rows", [1, 5, 16, 33])
@pytest.mark.parametrize("num_places", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_row_gets_its_packed_values(kernels, device, generator, num_rows, num_places, dtype):
    """Rows without a request, requests in rows beyond the batch, empty places of the table."""
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
