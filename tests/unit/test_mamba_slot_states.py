"""MambaSlotAllocator: states moved between live rows, slots and the scratch, compared by bits."""

import pytest
import torch
from slot_rig import (
    CONV,
    DTYPES,
    SSM,
    add_live_states,
    live_bits,
    make_allocator,
    make_context,
    randomize,
    slot_bits,
    state_bits,
)

from mamba_cache.cache import ConsumedSlotPolicy
from mamba_cache.errors import InvalidArgumentError, MissingStateError


@pytest.fixture
def context(generator):
    context = make_context()
    add_live_states(context, generator)
    return context


@pytest.fixture
def allocator(context, generator):
    """Four slots full of random bits; blocks 5 and 6 have the slots 3 and 2."""
    allocator = make_allocator(4, context=context, policy=ConsumedSlotPolicy())
    randomize(allocator.conv_states, generator)
    randomize(allocator.ssm_states, generator)
    assert allocator.allocate_slots_batch([6, 5]) == [2, 3]
    return allocator


def all_slots(allocator):
    return [slot_bits(allocator, slot) for slot in range(allocator.max_slots)]


def all_live(context):
    return [live_bits(context, row) for row in range(context.max_requests)]


@pytest.mark.parametrize(
    ("slots", "requests", "message"),
    [([0, 1], [0], "equally long"), ([4], [0], r"slots must be in \[0, 4\), got \[4\]"),
     ([-1], [0], r"got \[-1\]"), ([0], [4], r"requests must be in \[0, 4\)"),
     ([0, 1], [0, 2], r"the rows of live state are \[3, -1\]")],
)  # fmt: skip
def test_bad_saves_are_refused(allocator, context, slots, requests, message):
    context.mamba_metadata.request_to_mamba_state_idx[2] = -1
    before = all_slots(allocator)
    with pytest.raises(InvalidArgumentError, match=message):
        allocator.store_from_live_batch(slots, requests)
    assert all_slots(allocator) == before


def test_the_embedder_may_put_other_live_states_in_place(allocator, context, generator):
    allocator.restore_to_live(0, 5)
    old = all_live(context)
    kept = (context.mamba_conv_states, context.mamba_ssm_states)
    add_live_states(context, generator)
    allocator.restore_to_live(1, 6)
    assert live_bits(context, 2) == slot_bits(allocator, 2)
    assert [state_bits(*kept, row) for row in range(4)] == old
    # In a larger tensor, so that the strides differ too.
    wide = torch.empty(2, 9, *CONV, dtype=DTYPES[0])
    randomize(wide, generator)
    context.mamba_conv_states = wide[:, 2:6]
    allocator.store_from_live_batch([1], [0])
    assert slot_bits(allocator, 1) == live_bits(context, 3)


def test_live_states_may_have_other_memory_in_place(allocator, context, generator):
    allocator.restore_to_live(0, 5)
    context.mamba_conv_states.data = torch.zeros_like(context.mamba_conv_states)
    allocator.restore_to_live(0, 6)
    assert live_bits(context, 3) == slot_bits(allocator, 2)


def test_live_states_may_be_viewed_anew_at_each_look(allocator, context):
    """Copiers, which take long to make, are made once for all views of the same memory."""
    allocator.restore_to_live(0, 5)
    copier = allocator._slots_to_live
    context.mamba_conv_states = context.mamba_conv_states[:]
    allocator.restore_to_live(0, 6)
    assert allocator._slots_to_live is copier
    assert live_bits(context, 3) == slot_bits(allocator, 2)


FITTING = {"block_id": 5, "layer_idx": 0, "ssm_state": torch.ones(SSM)}
FITTING["conv_state"] = torch.ones(CONV).bfloat16()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [({"block_id": 7}, MissingStateError, "no slot"),
     ({"layer_idx": 2}, InvalidArgumentError, r"\[0, 1\], got 2"),
     ({"conv_state": None}, InvalidArgumentError, "tensor .* got NoneType"),
     ({"ssm_state": torch.ones(1)}, InvalidArgumentError, r"got \(\(1,\)"),
     ({"conv_state": torch.ones(CONV)}, InvalidArgumentError, "got .* torch.float32")],
    ids=str,
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(allocator, wrong, error, message):
    before = all_slots(allocator)
    with pytest.raises(error, match=message):
        allocator.store_from_tensors(**FITTING | wrong)
    assert all_slots(allocator) == before
