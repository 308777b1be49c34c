"""State copies on a GPU: real sizes, no waiting for the device, and replay from a CUDA graph."""

import pytest
import torch
from gpu_rig import BUSY_CYCLES, assert_same_bits, random_bits_

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.states import (
    PAD_SLOT_ID,
    ZERO_SOURCE,
    StateCopier,
    StatePool,
    StateSpec,
)

pytestmark = pytest.mark.gpu

SPEC = StateSpec.mamba(24, (1024, 4), (16, 64, 128), torch.bfloat16, torch.float32)


@pytest.fixture
def pools():
    pools = StatePool(SPEC, 6, device="cuda"), StatePool(SPEC, 9, device="cuda")
    for pool in pools:
        for tensor in pool.tensors.values():
            random_bits_(tensor)
    return [list(pool.tensors.values()) for pool in pools]


def device_rows(rows, dtype=torch.int32):
    return torch.tensor(rows, dtype=dtype, device="cuda")


def expected_copy(sources, destinations, source_rows, destination_rows):
    expected = [tensor.clone() for tensor in destinations]
    for source, destination in zip(source_rows, destination_rows, strict=True):
        for read, write in zip(sources, expected, strict=True):
            if PAD_SLOT_ID not in (source, destination):
                write[:, destination] = 0 if source == ZERO_SOURCE else read[:, source]
    return expected


def assert_all_same_bits(tensors, expected):
    for tensor, want in zip(tensors, expected, strict=True):
        assert_same_bits(tensor, want)


ROWS = [5, 0, PAD_SLOT_ID, ZERO_SOURCE, 2, 0], [8, 1, 2, 3, PAD_SLOT_ID, 7]


def test_neither_kind_of_rows_waits_for_the_device(pools, request):
    expected = expected_copy(*pools, *ROWS)
    copier = StateCopier(*pools)
    on_device = [device_rows(rows) for rows in ROWS]
    copier.copy(*ROWS)
    request.getfixturevalue("no_waiting")
    copier.copy(*ROWS)
    copier.copy(*on_device)
    torch.cuda.set_sync_debug_mode("default")
    assert_all_same_bits(pools[1], expected)


def test_host_far_ahead_of_the_device_overwrites_no_rows(pools):
    """More calls are queued than there are buffers for rows."""
    copier = StateCopier(*pools)
    copier.copy([0], [0])
    expected = [tensor.clone() for tensor in pools[1]]
    torch.cuda._sleep(BUSY_CYCLES)
    for call in range(40):
        source, destination = call % 6, call * 5 % 9
        copier.copy([source], [destination])
        for read, write in zip(pools[0], expected, strict=True):
            write[:, destination] = read[:, source]
    assert_all_same_bits(pools[1], expected)


def test_rows_on_the_host_are_not_captured(pools):
    copier = StateCopier(*pools)
    copier.copy([0], [0])
    before = [tensor.clone() for tensor in pools[1]]
    padding = device_rows([PAD_SLOT_ID])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        copier.copy(padding, padding)  # PyTorch warns of empty graphs
        with pytest.raises(InvalidArgumentError, match="cannot be captured in a CUDA graph"):
            copier.copy([1], [1])
    assert_all_same_bits(pools[1], before)


def test_rows_on_the_device_that_do_not_fit_are_refused(pools):
    copier, rows = StateCopier(*pools), device_rows([0])
    for sources, destinations, message in (
        ([0], rows, "must both be on the host or both on cuda"),
        (rows, [0], "must both be on the host or both on cuda"),
        (rows, device_rows([1, 2]), "equally many, got 1 and 2"),
        *[
            (bad, bad, "contiguous, 1-D and int32 or int64")
            for bad in (rows.float(), rows.short(), rows[None], device_rows([0] * 4)[::2])
        ],
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            copier.copy(sources, destinations)
