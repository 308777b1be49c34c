"""Slots on a GPU: a step is committed without waiting for the device, and right all the same."""

from types import SimpleNamespace

import pytest
import torch
from gpu_rig import BUSY_CYCLES
from slot_rig import live_bits, make_allocator, make_context, slot_bits, state_bits

pytestmark = pytest.mark.gpu

BLOCK = 256


@pytest.fixture
def allocator():
    """Two prefill requests in rows 0 and 1, with live states in rows 1 and 0."""
    context = make_context(
        max_requests=2,
        device="cuda",
        block_size_tokens=BLOCK,
        max_mamba_intermediate_states_per_step=4,
        paused_request_count=0,
        batch_dimensions=SimpleNamespace(decode_req_count=0, prefill_req_count=2),
        request_to_kv_block_ids=torch.arange(10, dtype=torch.int32).reshape(2, 5),
        mamba_metadata=SimpleNamespace(
            request_to_mamba_state_idx=torch.tensor([1, 0], dtype=torch.int32),
            intermediate_count=3,
            per_request_intermediate_counts=[2, 1],
        ),
    )
    allocator = make_allocator(6, context=context)
    context.mamba_conv_states = torch.rand_like(allocator.conv_states[:, :2]) + 1
    context.mamba_ssm_states = torch.rand_like(allocator.ssm_states[:, :2]) + 1
    for request, prompt in enumerate((1100, 768)):
        allocator.compute_and_store_offsets(
            SimpleNamespace(prompt_tokens=range(prompt), finished_chunk_token_count=0),
            request, 0, prompt, 1 - request, [], -(-prompt // BLOCK),
        )  # fmt: skip
    return allocator


def run_step(allocator):
    """Uploads, computes and commits while the device is busy with something else."""
    torch.cuda._sleep(BUSY_CYCLES)
    offsets, counts = allocator.get_intermediate_gpu_data()
    seen = offsets.clone(), counts.clone()
    scratch = (allocator.intermediate_conv_out, allocator.intermediate_ssm_out)
    written = [states.uniform_(1, 2).clone() for states in scratch]
    allocator.commit_intermediate_states()
    return *seen, written


def test_a_step_waits_for_nothing(allocator, request):
    allocator.copy_live_to_slots([0], [0])  # the first copy of live states makes the copiers
    request.getfixturevalue("no_waiting")
    run_step(allocator)
    assert allocator.restore_to_live(1, 0)


def test_rows_cleared_before_the_device_reads_them_arrive_as_they_were(allocator):
    offsets, counts, _ = run_step(allocator)
    assert not allocator._has_intermediates
    assert offsets.tolist() == [[256, 1024, 0], [512, 0, 0]]
    assert counts.tolist() == [2, 1]


def test_committed_states_are_exact(allocator):
    *_, scratch = run_step(allocator)
    for index, block in enumerate((0, 3, 6)):
        assert slot_bits(allocator, allocator.get_slot(block)) == state_bits(*scratch, index)
    assert slot_bits(allocator, allocator.get_slot(7)) == live_bits(allocator.context, 0)
