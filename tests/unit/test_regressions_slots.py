"""What went wrong with saved states elsewhere, and must not go wrong here."""

import pytest
from slot_rig import (
    add_live_states,
    live_bits,
    make_allocator,
    make_context,
    make_pool,
    randomize,
    slot_bits,
)

from mamba_cache.cache import ConsumedSlotPolicy, LruSlotPolicy, RefZeroSlotPolicy, ScoreSlotPolicy
from mamba_cache.errors import DoubleFreeError, InvalidArgumentError, MambaSlotCapacityError

every_policy = pytest.mark.parametrize(
    "policy",
    [LruSlotPolicy(), RefZeroSlotPolicy(), ConsumedSlotPolicy(), ScoreSlotPolicy()],
    ids=lambda policy: type(policy).__name__,
)


@pytest.fixture
def allocator(generator):
    """Slots 0 and 1 hold random states of blocks 0 and 1, hashes 100 and 101; 2 and 3 are free."""
    context = make_context()
    add_live_states(context, generator)
    allocator = make_allocator(4, context=context)
    for tensor in (allocator.conv_states, allocator.ssm_states):
        randomize(tensor, generator)
    allocator.allocate_slots_batch([8, 9])
    allocator.allocate_slots_batch([0, 1])
    allocator.on_kv_blocks_deregistered([8, 9], [])
    allocator.register_block_hashes_batch([0, 1], [100, 101])
    return allocator


@every_policy
def test_a_call_never_evicts_the_slot_of_a_block_that_it_names(policy):
    """Megatron Core: two blocks shared a slot after one call that named a cached block."""
    allocator = make_allocator(2, policy=policy)
    first = allocator.allocate_slots_batch([0, 1])
    slots = allocator.allocate_slots_batch([2, 0])
    assert slots[1] == first[0]
    assert slots[0] == first[1]
    assert not allocator.has_state(1)
    with pytest.raises(MambaSlotCapacityError):
        allocator.allocate_slots_batch([0, 2, 3])
    allocator.check_invariants()


def test_a_double_free_raises():
    """SGLang's slot allocator took one back silently."""
    pool = make_pool(2, 2)
    [slot] = pool.reserve_slots([0])
    pool.cancel_reserved([slot])
    with pytest.raises(DoubleFreeError):
        pool.cancel_reserved([slot])
    assert pool.free_count == 2


def test_checkpoints_off_the_kernels_chunks_are_refused_at_construction():
    """SGLang #33515: a cache chunk of 128 was looked up in states kept every 64 tokens."""
    with pytest.raises(InvalidArgumentError, match="multiple of mamba_chunk_size"):
        make_allocator(ssm_chunk_alignment=64, mamba_chunk_size=128)


def test_a_state_is_never_rounded_on_its_way_into_a_slot(allocator):
    """SGLang #33515: the kernel's float32 state went into a bfloat16 pool; a hit was no miss."""
    before = slot_bits(allocator, allocator.get_slot(0))
    context = allocator.context
    context.mamba_ssm_states = context.mamba_ssm_states.bfloat16()
    with pytest.raises(InvalidArgumentError, match="agree in dtype"):
        allocator.store_from_live_batch([allocator.get_slot(0)], [0])
    assert slot_bits(allocator, allocator.get_slot(0)) == before


def test_a_hit_refreshes_only_the_state_that_it_consumed():
    """SGLang #31643: refreshing every ancestor's state too cost a third of the hits."""
    allocator = make_allocator(3, policy=ConsumedSlotPolicy())
    for block in (2, 0, 1):
        allocator.allocate_slots_batch([block])
    allocator.context.kv_block_allocator.block_timestamps[[0, 1, 2]] = 9  # the KV hit: all three
    allocator.note_consumed([allocator.get_slot(2)])
    allocator.allocate_slots_batch([5])
    allocator.note_consumed([allocator.get_slot(2)])
    allocator.allocate_slots_batch([6])
    assert [allocator.has_state(block) for block in (0, 1, 2)] == [False, False, True]


def test_two_requests_that_save_one_block_leave_no_mixture(allocator):
    """Copies of one launch run side by side: of two into one slot, one must win whole."""
    allocator.store_from_live_batch([2, 2, 2], [0, 1, 2])
    assert slot_bits(allocator, 2) == live_bits(allocator.context, 1)
