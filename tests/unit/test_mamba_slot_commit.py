"""MambaSlotAllocator: checkpoints recorded, written into a scratch, and committed."""

from types import SimpleNamespace

import pytest
import torch
from slot_rig import add_live_states, make_allocator, make_context, randomize

from mamba_cache.cache import EveryNthBlock
from mamba_cache.errors import InvalidArgumentError, MambaSlotCapacityError
from mamba_cache.slots import MambaSlotAllocator

BLOCK = 256


@pytest.fixture
def context(generator):
    """One paused request, one that decodes, and two that prefill, in rows 2 and 3."""
    context = make_context(
        num_blocks=20,
        block_size_tokens=BLOCK,
        mamba_chunk_size=128,
        ssm_chunk_alignment=128,
        max_mamba_intermediate_states_per_step=5,
        paused_request_count=1,
        batch_dimensions=SimpleNamespace(decode_req_count=1, prefill_req_count=2),
        request_to_kv_block_ids=torch.arange(20, dtype=torch.int32).reshape(4, 5),
    )
    add_live_states(context, generator)
    return context


@pytest.fixture
def allocator(context, generator):
    allocator = make_allocator(6, context=context)
    for name in ("conv_states", "ssm_states", "intermediate_conv_out", "intermediate_ssm_out"):
        randomize(getattr(allocator, name), generator)
    return allocator


def record(allocator, row, prompt, *, finished=0, skip=0, matched=0):
    request = SimpleNamespace(prompt_tokens=range(prompt), finished_chunk_token_count=finished)
    blocks = -(-prompt // BLOCK)
    allocator.compute_and_store_offsets(request, row, skip, prompt - finished, matched, [], blocks)


def wrote(context, *counts):
    """What the forward reports: states for each prefill request."""
    context.mamba_metadata.intermediate_count = sum(counts)
    context.mamba_metadata.per_request_intermediate_counts = list(counts)


def two_prefills(allocator, context):
    """Row 2: 1,100 tokens, 1 block matched: blocks 10 and 13. Row 3: 768 tokens: 16, EOS 17."""
    record(allocator, 2, 1100, matched=1)
    record(allocator, 3, 768)
    context.kv_block_allocator.block_hashes[:] = torch.arange(20) + 1000
    wrote(context, 2, 1)


def test_checkpoints_that_the_scratch_has_no_row_for_are_counted(context):
    """Nor those beyond three of a request."""
    for row in (-1, 4, "a", 10**30):
        with pytest.raises(InvalidArgumentError, match=rf"current_id must be .*, got {row!r}"):
            record(make_allocator(context=context), row, 1100)
    allocator = make_allocator(context=context, placement=EveryNthBlock(1))
    record(allocator, 2, 5 * BLOCK - 1)
    assert allocator._intermediate_block_ids_cpu[2].tolist() == [11, 12, 13]
    assert allocator.skipped_checkpoints_total == 1
    context.max_mamba_intermediate_states_per_step = 3
    allocator = make_allocator(context=context, placement=EveryNthBlock(1))
    record(allocator, 2, 3 * BLOCK + 1)
    record(allocator, 3, 3 * BLOCK + 1)
    assert allocator._intermediate_block_ids_cpu[2].tolist() == [10, 11, 12]
    assert allocator._intermediate_counts_cpu.tolist() == [0, 0, 3, 0]
    assert allocator.skipped_checkpoints_total == 3
    record(allocator, 2, BLOCK + 1)  # the row's own states make room for its new ones
    record(allocator, 3, 3 * BLOCK + 1)
    assert allocator._intermediate_block_ids_cpu[2:].tolist() == [[10, -1, -1], [16, 17, -1]]
    assert allocator._intermediate_offsets_cpu[3].tolist() == [2 * BLOCK, 3 * BLOCK, 0]
    assert allocator.skipped_checkpoints_total == 4


def test_states_that_the_scratch_has_no_row_for_are_not_committed(allocator, context):
    two_prefills(allocator, context)
    allocator.max_intermediate_count = 2  # as if an embedder had written the tables itself
    allocator.commit_intermediate_states()
    assert [allocator.has_state(block) for block in (10, 13, 16, 17)] == [True, True, False, True]
    assert allocator.skipped_checkpoints_total == 1


def test_stale_counts_of_an_earlier_forward_are_not_read(allocator, context):
    two_prefills(allocator, context)
    wrote(context, 2, 1)
    context.mamba_metadata.intermediate_count = 0
    allocator.commit_intermediate_states()
    assert [*allocator.hash_to_block_id.values()] == [17]


@pytest.mark.parametrize("row", [0, 3])
def test_rows_of_other_requests_than_those_that_prefill_are_kept(allocator, context, row):
    context.batch_dimensions.prefill_req_count = 1  # row 2
    for each in (row, 2):
        record(allocator, each, 1024)
    wrote(context, 0)
    allocator.commit_intermediate_states()
    assert allocator._intermediate_counts_cpu.nonzero().flatten().tolist() == [row]
    assert allocator._eos_cache_block_id_cpu[[row, 2]].tolist() == [5 * row + 3, -1]


def test_a_commit_whose_copy_is_refused_leaves_nothing_findable(allocator, context):
    two_prefills(allocator, context)
    allocator.allocate_slots_batch([16])
    context.mamba_ssm_states = context.mamba_ssm_states.double()
    with pytest.raises(InvalidArgumentError, match="agree in dtype"):
        allocator.commit_intermediate_states()
    assert [allocator.has_state(block) for block in (10, 13, 16, 17)] == [False, False, True, False]
    assert allocator.hash_to_block_id == {}
    allocator.check_invariants()


def test_a_second_shortage_is_the_callers_to_see(allocator):
    def shortage(blocks):
        raise MambaSlotCapacityError(len(blocks), 1)

    allocator._collect_commit_data = lambda: ([4, 5], [0, 1], [], [], [40, 50])
    allocator.allocate_slots_batch = shortage
    with pytest.raises(MambaSlotCapacityError) as caught:
        allocator.commit_intermediate_states()
    assert caught.value.required == 1


def test_a_row_that_the_forward_leaves_out_holds_no_earlier_state(allocator, context):
    """Nobody on the host sees it; another request's state was published as this one's."""
    two_prefills(allocator, context)
    allocator.commit_intermediate_states()
    for row in range(3):
        assert allocator.intermediate_conv_out[:, row].isnan().all()
        assert allocator.intermediate_ssm_out[:, row].isnan().all()
    assert not allocator.intermediate_ssm_out[:, 3:].isnan().all()
    saved = allocator.ssm_states[:, allocator.get_slot(10)].clone()
    two_prefills(allocator, context)
    allocator.intermediate_conv_out[:, 1:] = 1
    allocator.intermediate_ssm_out[:, 1:] = 1
    allocator.commit_intermediate_states()
    again = allocator.ssm_states[:, allocator.get_slot(10)]
    assert again.isnan().all()
    assert not torch.equal(again, saved)


def test_a_scratch_of_integers_is_cleared(context):
    context.mamba_conv_states, context.mamba_ssm_states = (
        torch.zeros(1, 4, *shape, dtype=torch.int32) for shape in ((2, 2), (1, 2, 2))
    )
    kinds = ((2, 2), (1, 2, 2), torch.int32, torch.int32)
    allocator = MambaSlotAllocator(context, 6, 1, *kinds)
    two_prefills(allocator, context)
    allocator.intermediate_ssm_out.fill_(5)
    allocator.commit_intermediate_states()
    assert allocator.intermediate_ssm_out[0, :, 0, 0, 0].tolist() == [0, 0, 0, 5, 5]


def test_with_nothing_to_commit_the_tables_are_cleared(allocator, context):
    record(allocator, 2, 1100)
    wrote(context, 0, 0)
    allocator.commit_intermediate_states()
    assert allocator.num_cached_slots == 0
    assert not allocator._intermediate_counts_cpu.any()
