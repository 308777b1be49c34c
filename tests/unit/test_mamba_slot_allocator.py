"""MambaSlotAllocator: slots of blocks, and exact copies between slots and live rows."""

from types import SimpleNamespace

import pytest
import torch
from context_rig import make_config
from slot_rig import (
    CONV,
    DTYPES,
    NUM_LAYERS,
    SSM,
    LastUsedPolicy,
    add_live_states,
    bookkeeping,
    full,
    live_bits,
    make_allocator,
    make_context,
    randomize,
    slot_bits,
    state_bits,
)

from mamba_cache import DynamicInferenceContext
from mamba_cache.cache import (
    LruSlotPolicy,
    RefZeroSlotPolicy,
)
from mamba_cache.errors import (
    InvalidArgumentError,
    InvariantError,
    MissingStateError,
    UnknownBlockError,
)
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import StateSpec, StateTensorSpec


def test_an_older_embedder_writes_three_states_for_every_request():
    allocator = make_allocator(max_requests=5)
    assert allocator.max_intermediate_count == 15
    assert allocator.intermediate_conv_out.shape == (NUM_LAYERS, 15, *CONV)
    assert allocator.intermediate_ssm_out.shape == (NUM_LAYERS, 15, *SSM)


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
    given = LastUsedPolicy()
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
    allocator.register_block_hashes_batch([2], [100])  # a hash maps to its last block
    assert (allocator.hash_to_block_id, allocator._hash_of) == ({100: 2}, {2: 100})
    allocator.check_invariants()


def test_hash_ids_are_checked_before_anything_is_registered():
    allocator = full(slots=2)
    before = bookkeeping(allocator)
    for too_large in (2**63, 2**70):
        with pytest.raises(InvalidArgumentError, match=rf"{2**63}\), got \[{too_large}\]"):
            allocator.register_block_hashes_batch([0, 1], [1, too_large])
    with pytest.raises(InvalidArgumentError, match="equally long"):
        allocator.register_block_hashes_batch([0], [1, 2])
    with pytest.raises(InvalidArgumentError, match="hashes must be ints"):
        allocator.on_kv_blocks_deregistered([0], ["101"])
    with pytest.raises(UnknownBlockError):
        allocator.on_kv_blocks_deregistered([0, 12], [101])
    allocator.register_block_hashes_batch([1], [-(2**63)])  # not a hash
    assert bookkeeping(allocator) == before


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
    """Older embedders name the pool size ``total_count``."""
    kv_blocks = SimpleNamespace(total_count=4)
    context = SimpleNamespace(device="cpu", max_requests=1, kv_block_allocator=kv_blocks)
    allocator = make_allocator(2, context=context)
    assert allocator.block_to_slot.shape == (4,)
    assert allocator.reserve_slots([0, 1]) != [None, None]


@pytest.fixture
def context(generator):
    context = make_context()
    add_live_states(context, generator)
    return context


@pytest.fixture
def allocator(context, generator):
    """Return an allocator with four slots of random bits; blocks 5 and 6 have slots 3 and 2."""
    allocator = make_allocator(4, context=context, policy=LastUsedPolicy())
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
    # Inside a larger tensor, so that the strides differ too.
    wide = torch.empty(2, 9, *CONV, dtype=DTYPES[0])
    randomize(wide, generator)
    context.mamba_conv_states = wide[:, 2:6]
    allocator.store_from_live_batch([1], [0])
    assert slot_bits(allocator, 1) == live_bits(context, 3)
    # Or other memory in the same tensor.
    context.mamba_conv_states.data = torch.zeros_like(context.mamba_conv_states)
    allocator.restore_to_live(0, 6)
    assert live_bits(context, 3) == slot_bits(allocator, 2)


def test_live_states_may_be_viewed_anew_at_each_look(allocator, context):
    """Copiers are slow to make, so all views of the same memory share one."""
    allocator.restore_to_live(0, 5)
    copier = allocator._slots_to_live
    context.mamba_conv_states = context.mamba_conv_states[:]
    allocator.restore_to_live(0, 6)
    assert allocator._slots_to_live is copier
    assert live_bits(context, 3) == slot_bits(allocator, 2)


def test_states_of_other_names_than_mambas_are_saved_and_restored(generator):
    kinds = (("delta", (3, 4)), ("window", (2,)))
    tensors = tuple(StateTensorSpec(n, 2, shape, torch.float32) for n, shape in kinds)
    context = DynamicInferenceContext(make_config(max_slots=2), StateSpec(tensors), device="cpu")
    slots, live = context.slot_allocator, context.live_states.tensors
    for name, _ in kinds:
        live[name].copy_(torch.randn(live[name].shape, generator=generator))
    slots.live_to_slots([0], [1])
    slots.restore_slots([1], [2])
    for name, _ in kinds:
        assert torch.equal(live[name][:, 2], live[name][:, 0])
        assert torch.equal(slots.states.tensors[name][:, 1], live[name][:, 0])


FITTING = {
    "block_id": 5,
    "layer_idx": 0,
    "ssm_state": torch.ones(SSM),
    "conv_state": torch.ones(CONV).bfloat16(),
}


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
