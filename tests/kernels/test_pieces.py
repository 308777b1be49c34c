"""Pieces of ragged rows and windows before their ends: the kernels and their twins."""

import math

import pytest
import torch

from mamba_cache.integrations.transformers.batching.kernels import pieces, pieces_torch

BOUNDS = [[0, 3, 3, 9, 11, 11], [0, 5, 6, 6, 6, 13], [0, 0, 1, 2, 3, 4]]
"""Bounds of five pieces in three rows of at most 13 tokens; some pieces are empty."""


@pytest.fixture(params=["torch", "triton"])
def kernels(request):
    return {"torch": pieces_torch, "triton": pieces}[request.param]


def spoilt(tensor):
    """Return the tensor with NaN behind each row's last token."""
    for row, bounds in zip(tensor, BOUNDS, strict=True):
        row[bounds[-1] :] = math.nan
    return tensor


@pytest.mark.parametrize("count", [1, 5, 8])
@pytest.mark.parametrize("number", range(5))
def test_a_piece_of_each_row_is_taken_and_padded(kernels, device, generator, count, number):
    """Tensors are contiguous, transposed or parts of wider ones, of any dtype and size."""
    shapes = [(7,), (2, 8), (3, 1500), (4,), (1, 2, 3), (5,), (6,), (2, 2)][:count]
    dtypes = [torch.float32, torch.bfloat16]
    values = [
        spoilt(torch.randn(3, 13, 2, *shape, generator=generator)[:, :, place % 2])
        .to(device, dtypes[place % 2])
        for place, shape in enumerate(shapes)
    ]  # fmt: skip
    values = [
        value.transpose(1, -1).contiguous().transpose(1, -1) if place % 3 == 2 else value
        for place, value in enumerate(values)
    ]
    fills = [0.0, -math.inf, 0.0, 1.0, 0.0, -math.inf, 0.0, 2.0][:count]
    bounds = torch.tensor(BOUNDS, device=device)
    width = max(row[number + 1] - row[number] for row in BOUNDS) + number % 2
    found = kernels.take_piece(values, fills, bounds, number, width)
    for value, fill, taken in zip(values, fills, found, strict=True):
        expected = torch.full((3, width, *value.shape[2:]), fill, dtype=value.dtype)
        for row, own in enumerate(BOUNDS):
            begin, end = own[number], own[number + 1]
            expected[row, : end - begin] = value[row, begin:end].cpu()
        assert torch.equal(taken.cpu(), expected)


@pytest.mark.parametrize("numbers", [[0], [0, 2, 3], [0, 1, 2, 3, 4], [0, 3, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_put_back_to_where_they_were(kernels, device, generator, numbers, dtype):
    pieces_ = [
        torch.randn(3, 8, 2, 600, generator=generator).to(device, dtype).transpose(0, 0)
        for _ in numbers
    ]
    bounds = torch.tensor(BOUNDS, device=device)
    if numbers[-1] < 4:  # the omitted pieces are empty
        bounds[:, numbers[-1] + 1 :] = bounds[:, numbers[-1] + 1, None]
    for number in set(range(numbers[-1])) - set(numbers):
        bounds[:, number + 1] = bounds[:, number]
    joined = kernels.join_pieces(pieces_, numbers, bounds, 13)
    expected = torch.zeros(3, 13, 2, 600, dtype=dtype)
    for row, own in enumerate(bounds.tolist()):
        for piece, number in zip(pieces_, numbers, strict=True):
            begin, end = own[number], own[number + 1]
            expected[row, begin:end] = piece[row, : end - begin].cpu()
    assert torch.equal(joined.cpu(), expected)


@pytest.mark.parametrize("has_owners", [False, True])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_window_before_each_end_is_copied(kernels, device, generator, has_owners, width):
    """Inputs and destinations are strided; other places stay unchanged."""
    full = torch.randn(3, 13 + width, 150, generator=generator).to(device).transpose(1, 2)
    ends = torch.tensor([[11, 0], [0, 0], [13, 0]], device=device)[:, 0]
    windows = torch.randn(7, 150, width, generator=generator).to(device)
    expected = windows.clone()
    owners, to = ([2, 0, 0, 1], [5, 1, 1, 3]) if has_owners else ([0, 1, 2], [0, 1, 2])
    for owner, place in zip(owners, to, strict=True):
        end = int(ends[owner])
        expected[place] = full[owner, :, end : end + width]
    more = [torch.tensor(each, device=device) for each in (owners, to)] if has_owners else []
    kernels.copy_windows(full, ends, windows, *more)
    assert torch.equal(windows, expected)


@pytest.mark.parametrize("width", [1, 3, 4, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_channels", "num_tokens"), [(8, 1), (520, 13), (1024, 29)])
def test_the_inputs_of_a_convolution_begin_with_its_window(
    kernels, device, generator, width, dtype, num_channels, num_tokens
):
    """Inputs are part of a wider projection; windows are rows of live states."""
    window = torch.randn(5, num_channels, width, generator=generator).to(device, dtype)[1:4]
    wider = torch.randn(3, num_tokens, num_channels + 24, generator=generator)
    new = wider.to(device, dtype)[..., 8:-16].mT
    full = kernels.join_window(window, new)
    expected = torch.cat([window.cpu(), new.cpu()], dim=-1)
    assert torch.equal(full.cpu(), expected)
    assert full.stride(1) == 1


@pytest.mark.parametrize("owners", [None, [2, 0, 0, 1]])
@pytest.mark.parametrize("to", [None, [5, 1, 1, 3]])
@pytest.mark.parametrize("size", [7, 3000])
def test_rows_of_every_layer_are_copied(kernels, device, generator, owners, to, size):
    """Sources are parts of wider tensors; the dtype changes; other rows stay unchanged."""
    source = torch.randn(2, 9, size, generator=generator).to(device)[:, :4]
    target = torch.randn(2, 7, size, generator=generator).to(device, torch.float16)
    expected, columns = target.clone(), torch.tensor([[9] * 4] * 2, device=device)
    for number in range(4):
        place = number if to is None else to[number]
        expected[:, place] = source[:, number if owners is None else owners[number]]
    given = {}
    for column, (name, rows) in enumerate({"owners": owners, "to": to}.items()):
        if rows is not None:  # columns of one tensor, as in a batch's rectangle
            columns[column] = torch.tensor(rows, device=device)
            given[name] = columns.t().contiguous()[:, column]
    if given.get("to") is not None and owners is None:
        given["to"], expected = torch.tensor([5, 1, 2, 3], device=device), target.clone()
        expected[:, [5, 1, 2, 3]] = source.to(torch.float16)
    kernels.copy_rows(source, target, **given)
    assert torch.equal(target, expected)
