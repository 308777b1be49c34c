"""The pool of state tensors."""

from functools import partial

import pytest
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import HybridModel
from mamba_cache.states import StatePool, StateSpec

SPEC = StateSpec.mamba(3, (10, 4), (2, 5, 7), torch.bfloat16, torch.float32)


@pytest.fixture
def pool(generator):
    pool = StatePool(SPEC, 6, device="cpu")
    for tensor in pool.tensors.values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 1)
    return pool


def test_tensors_have_a_row_for_each_state():
    pool = StatePool(SPEC, 6, device="cpu")
    assert {name: (t.shape, t.dtype) for name, t in pool.tensors.items()} == {
        "conv": ((3, 6, 10, 4), torch.bfloat16),
        "ssm": ((3, 6, 2, 5, 7), torch.float32),
    }
    assert (pool.num_rows, pool.spec, pool.device) == (6, SPEC, torch.device("cpu"))
    assert all(tensor.count_nonzero() == 0 for tensor in pool.tensors.values())
    assert sum(t.nbytes for t in pool.tensors.values()) == 6 * SPEC.bytes_per_slot


def test_tensors_are_found_by_name_and_zeroed_in_place(pool):
    assert pool["conv"] is pool.tensors["conv"]
    with pytest.raises(InvalidArgumentError, match=r"\['conv', 'ssm'\], got 'kv'"):
        pool["kv"]
    addresses = [tensor.data_ptr() for tensor in pool.tensors.values()]
    pool.zero_()
    assert addresses == [tensor.data_ptr() for tensor in pool.tensors.values()]
    assert all(tensor.count_nonzero() == 0 for tensor in pool.tensors.values())


@pytest.mark.parametrize("num_rows", [-1, 1.0, True, None])
def test_bad_num_rows(num_rows):
    assert StatePool(SPEC, 0, device="cpu")["ssm"].shape == (3, 0, 2, 5, 7)
    with pytest.raises(InvalidArgumentError, match=r"num_rows must be an int in \[0, "):
        StatePool(SPEC, num_rows, device="cpu")


@pytest.mark.parametrize(("built", "why"), [(None, "built without CUDA"), ("13.0", "finds no GPU")])
def test_the_error_of_a_missing_gpu_names_the_remedy(monkeypatch, built, why):
    """Regression: PyTorch's AssertionError was raised."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    for make in (partial(StatePool, SPEC, 6), HybridModel):
        with pytest.raises(InvalidArgumentError, match=rf"'cuda:1' cannot be used: .*{why}; use"):
            make(device="cuda:1")
