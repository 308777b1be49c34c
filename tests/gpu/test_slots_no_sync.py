"""No call of a step waits for the device, nor does the first call that moves states."""

import pytest
import torch
from conformance_rig import (
    CONTEXTS,
    PrefixCachingEvictionPolicy,
    fill,
    make_allocator,
    request_bits,
    scratch_bits,
    three_prefills,
)
from gpu_rig import BUSY_CYCLES, waiting_raises
from slot_rig import slot_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(params=CONTEXTS)
def context(request, generator):
    context = CONTEXTS[request.param](PrefixCachingEvictionPolicy.LRU, "cuda")
    fill(context, generator)
    return context


@pytest.fixture
def allocator(context, generator):
    return make_allocator(context, generator)


def test_saving_live_states(allocator, context):
    slots = allocator.allocate_slots_batch([9, 8])
    with waiting_raises():
        allocator.store_from_live_batch(slots, [4, 0])
    assert [slot_bits(allocator, s) for s in slots] == [request_bits(context, r) for r in (4, 0)]


def test_restoring_live_states(allocator, context):
    slots = allocator.allocate_slots_batch([9, 8])
    with waiting_raises():
        for request, block in ((3, 9), (1, 8), (2, 9)):
            assert allocator.restore_to_live(request, block)
    saved = [slot_bits(allocator, slot) for slot in slots]
    assert [request_bits(context, r) for r in (3, 1, 2)] == [*saved, saved[0]]


def test_committing_a_step_while_the_device_is_busy(allocator, context):
    """Megatron Core copies indices from pageable memory, which waits for the forward."""
    inside, ends = three_prefills(allocator, context)
    expected = [scratch_bits(allocator, i) for i in range(3)]
    expected += [request_bits(context, request) for request in (3, 4)]
    planned = [table.tolist() for table in allocator.get_intermediate_cpu_data()]
    with waiting_raises():
        torch.cuda._sleep(BUSY_CYCLES)
        sent = [table.clone() for table in allocator.get_intermediate_gpu_data()]
        allocator.commit_intermediate_states()
    slots = [allocator.get_slot(block) for block in inside + ends]
    assert [slot_bits(allocator, slot) for slot in slots] == expected
    # Tables are cleared before the device reads them; the device gets the old contents.
    assert not allocator._has_intermediates
    assert [table.tolist() for table in sent] == planned
