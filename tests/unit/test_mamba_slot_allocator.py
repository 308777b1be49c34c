"""MambaSlotAllocator: slots of blocks, as an embedder asks for them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slot_rig import (
    CONV,
    NUM_LAYERS,
    SSM,
    books,
    full,
    make_allocator,
    make_context,
)

from mamba_cache.cache import (
    ConsumedSlotPolicy,
    LruSlotPolicy,
    RefZeroSlotPolicy,
)
from mamba_cache.errors import (
    InvalidArgumentError,
    InvariantError,
    MambaSlotCapacityError,
    UnknownBlockError,
)
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import StateSpec, StateTensorSpec


def test_an_older_embedder_writes_three_states_for_every_request():
    allocator = make_allocator(max_requests=5)
    assert allocator.max_intermediate_count == 15
    assert allocator.intermediate_conv_out.shape == (NUM_LAYERS, 15, *CONV)
    assert allocator.intermediate_ssm_out.shape == (NUM_LAYERS, 15, *SSM)


def test_older_embedders_call_the_pool_size_total_count():
    context = make_context(num_blocks=9)
    context.kv_block_allocator.total_count = context.kv_block_allocator.pool_size
    del context.kv_block_allocator.pool_size
    assert make_allocator(context=context).block_to_slot.shape == (9,)


def test_the_device_is_torchs_current_one_unless_the_context_has_its_own(monkeypatch):
    context = make_context()
    del context.device
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    assert make_allocator(context=context).ssm_states.device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("must not be asked"))
    assert make_allocator().conv_states.device.type == "cpu"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gdp_num_householder": 2}, "gdp_num_householder must be 0, got 2"),
        (
            {"ssm_chunk_alignment": 192, "mamba_chunk_size": 128},
            r"multiple of mamba_chunk_size \(128\), got 192",
        ),
        ({"prefix_caching_eviction_policy": "fifo"}, "one of .*'lru'.*, got 'fifo'"),
        ({"max_mamba_intermediate_states_per_step": -1}, "num_rows must be"),
    ],
)
def test_contexts_that_cannot_be_served(fields, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make_allocator(**fields)


@pytest.mark.parametrize(
    ("name", "kind"), [("lru", LruSlotPolicy), ("ref_zero", RefZeroSlotPolicy)]
)
def test_the_context_names_the_policy_unless_one_is_given(name, kind):
    assert type(make_allocator(prefix_caching_eviction_policy=name).policy) is kind
    given = ConsumedSlotPolicy()
    assert make_allocator(policy=given, prefix_caching_eviction_policy=name).policy is given


def test_from_spec_takes_states_of_any_kinds():
    spec = StateSpec((StateTensorSpec("wkv", 3, SSM, torch.float32),))
    made = MambaSlotAllocator.from_spec(make_context(), 3, spec)
    assert made.states["wkv"].shape == (3, 3, *SSM)
    assert made.conv_states is made.ssm_states is made.ssm_scales is None
    assert made.intermediate_conv_out is made.intermediate_ssm_out is None
    assert (made.num_mamba_layers, made.max_intermediate_count) == (3, 0)


def test_calls_for_conv_and_ssm_states_refuse_other_kinds():
    spec = StateSpec((StateTensorSpec("wkv", 2, SSM, torch.float32),))
    with pytest.raises(InvalidArgumentError, match="a scratch holds conv and SSM states"):
        MambaSlotAllocator.from_spec(
            make_context(max_mamba_intermediate_states_per_step=6), 3, spec
        )
    made = MambaSlotAllocator.from_spec(make_context(), 3, spec)
    made.allocate_slots_batch([1])
    state = torch.zeros(SSM)
    with pytest.raises(InvalidArgumentError, match="takes conv and SSM states"):
        made.store_from_tensors(1, 0, state, state)
    with pytest.raises(InvalidArgumentError, match="spec"):
        MambaSlotAllocator.from_spec(make_context(), 3, [spec])
    odd = StateSpec((*spec.tensors, StateTensorSpec("odd", 5, SSM, torch.float32)))
    with pytest.raises(InvalidArgumentError, match="equally many layers"):
        MambaSlotAllocator.from_spec(make_context(), 3, odd)


@pytest.mark.parametrize("make", [list, set, tuple, np.array, torch.tensor])
def test_block_ids_come_in_any_container(make):
    allocator = full()
    assert allocator.allocate_slots_batch(make([2])) == [allocator.get_slot(2)]
    allocator.on_kv_blocks_deregistered(make([2, 3]), make([100]))
    assert allocator.hash_to_block_id == {101: 1}
    allocator.check_invariants()


def test_a_block_may_have_a_hash_before_it_has_a_slot():
    allocator = full(slots=2)
    allocator.register_block_hashes_batch([7], [10])
    allocator.check_invariants()
    assert allocator.hash_to_block_id == {100: 0, 101: 1, 10: 7}
    allocator.allocate_slots_batch([7])
    allocator._invalidate_blocks_batch([7])
    assert (allocator.hash_to_block_id, allocator._hash_of) == ({101: 1}, {1: 101})


def test_hashes_that_an_embedder_writes_or_drops_are_the_truth():
    allocator = full(slots=3)
    del allocator.hash_to_block_id[100]
    allocator.register_block_hashes_batch([0], [100])
    allocator.hash_to_block_id[8] = 1
    allocator.register_block_hashes_batch([2], [8])
    assert allocator.hash_to_block_id == {100: 0, 101: 1, 8: 2}
    allocator.check_invariants()
    allocator._invalidate_blocks_batch([1])
    assert allocator.hash_to_block_id == {100: 0, 8: 2}
    allocator.register_block_hashes_batch([2], [100])  # which finds the last block
    assert (allocator.hash_to_block_id, allocator._hash_of) == ({100: 2}, {2: 100})
    allocator.check_invariants()


def test_hash_ids_are_checked_before_anything_is_registered():
    allocator = full(slots=2)
    before = books(allocator)
    for too_large in (2**63, 2**70):
        with pytest.raises(InvalidArgumentError, match=rf"{2**63}\), got \[{too_large}\]"):
            allocator.register_block_hashes_batch([0, 1], [1, too_large])
    with pytest.raises(InvalidArgumentError, match="equally long"):
        allocator.register_block_hashes_batch([0], [1, 2])
    with pytest.raises(InvalidArgumentError, match="hashes must be ints"):
        allocator.on_kv_blocks_deregistered([0], ["101"])
    with pytest.raises(UnknownBlockError):
        allocator.on_kv_blocks_deregistered([0, 12], [101])
    allocator.register_block_hashes_batch([1], [-(2**63)])  # none
    assert books(allocator) == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: a.hash_to_block_id.update({5: 7}), "hash 5 finds block 7, which lost its slot"),
        (lambda a: a._hash_of.update({0: 101}), "block 0 .* hash 101, which finds another"),
    ],
)
def test_check_invariants_finds_hashes_that_contradict_each_other(spoil, message):
    allocator = full(slots=2)
    allocator.check_invariants()
    spoil(allocator)
    with pytest.raises(InvariantError, match=message):
        allocator.check_invariants()


def test_kv_arrays_may_be_numpy():
    allocator = full()
    kv_blocks = allocator.context.kv_block_allocator
    for name in ("block_ref_counts", "block_timestamps", "block_hashes"):
        setattr(kv_blocks, name, getattr(kv_blocks, name).numpy())
    kv_blocks.block_ref_counts[0] = 1
    allocator.allocate_slots_batch([8])
    assert not allocator.has_state(1)


def test_eviction_may_be_limited_to_candidates():
    allocator = full()
    slot = allocator.get_slot(2)
    assert allocator._evict_lru_slots_batch(1, torch.tensor([3, 2])) == [slot]
    with pytest.raises(MambaSlotCapacityError):
        allocator._evict_lru_slots_batch(2, [3])
    assert allocator.has_state(3)


@pytest.mark.parametrize("gone", [([], [700]), ([7], [700]), ([7], [])])
def test_deregistration_drops_hashes_of_blocks_without_a_slot(gone):
    allocator = full()
    before = dict(allocator._hash_of)
    allocator.register_block_hashes_batch([7], [700])
    allocator.check_invariants()
    allocator.on_kv_blocks_deregistered(*gone)
    assert 700 not in allocator.hash_to_block_id
    assert allocator._hash_of == before
    allocator.allocate_slots_batch([7])
    assert 7 not in allocator.hash_to_block_id.values()
    allocator.check_invariants()


def test_a_minimal_namespace_can_embed_it():
    kv_blocks = SimpleNamespace(pool_size=4)
    context = SimpleNamespace(device="cpu", max_requests=1, kv_block_allocator=kv_blocks)
    allocator = make_allocator(2, context=context)
    assert allocator.reserve_slots([0, 1]) != [None, None]
