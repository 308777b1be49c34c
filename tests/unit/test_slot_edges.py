"""Slots at their edges: slot 0, block 0, batches of one, and the second of two calls."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slot_rig import (
    CONV,
    DTYPES,
    SSM,
    add_live_states,
    full,
    make_allocator,
    make_context,
    make_pool,
)

from mamba_cache.cache import ScoreSlotPolicy
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.slots.allocator import check_model
from mamba_cache.slots.megatron_scratch import (
    IntermediateTables,
    checkpoint_alignment,
)
from mamba_cache.states import StateCopier


def test_forgetting_a_hash_that_an_embedder_wrote_leaves_the_blocks_own():
    pool = make_pool(1, 2)
    pool.allocate_slots_batch([1])
    pool.register_block_hashes_batch([1], [5])
    pool.hash_to_block_id[7] = 1
    pool.register_block_hashes_batch([0], [7])
    pool._invalidate_blocks_batch([1])
    assert pool.hash_to_block_id == {7: 0}


@pytest.mark.parametrize("ids", [torch.tensor([True, False]), torch.tensor([[1], [0]])], ids=repr)
def test_tensors_of_other_things_are_no_ids(ids):
    with pytest.raises(InvalidArgumentError, match="must be ints"):
        make_pool(2, 3).allocate_slots_batch(ids)


def test_requests_without_a_row_have_row_minus_one_in_the_error(generator):
    context = make_context()
    add_live_states(context, generator)
    with pytest.raises(InvalidArgumentError, match=r"are \[3, -1\]"):
        make_allocator(context=context).store_from_live_batch([0, 1], [0, 4])


@pytest.mark.parametrize("state", [None, [1.0], "state"], ids=repr)
def test_the_error_names_the_type_of_what_is_no_tensor(state):
    allocator = full()
    with pytest.raises(InvalidArgumentError, match=f"got {type(state).__name__}$"):
        allocator.store_from_tensors(0, 0, state, torch.ones(CONV, dtype=DTYPES[0]))


def test_every_move_of_states_counts(generator):
    context = make_context(max_mamba_intermediate_states_per_step=1)
    add_live_states(context, generator)
    allocator = full(context=context)
    moves = allocator.transfers
    layer = torch.ones(CONV, dtype=DTYPES[0]), torch.ones(SSM, dtype=DTYPES[1])
    counts = [moves.num_calls]
    for move in (
        lambda: moves.store_layer(0, 0, layer),
        lambda: moves.live_to_slots([0], [0]),
        lambda: moves.slots_to_live([0], [0]),
        lambda: moves.scratch_to_slots([0], [0]),
    ):
        move()
        move()
        counts.append(moves.num_calls)
    assert counts == [0, 2, 4, 6, 8]


def test_without_an_ssm_chunk_states_may_be_saved_anywhere():
    assert checkpoint_alignment(SimpleNamespace()) == 1


def test_one_householder_is_one_too_many():
    with pytest.raises(InvalidArgumentError, match="must be 0, got 1"):
        check_model(SimpleNamespace(gdp_num_householder=1))
    with pytest.raises(InvalidArgumentError, match="gdp_num_householder must be 0, got 2"):
        make_allocator().embed(SimpleNamespace(gdp_num_householder=2))


def test_plans_of_copies_are_made_anew_for_other_live_tensors_alone(generator, monkeypatch):
    """On a GPU each would wait in line for memory, and a captured graph would hold an old one."""
    made = []

    class Counted(StateCopier):
        def __init__(self, *states):
            made.append(states)
            super().__init__(*states)

    context = make_context()
    add_live_states(context, generator)
    allocator = full(context=context)
    monkeypatch.setattr("mamba_cache.slots.transfers.StateCopier", Counted)
    for expected in (2, 2, 4):
        if expected == 4:
            add_live_states(context, generator)
        allocator.copy_live_to_slots([0], [0])
        allocator.restore_slots([0], [1])
        assert len(made) == expected


def test_uploading_rows_returns_those_rows_alone():
    tables = IntermediateTables(4, "cpu")
    offsets, counts = tables.upload(1, 1)
    assert (tuple(offsets.shape), tuple(counts.shape)) == ((1, 3), (1,))


def test_scores_that_differ_by_too_little_order_many_slots_as_they_order_few():
    policy = ScoreSlotPolicy()
    policy.reset(40)
    for slot in range(40):
        policy.on_stored([slot], [1])
    policy._clock = 2**40  # long ago: every score rounds to 0
    for count in (1, 16, 17, 40):
        slots = np.arange(40)
        assert policy.choose(count, slots, slots.astype(np.int32), None) == [*range(count)]


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_scores_are_integers(count):
    """Which every rank divides alike."""
    policy = ScoreSlotPolicy()
    policy.reset(40)
    for slot in reversed(range(40)):
        policy.on_stored([slot], [1])
    policy._clock += 100_000
    by_score = sorted(range(40), key=lambda slot: (2**31 // (100_001 + slot), slot))
    slots = np.arange(40)
    assert policy.choose(count, slots, slots.astype(np.int32), None) == by_score[:count]
