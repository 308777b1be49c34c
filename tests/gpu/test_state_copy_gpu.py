"""State copies on a GPU: real sizes, no waiting for the device, and replay from a CUDA graph."""

import pytest
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import (
    PAD_SLOT_ID,
    ZERO_SOURCE,
    StateCopier,
    StatePool,
    StateSpec,
    extract_checkpoint_states,
)

pytestmark = pytest.mark.gpu

SPEC = StateSpec.mamba(24, (1024, 4), (16, 64, 128), torch.bfloat16, torch.float32)


@pytest.fixture
def pools():
    pools = StatePool(SPEC, 6, device="cuda"), StatePool(SPEC, 9, device="cuda")
    for pool in pools:
        for tensor in pool.tensors.values():
            tensor.view(torch.uint8).random_(0, 256)
    return [list(pool.tensors.values()) for pool in pools]


@pytest.fixture
def no_waiting():
    """Any wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def device_rows(rows, dtype=torch.int32):
    return torch.tensor(rows, dtype=dtype, device="cuda")


def expected_copy(sources, destinations, source_rows, destination_rows):
    expected = [tensor.clone() for tensor in destinations]
    for source, destination in zip(source_rows, destination_rows, strict=True):
        for read, write in zip(sources, expected, strict=True):
            if PAD_SLOT_ID not in (source, destination):
                write[:, destination] = 0 if source == ZERO_SOURCE else read[:, source]
    return expected


def assert_same_bits(tensors, expected):
    for tensor, want in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8), want.view(torch.uint8))


ROWS = [5, 0, PAD_SLOT_ID, ZERO_SOURCE, 2, 0], [8, 1, 2, 3, PAD_SLOT_ID, 7]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_on_the_device(pools, dtype):
    expected = expected_copy(*pools, *ROWS)
    StateCopier(*pools).copy(*(device_rows(rows, dtype) for rows in ROWS))
    assert_same_bits(pools[1], expected)


def test_neither_kind_of_rows_waits_for_the_device(pools, request):
    expected = expected_copy(*pools, *ROWS)
    copier = StateCopier(*pools)
    on_device = [device_rows(rows) for rows in ROWS]
    copier.copy(*ROWS)
    request.getfixturevalue("no_waiting")
    copier.copy(*ROWS)
    copier.copy(*on_device)
    torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(pools[1], expected)


def test_graph_replays_with_fewer_rows(pools):
    """Padded rows are -1: a replay with fewer rows must not repeat those of the capture."""
    copier = StateCopier(*pools)
    rows = [device_rows([0, 1, 2, 3]), device_rows([0, 1, 2, 3])]
    copier.copy(*rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copier.copy(*rows)
    replayed = [5, PAD_SLOT_ID, PAD_SLOT_ID, PAD_SLOT_ID], [8, *[PAD_SLOT_ID] * 3]
    for tensor, values in zip(rows, replayed, strict=True):
        tensor.copy_(torch.tensor(values))
    for tensor in pools[1]:
        tensor.view(torch.uint8).random_(0, 256)
    expected = expected_copy(*pools, *replayed)
    graph.replay()
    assert_same_bits(pools[1], expected)


def test_pool_of_more_than_2_gib():
    pool = torch.randint(0, 256, (1, 40, 2**26 + 16), dtype=torch.uint8, device="cuda")
    expected = pool[:, 39].clone()
    StateCopier([pool], [pool]).copy([39], [0])
    assert torch.equal(pool[:, 0], expected)
    StateCopier([pool], [pool]).copy([ZERO_SOURCE], [38])
    assert pool[:, 38].count_nonzero() == 0
    assert torch.equal(pool[:, 39], expected)


def test_rows_on_both_host_and_device_are_refused(pools):
    copier = StateCopier(*pools)
    with pytest.raises(InvalidArgumentError, match="both on the host or both on cuda"):
        copier.copy([0], device_rows([1]))
    with pytest.raises(InvalidArgumentError, match="both on the host or both on cuda"):
        copier.copy(device_rows([1]), [0])


@pytest.mark.parametrize(
    ("shape", "step", "dtype"),
    [
        ((2,), 1, torch.float32),
        ((2,), 1, torch.int16),
        ((2, 2), 1, torch.int32),
        ((4,), 2, torch.int32),
    ],
)
def test_bad_rows_on_the_device(pools, shape, step, dtype):
    rows = torch.zeros(shape, dtype=dtype, device="cuda")[::step]
    with pytest.raises(InvalidArgumentError, match="contiguous, 1-D, and int32 or int64"):
        StateCopier(*pools).copy(rows, rows)


def test_different_lengths_on_the_device(pools):
    with pytest.raises(InvalidArgumentError, match="equally many, got 1 and 2"):
        StateCopier(*pools).copy(device_rows([0]), device_rows([1, 2]))


def test_extraction_does_not_wait_for_the_device(request):
    slots = torch.rand(5, 6, 4, device="cuda"), torch.rand(5, 2, 3, 5, device="cuda")
    live, states = torch.rand(7, 6, 4, device="cuda"), torch.rand(9, 2, 3, 5, device="cuda")
    fields = {
        "checkpoint_chunks": device_rows([3, -1]),
        "checkpoint_conv_ends": device_rows([20, -1]),
        "checkpoint_seq_starts": device_rows([8, -1]),
        "checkpoint_rows": device_rows([2, -1]),
        "checkpoint_slots": device_rows([4, -1]),
    }
    inputs = torch.rand(40, 6, device="cuda")
    request.getfixturevalue("no_waiting")
    extract_checkpoint_states(*slots, live, states, inputs, **fields)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(slots[0][4], inputs[16:20].T)
    assert torch.equal(slots[1][4], states[3])
