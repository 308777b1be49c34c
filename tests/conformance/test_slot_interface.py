"""The interface of slots, rule by rule, for both kinds of embedders: owners of slots."""

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
    """Give blocks 10 to 15 the slots; 10 is least recently used; hashes are 1011 to 1016."""
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
def test_methods_take_the_arguments_of_embedders(name, parameters):
    _self, *taken = inspect.signature(getattr(MambaSlotAllocator, name)).parameters.values()
    by_position = [p.name for p in taken if p.kind is not p.KEYWORD_ONLY]
    assert by_position == parameters.split()
    assert all(p.default is not p.empty for p in taken if p.kind is p.KEYWORD_ONLY)


def test_a_shortage_is_reported_as_embedders_expect():
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


def test_types_of_returned_values(full):
    assert type(full.allocate_slots_batch([3, 10])) is list
    assert type(full.get_slot(3)) is int
    assert (full.has_state(3), full.has_state(9)) == (True, False)
    assert full.restore_to_live(0, 9) is False
    assert full.restore_to_live(0, 3) is True
    assert full.get_intermediate_gpu_data() == (None, None)
    assert full.transfer_intermediate_to_gpu(2, 0) == (None, None)
    assert type(full._evict_lru_slots_batch(1)) is list


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
    # One slot is free, 14 is evictable, 13 is named.
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


def test_a_slot_without_a_hash_is_freed_with_its_block(full):
    full.hash_to_block_id.clear()
    full.on_kv_blocks_deregistered([13, 14], {1014, 1015})
    assert cached(full) == [10, 11, 12, 15]


def test_writes_of_an_embedder_by_index_are_the_truth(allocator):
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
