"""Checkpoint states taken inside prefill chunks, against a loop over the checkpoints."""

import pytest
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import extract_checkpoint_states

CONV_DIM, WIDTH = 6, 4
SSM = (2, 3, 5)
FIELDS = ("chunks", "conv_ends", "seq_starts", "rows", "slots")


@pytest.fixture
def layer(generator, device):
    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    return {
        "slot_conv": draw(5, CONV_DIM, WIDTH),
        "slot_ssm": draw(5, *SSM),
        "live_conv": draw(7, CONV_DIM, WIDTH),
        "chunk_states": draw(9, *SSM),
        "conv_input": draw(40, CONV_DIM),
    }


def fields(checkpoints, device, dtype=torch.int32):
    """One tensor a field of StepMetadata, from (chunk, conv end, seq start, row, slot) each."""
    table = torch.tensor(checkpoints, dtype=dtype, device=device).reshape(-1, len(FIELDS)).T
    columns = table.contiguous()
    return {f"checkpoint_{name}": column for name, column in zip(FIELDS, columns, strict=True)}


def check_extract(layer, checkpoints, device, backend, dtype=torch.int32):
    given = {name: tensor for name, tensor in layer.items() if tensor is not None}
    before = {name: tensor.clone() for name, tensor in given.items()}
    expected = {name: tensor.clone() for name, tensor in given.items()}
    for chunk, end, start, row, slot in checkpoints:
        if slot >= 0 and "slot_ssm" in given:
            expected["slot_ssm"][slot] = before["chunk_states"][chunk]
        if slot >= 0 and "slot_conv" in given:
            inputs = torch.cat([before["live_conv"][row].T, before["conv_input"][start:end]])
            expected["slot_conv"][slot] = inputs[-WIDTH:].T
    extract_checkpoint_states(**layer, **fields(checkpoints, device, dtype), backend=backend)
    for name, tensor in given.items():
        assert torch.equal(tensor, expected[name]), name


PADDING = (-1, -1, -1, -1, -1)


@pytest.mark.parametrize("empty", ["conv_input", "chunk_states", "slots"])
def test_padding_where_there_is_nothing_to_read_or_write(layer, device, backend, empty):
    names = ("slot_conv", "slot_ssm") if empty == "slots" else (empty,)
    for name in names:
        layer[name] = layer[name][:0]
    check_extract(layer, [PADDING, PADDING], device, backend)


def test_slots_may_be_one_layer_of_a_pool(layer, device, backend, generator):
    pool = torch.randn(3, 5, *SSM, generator=generator).to(device)
    layer["slot_ssm"] = pool[1]
    others = pool[[0, 2]].clone()
    check_extract(layer, [(3, 20, 8, 2, 4)], device, backend)
    assert torch.equal(pool[[0, 2]], others)


@pytest.mark.parametrize("name", ["slot_ssm", "slot_conv", "live_conv", "conv_input"])
def test_pool_of_another_dtype_than_the_kernels_is_refused(layer, device, backend, name):
    before = {name: tensor.clone() for name, tensor in layer.items()}
    rounded = {**layer, name: layer[name].bfloat16()}
    with pytest.raises(InvalidArgumentError, match="must be"):
        extract_checkpoint_states(**rounded, **fields([(3, 20, 8, 2, 4)], device), backend=backend)
    assert all(torch.equal(layer[name], before[name]) for name in layer)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("slot_ssm", (4, *SSM)),
        ("chunk_states", (9, 2, 3, 4)),
        ("conv_input", (40, CONV_DIM + 1)),
        ("live_conv", (7, CONV_DIM, WIDTH - 1)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(layer, device, backend, name, shape):
    layer[name] = torch.ones(shape, device=device)
    with pytest.raises(InvalidArgumentError, match="must"):
        extract_checkpoint_states(**layer, **fields([(3, 20, 8, 2, 3)], device), backend=backend)


@pytest.mark.parametrize(
    "absent",
    [
        ("slot_conv",),
        ("live_conv",),
        ("conv_input",),
        ("slot_ssm",),
        ("chunk_states",),
        ("slot_conv", "live_conv", "conv_input", "slot_ssm", "chunk_states"),
    ],
)
def test_windows_and_states_are_given_whole_or_not_at_all(layer, device, absent):
    given = {name: None if name in absent else tensor for name, tensor in layer.items()}
    with pytest.raises(InvalidArgumentError, match="give slot_conv, live_conv and conv_input"):
        extract_checkpoint_states(**given, **fields([(3, 20, 8, 2, 4)], device))


def test_states_in_quantised_slots_have_three_axes(layer, device):
    layer["slot_ssm"] = torch.zeros(5, 6, 5, dtype=torch.int8, device=device)
    layer["chunk_states"] = torch.zeros(9, 6, 5, device=device)
    scales = torch.zeros(5, 6, 5, device=device)
    with pytest.raises(InvalidArgumentError, match=r"must be \[heads, head_dim, state_dim\]"):
        extract_checkpoint_states(
            **layer,
            **fields([(3, 20, 8, 2, 4)], device),
            slot_scales=scales,
        )
