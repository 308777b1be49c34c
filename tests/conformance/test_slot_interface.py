"""The interface of slots, rule by rule, for both kinds of embedders: who has which slot."""

import inspect

import pytest
import torch
from conformance_rig import (
    CONTEXTS,
    CONV,
    DTYPES,
    LAYERS,
    MAX_REQUESTS,
    NUM_BLOCKS,
    SCRATCH,
    SSM,
    PrefixCachingEvictionPolicy,
    fill,
    make_allocator,
)
from fingerprints import fingerprint

from mamba_cache import MambaSlotAllocator
from mamba_cache.errors import MambaSlotCapacityError
from mamba_cache.slots import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST

LRU, REF_ZERO = PrefixCachingEvictionPolicy

METHODS = {
    "__init__": "context max_slots num_mamba_layers conv_states_shape ssm_states_shape "
    "conv_states_dtype ssm_states_dtype",
    "allocate_slots_batch": "block_ids",
    "get_slot": "block_id",
    "has_state": "block_id",
    "invalidate_block": "block_id",
    "_invalidate_blocks_batch": "block_ids",
    "on_kv_blocks_deregistered": "block_ids hashes_to_delete",
    "store_from_tensors": "block_id layer_idx ssm_state conv_state",
    "store_from_live_batch": "slots request_indices",
    "restore_to_live": "request_idx block_id",
    "register_block_hashes_batch": "block_ids hashes",
    "compute_and_store_offsets": "req current_id skip_tokens prefill_chunk_length "
    "num_matched_blocks matched_block_ids overall_required_blocks",
    "get_intermediate_gpu_data": "",
    "get_intermediate_cpu_data": "",
    "transfer_intermediate_to_gpu": "prefill_start prefill_count",
    "commit_intermediate_states": "",
    "_collect_commit_data": "",
    "_copy_intermediate_to_cache": "src_offsets slots",
    "_clear_intermediate_state": "",
    "reset": "",
}

ATTRIBUTES = {
    "free_slots": ((6,), torch.int32),
    "block_to_slot": ((NUM_BLOCKS,), torch.int32),
    "slot_to_block": ((6,), torch.int32),
    "conv_states": ((LAYERS, 6, *CONV), DTYPES[0]),
    "ssm_states": ((LAYERS, 6, *SSM), DTYPES[1]),
    "intermediate_conv_out": ((LAYERS, SCRATCH, *CONV), DTYPES[0]),
    "intermediate_ssm_out": ((LAYERS, SCRATCH, *SSM), DTYPES[1]),
    "_intermediate_offsets_cpu": ((MAX_REQUESTS, 3), torch.int32),
    "_intermediate_counts_cpu": ((MAX_REQUESTS,), torch.int32),
    "_intermediate_block_ids_cpu": ((MAX_REQUESTS, 3), torch.int32),
    "_eos_cache_block_id_cpu": ((MAX_REQUESTS,), torch.int32),
}


@pytest.fixture(params=CONTEXTS)
def make_context(request, generator):
    def make(policy=LRU):
        context = CONTEXTS[request.param](policy)
        fill(context, generator)
        return context

    return make


@pytest.fixture
def context(make_context):
    return make_context()


@pytest.fixture
def allocator(context, generator):
    return make_allocator(context, generator)


@pytest.fixture
def full(context, generator):
    """Blocks 10 to 15 have the slots, 10 the least recently used, with hashes 1011 to 1016."""
    return filled(context, generator)


def filled(context, generator):
    allocator = make_allocator(context, generator)
    allocator.allocate_slots_batch(range(10, 16))
    allocator.register_block_hashes_batch(range(10, 16), range(1011, 1017))
    context.kv_block_allocator.block_timestamps += 200
    context.kv_block_allocator.block_timestamps[10:16] = torch.arange(100, 106)
    return allocator


def cached(allocator):
    return [block for block in range(NUM_BLOCKS) if allocator.has_state(block)]


@pytest.mark.parametrize(("name", "parameters"), METHODS.items())
def test_methods_take_what_embedders_give(name, parameters):
    _self, *taken = inspect.signature(getattr(MambaSlotAllocator, name)).parameters.values()
    by_position = [p.name for p in taken if p.kind is not p.KEYWORD_ONLY]
    assert by_position == parameters.split()
    assert all(p.default is not p.empty for p in taken if p.kind is p.KEYWORD_ONLY)


def test_a_shortage_is_told_as_embedders_expect():
    error = MambaSlotCapacityError(required=4, available=2)
    assert isinstance(error, RuntimeError)
    assert str(error).endswith("only 2 free or evictable slots are available")


def test_attributes(allocator, context):
    for name, kind in ATTRIBUTES.items():
        tensor = getattr(allocator, name)
        assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (*kind, "cpu"), name
    assert (allocator.context, allocator.max_slots) == (context, 6)
    assert (allocator.num_mamba_layers, allocator.max_intermediate_count) == (LAYERS, SCRATCH)
    assert (allocator.free_count, allocator.hash_to_block_id) == (6, {})
    assert allocator._has_intermediates is False
    assert MAX_INTERMEDIATE_OFFSETS_PER_REQUEST == 3
    for name in ("block_to_slot", "slot_to_block", "_intermediate_block_ids_cpu"):
        assert (getattr(allocator, name) == -1).all(), name
    assert (allocator._eos_cache_block_id_cpu == -1).all()


def test_types_of_what_is_returned(full):
    assert type(full.allocate_slots_batch([3, 10])) is list
    assert type(full.get_slot(3)) is int
    assert (full.has_state(3), full.has_state(9)) == (True, False)
    assert full.restore_to_live(0, 9) is False
    assert full.restore_to_live(0, 3) is True
    assert full.get_intermediate_gpu_data() == (None, None)
    assert full.transfer_intermediate_to_gpu(2, 0) == (None, None)
    assert type(full._evict_lru_slots_batch(1)) is list


def test_slots_are_given_in_order_and_kept_and_shared(allocator):
    [kept] = allocator.allocate_slots_batch([20])
    slots = allocator.allocate_slots_batch([30, 20, 30, 25])
    assert slots == [allocator.get_slot(block) for block in (30, 20, 30, 25)]
    assert slots[1] == kept
    assert len(set(slots)) == 3
    assert allocator.free_count == 3
    assert sorted([*allocator.free_slots[:3].tolist(), *set(slots)]) == list(range(6))
    assert allocator.allocate_slots_batch([]) == []


def test_free_slots_go_before_evicted_ones(full):
    full.invalidate_block(15)
    full.allocate_slots_batch([30])
    assert cached(full) == [10, 11, 12, 13, 14, 30]
    full.allocate_slots_batch([31])
    assert cached(full) == [11, 12, 13, 14, 30, 31]
    assert full.evicted_slots_total == 1


def test_lru_reads_timestamps_as_they_are_at_the_call(full, context):
    times = context.kv_block_allocator.block_timestamps
    times[10], times[13] = 500, -1
    full.allocate_slots_batch([30])
    assert 13 not in cached(full)
    times[10], times[30] = -2, 600
    full.allocate_slots_batch([31])
    assert 10 not in cached(full)


def test_ref_counts_are_read_as_they_are_at_the_call(full, context):
    counts = context.kv_block_allocator.block_ref_counts
    counts[10:15] = 1
    full.allocate_slots_batch([30])
    assert cached(full) == [10, 11, 12, 13, 14, 30]
    counts[10:15] = 0
    counts[30] = 1
    full.allocate_slots_batch([31])
    assert cached(full) == [11, 12, 13, 14, 30, 31]


def test_hashes_are_read_as_they_are_at_the_call(full, context):
    """A hash that the embedder gave after registering is dropped with the block all the same."""
    context.kv_block_allocator.block_hashes[10] = 7777
    full.hash_to_block_id[7777] = 10
    full.allocate_slots_batch([30])
    assert 10 not in full.hash_to_block_id.values()


def test_ref_zero_takes_any_unreferenced_block_whatever_its_age(make_context, generator):
    context = make_context(REF_ZERO)
    context.kv_block_allocator.block_timestamps = None
    allocator = make_allocator(context, generator)
    allocator.allocate_slots_batch(range(10, 16))
    context.kv_block_allocator.block_ref_counts[10:14] = 1
    allocator.allocate_slots_batch([30, 31])
    assert cached(allocator) == [10, 11, 12, 13, 30, 31]


@pytest.mark.parametrize("policy", PrefixCachingEvictionPolicy)
def test_a_block_that_the_call_names_is_not_evicted_by_it(make_context, generator, policy):
    context = make_context(policy)
    allocator = filled(context, generator)
    slots = allocator.allocate_slots_batch([30, 10, 31, 11])
    assert len(set(slots)) == 4
    assert allocator.slot_to_block[slots].tolist() == [30, 10, 31, 11]
    with pytest.raises(MambaSlotCapacityError):
        allocator.allocate_slots_batch([*cached(allocator), 32])


@pytest.mark.parametrize("policy", PrefixCachingEvictionPolicy)
def test_too_few_slots_change_nothing(make_context, generator, policy):
    context = make_context(policy)
    allocator = filled(context, generator)
    allocator.invalidate_block(15)
    context.kv_block_allocator.block_ref_counts[10:13] = 1
    before = fingerprint(allocator), allocator.free_count, dict(allocator.hash_to_block_id)
    with pytest.raises(MambaSlotCapacityError) as caught:
        allocator.allocate_slots_batch([13, 30, 31, 32])
    # One is free, 14 can go, 13 is named.
    assert (caught.value.required, caught.value.available) == (3, 2)
    after = fingerprint(allocator), allocator.free_count, dict(allocator.hash_to_block_id)
    assert after == before


@pytest.mark.parametrize("candidates", [None, torch.arange(10, 16)])
def test_evicted_slots_are_the_callers(full, candidates):
    oldest = [full.get_slot(10), full.get_slot(11)]
    arguments = () if candidates is None else (candidates,)
    assert full._evict_lru_slots_batch(2, *arguments) == oldest
    assert cached(full) == [12, 13, 14, 15]
    assert full.free_count == 0
    assert (full.slot_to_block[oldest] == -1).all()
    assert sorted(full.hash_to_block_id.values()) == [12, 13, 14, 15]


def test_invalidating_clears_every_mapping(full):
    slot = full.get_slot(12)
    full.invalidate_block(12)
    full.invalidate_block(12)
    assert (full.get_slot(12), full.slot_to_block[slot], full.free_count) == (-1, -1, 1)
    assert 12 not in full.hash_to_block_id.values()
    full._invalidate_blocks_batch([10, 11, 12, 39])
    assert (cached(full), full.free_count) == ([13, 14, 15], 3)
    assert sorted(full.hash_to_block_id.values()) == [13, 14, 15]


@pytest.mark.parametrize(
    ("blocks", "hashes", "left"),
    [
        ([10], {1011}, [11, 12, 13, 14, 15]),
        ([10], set(), [11, 12, 13, 14, 15]),
        ([], {1011}, [11, 12, 13, 14, 15]),
        ([10, 39], {1012, 1013, 5}, [13, 14, 15]),
        ([], set(), [10, 11, 12, 13, 14, 15]),
    ],
)
def test_after_deregistration_neither_block_nor_hash_has_a_state(full, blocks, hashes, left):
    full.on_kv_blocks_deregistered(blocks, hashes)
    assert cached(full) == left
    assert sorted(full.hash_to_block_id.values()) == left
    assert full.free_count == 6 - len(left)


def test_a_slot_without_a_hash_is_freed_with_its_block(full):
    full.hash_to_block_id.clear()
    full.on_kv_blocks_deregistered([13, 14], {1014, 1015})
    assert cached(full) == [10, 11, 12, 15]


def test_hashes_are_registered_where_positive(allocator):
    allocator.register_block_hashes_batch([3, 4, 5], [2**62, 0, -1])
    assert allocator.hash_to_block_id == {2**62: 3}


def test_what_an_embedder_writes_by_index_is_the_truth(allocator):
    allocator.block_to_slot[7], allocator.slot_to_block[4] = 4, 7
    allocator.free_slots[:5] = torch.tensor([5, 3, 2, 1, 0])
    allocator.free_count = 5
    assert (allocator.get_slot(7), allocator.has_state(7)) == (4, True)
    assert allocator.allocate_slots_batch([7, 8]) == [4, 0]
    assert allocator.free_count == 4
    allocator.check_invariants()


def test_reset_returns_everything_to_the_initial_state(full, context):
    fresh = MambaSlotAllocator(context, 6, LAYERS, CONV, SSM, *DTYPES)
    full._intermediate_counts_cpu[3] = 2
    full._has_intermediates = True
    addresses = {name: getattr(full, name).data_ptr() for name in ATTRIBUTES}
    full.reset()
    for name in ATTRIBUTES:
        assert torch.equal(getattr(full, name), getattr(fresh, name)), name
    assert {name: getattr(full, name).data_ptr() for name in ATTRIBUTES} == addresses
    assert (full.free_count, full.hash_to_block_id, full._has_intermediates) == (6, {}, False)
