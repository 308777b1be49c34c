"""Which states a step saves, and beside which blocks they are found."""

from functools import partial

import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    prepared,
    run_step,
    saved_prefix_lengths,
)

from mamba_cache import DeviceTokens, Request
from mamba_cache.cache import EveryNthBlock

PROMPT = [(5 * i * i + i) % 13 for i in range(3 * BLOCK + 2)]


def test_the_checkpoint_at_a_chunks_end_takes_no_room_of_those_inside():
    context = make_context(make_config(max_checkpoints_per_step=2), placement=EveryNthBlock(1))
    generate(context, PROMPT[: 3 * BLOCK], 1)
    assert saved_prefix_lengths(context, PROMPT) == [1, 2, 3]
    assert context.stats().skipped_checkpoints == 0


def test_a_step_reserves_a_slot_only_if_it_can_end_a_block():
    context = make_context()
    add(context, "x", PROMPT)
    run_step(context)
    reserved = []
    for _ in range(len(PROMPT), 4 * BLOCK):
        context.begin_step()
        reserved.append(context.stats().reserved_slots)
        context.commit_step({"x": 1})
    assert reserved == [0] * 5 + [1]


def test_two_steps_share_a_checkpoint():
    context = make_context(make_config(num_speculative_tokens=2))
    prompt = PROMPT[: BLOCK - 1]
    add(context, "x", prompt)
    run_step(context)
    table = context.request_table
    [active] = table
    step = context.begin_step()
    MODEL.forward(step.metadata, context)
    context.commit_step(DeviceTokens(torch.tensor([[1, 0, 0]]), torch.tensor([1]).int()))
    context.begin_step()
    assert context.slot_allocator.num_reserved_slots == 1
    context.check_invariants()
    assert (table.num_computed[active.row], table.num_in_doubt[active.row]) == (BLOCK - 1, 1)
    assert active.checkpoint.position == BLOCK
    context.abort_step()
    assert context.slot_allocator.num_reserved_slots == 0
    context.check_invariants()


def test_requests_that_end_a_block_together_reserve_and_commit_in_one_call(monkeypatch):
    """Of forks that then say the same one state is kept."""
    context, calls = make_context(), []
    slots = context.slot_allocator
    for number, name in enumerate(("x", "y")):
        add(context, name, [number, *PROMPT[: BLOCK - 2]])
    run_step(context)
    context.fork("x", ["fork of x"])

    def watched(call, given, *others, **named):
        calls.append(given)
        return call(given, *others, **named)

    for name in ("reserve_slots", "commit_reserved"):
        monkeypatch.setattr(slots, name, partial(watched, getattr(slots, name)))
    context.begin_step()
    context.commit_step([1, 2, 1])
    [blocks, taken] = calls
    assert (len(blocks), len(taken)) == (3, 3)
    assert context.stats().saved_states == 2
    context.check_invariants()


@pytest.mark.parametrize("length", [3, BLOCK + 3])
def test_each_state_of_an_answer_supersedes_the_one_before(length):
    """Of the shorter prompt the first of them is beside block 0."""
    context = make_context()
    answer = generate(context, PROMPT[:length], 3 * BLOCK)[0]
    kept = saved_prefix_lengths(context, PROMPT[:length] + answer)
    assert kept == ([3] if length < BLOCK else [1, 4])


def test_a_state_is_not_put_beside_a_block_that_shares_the_hash_id_alone(monkeypatch):
    """Removed to see it fail: the digest that ``Publisher.publish`` compares."""
    monkeypatch.setattr("mamba_cache.cache.hashing._ID_MASK", 1)
    context = make_context(placement=EveryNthBlock(1))
    first, second = ([token, *PROMPT[1 : BLOCK + 1]] for token in (1, 2))
    generate(context, first, 1)
    [block] = context.match(prepared(context, first)).block_ids
    context.slot_allocator.invalidate_block(block)
    generate(context, second, 1)
    assert not context.slot_allocator.has_state(block)
    assert_same_run(generate(context, first, 3), first)


@pytest.mark.parametrize("chunk_tokens", [BLOCK, 2 * BLOCK, 3 * BLOCK])
def test_blocks_of_several_chunks_are_evicted_from_the_last(chunk_tokens):
    context = make_context(make_config(num_kv_blocks=3))
    request = Request(request_id="x", prompt_tokens=PROMPT[: 3 * BLOCK])
    context.add_request(request, chunk_tokens=chunk_tokens)
    run_step(context)
    for _ in range(chunk_tokens, 3 * BLOCK, chunk_tokens):
        context.schedule_prefill("x", chunk_tokens=chunk_tokens)
        run_step(context)
    context.finish("x")
    matched = []
    for _ in range(3):
        matched.append(context.match(request).kv_matched_blocks)
        context.kv_block_allocator.allocate_memory_blocks(1)
    assert matched == [3, 2, 1]
