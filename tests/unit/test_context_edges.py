"""The context at its edges: the second of two calls, and what errors and plans say in numbers."""

from collections import Counter

import numpy as np
import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL_CONFIG,
    add,
    generate,
    make_config,
    make_context,
    prepared,
    run_step,
    saved_prefix_lengths,
)
from fingerprints import fingerprint

from mamba_cache import errors
from mamba_cache.cache import EveryNthBlock, LastBlock
from mamba_cache.context import DynamicInferenceContext, MissReason
from mamba_cache.context.stats import _COUNTED, collect_stats

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
STATES, KV = MODEL_CONFIG.state_spec(torch.float64), MODEL_CONFIG.kv_spec(torch.float64)


def test_a_match_without_a_cache_knows_the_prompts_length():
    context = make_context(make_config(enable_prefix_caching=False))
    found = context.match(prepared(context, PROMPT))
    assert (found.prompt_tokens, found.miss_reason) == (len(PROMPT), MissReason.CACHE_DISABLED)


def test_statistics_are_the_counters_of_the_same_names():
    context = make_context()
    numbers = {name: number for number, name in enumerate(_COUNTED, start=1)}
    stats = collect_stats(Counter(numbers), context.kv_block_allocator, context.slot_allocator, 77)
    assert {name: getattr(stats, name) for name in numbers} == numbers
    assert stats.bytes_per_slot == 77


def test_statistics_are_the_totals_of_the_allocators():
    context = make_context()
    kv_blocks, slots = context.kv_block_allocator, context.slot_allocator
    kv_blocks.evicted_blocks_total, kv_blocks.hash_collisions_total = 11, 12
    slots.skipped_checkpoints_total, slots.evicted_slots_total = 13, 14
    slots.reserve_slots([3])
    stats = context.stats()
    assert (stats.evicted_blocks, stats.hash_collisions) == (11, 12)
    assert (stats.skipped_checkpoints, stats.evicted_slots) == (13, 14)
    assert (stats.free_slots, stats.reserved_slots, stats.cached_slots) == (99, 1, 0)
    assert stats.free_blocks == kv_blocks.num_free_blocks == 200


def test_errors_of_capacity_say_what_is_needed_and_what_there_is():
    context = make_context(make_config(max_tokens=20, max_requests=2))
    with pytest.raises(errors.TokenCapacityError) as chunk:
        add(context, "long", [1] * 21)
    assert (chunk.value.required, chunk.value.available) == (21, 20)
    add(context, "a", [1])
    add(context, "b", [2])
    with pytest.raises(errors.RequestCapacityError) as row:
        add(context, "c", [3])
    assert (row.value.required, row.value.available) == (1, 0)


def test_positions_of_every_chunk_stay_wanted():
    context = make_context(placement=LastBlock())
    add(context, "x", [5] * 40, chunk_tokens=2, checkpoint_positions=[8])
    run_step(context)
    context.schedule_prefill("x", chunk_tokens=2, checkpoint_positions=[16])
    run_step(context)
    context.schedule_prefill("x")
    run_step(context)
    assert saved_prefix_lengths(context, [5] * 40) == [1, 2, 5]


class BreaksOnce(EveryNthBlock):
    """A placement that fails when it is told to."""

    broken = False

    def positions(self, facts):
        if BreaksOnce.broken:
            raise OSError("planning failed")
        return super().positions(facts)


def test_a_chunk_that_could_not_be_planned_is_planned_later(monkeypatch):
    context = make_context(placement=BreaksOnce(1))
    add(context, "x", [5] * 30, chunk_tokens=3, checkpoint_positions=[8])
    run_step(context)
    before = fingerprint(context), context.stats()
    with monkeypatch.context() as patch:
        patch.setattr(BreaksOnce, "broken", True)
        with pytest.raises(OSError, match="planning failed"):
            context.schedule_prefill("x", checkpoint_positions=[16])
    assert (fingerprint(context), context.stats()) == before
    context.check_invariants()
    context.schedule_prefill("x")
    run_step(context)
    assert saved_prefix_lengths(context, [5] * 30) == [1, 2, 3]


def test_tokens_are_int32_wherever_they_come_from():
    context = make_context()
    add(context, "x", [1, 2, 3])
    for _ in range(3):
        run_step(context)
    [active] = context.request_table
    context.request_table.collect(active)
    every = [1, 2, 3, *active.generated]
    for start in range(len(every)):
        for end in range(start, len(every) + 1):
            tokens = active.tokens(start, end)
            assert (tokens.dtype, tokens.tolist()) == (np.int32, every[start:end])


def test_no_slots_are_made_without_a_cache():
    context = make_context(make_config(enable_prefix_caching=False))
    assert context.slot_allocator.max_slots == 0


def test_the_smallest_kv_budget_is_one_block_and_the_dummy():
    block = KV.bytes_per_block(BLOCK)
    enough = make_config(num_kv_blocks=None, kv_cache_gb=2 * block / 2**30)
    assert DynamicInferenceContext(enough, STATES, KV).kv_block_allocator.pool_size == 2
    short = make_config(num_kv_blocks=None, kv_cache_gb=1.9 * block / 2**30)
    with pytest.raises(errors.BudgetError, match="for one KV block"):
        DynamicInferenceContext(short, STATES, KV)


def test_a_resumed_request_may_be_cut_into_chunks():
    context = make_context()
    add(context, "x", PROMPT)
    context.preempt("x")
    assert context.resume_request("x", chunk_tokens=2).chunk_tokens == 2
    assert context.begin_step().requests[0].num_tokens == 2


def test_counters_of_several_requests_add_up():
    context = make_context(placement=EveryNthBlock(1))
    for first in (1, 2):
        generate(context, [first, *PROMPT], 1)
        generate(context, [first, *PROMPT], 1)
    stats = context.stats()
    assert (stats.requests, stats.hits, stats.misses) == (4, 2, {"no_kv_match": 2})
    assert (stats.kv_matched_blocks, stats.state_matched_blocks) == (6, 6)
    assert stats.skipped_tokens == 2 * 3 * BLOCK
    assert stats.computed_tokens == 4 * (len(PROMPT) + 1) - stats.skipped_tokens
    assert stats.saved_states == 6
    for name in ("a", "b"):
        add(context, name, PROMPT)
        context.begin_step()
        context.abort_step()
    assert context.stats().aborted_steps == 2


def test_an_admission_says_what_was_asked_and_what_is_computed():
    context = make_context()
    admission = add(context, "x", PROMPT, chunk_tokens=3)
    assert (admission.request_id, admission.prompt_tokens) == ("x", len(PROMPT))
    assert admission.chunk_tokens == 3
