"""What fuzzing found, by name."""

import numpy as np
import pytest
import torch
from context_rig import BLOCK, add, make_context

from mamba_cache._checks import as_ints, as_items, check_int
from mamba_cache.errors import InvalidArgumentError


@pytest.mark.parametrize("positions", [np.array(3), torch.tensor(3), 7])
def test_what_has_no_items_is_no_collection(positions):
    with pytest.raises(InvalidArgumentError, match="decode_ids must be a collection"):
        make_context().begin_step(positions)


@pytest.mark.parametrize("flag", [1, None, "no", np.ones(2)])
def test_keeping_the_cache_is_a_yes_or_a_no(flag):
    """``reset(preserve_prefix_cache="no")`` kept it."""
    context = make_context()
    add(context, "x", [1] * BLOCK)
    with pytest.raises(InvalidArgumentError, match="must be a bool"):
        context.reset(preserve_prefix_cache=flag)
    assert context.status("x")


class Short:
    """Whatever is asked of it, memory is short."""

    def tolist(self):
        raise torch.OutOfMemoryError

    __index__ = __iter__ = tolist


@pytest.mark.parametrize(
    "read",
    [
        lambda value: check_int("x", value),
        lambda value: as_ints("x", value),
        lambda value: as_ints("x", [value]),
        lambda value: as_items("x", value, "ints"),
    ],
)
def test_shortage_of_memory_is_no_bad_argument(read):
    """PyTorch's is a RuntimeError, as are its complaints about tensors that cannot be read."""
    with pytest.raises(torch.OutOfMemoryError):
        read(Short())


def test_a_commit_short_of_memory_leaves_the_step_in_flight():
    context = make_context()
    add(context, "x", [1] * BLOCK)
    context.begin_step()
    with pytest.raises(torch.OutOfMemoryError):
        context.commit_step({"x": Short()})
    context.commit_step({"x": 1})
    context.check_invariants()
