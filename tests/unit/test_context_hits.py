"""Hits and misses, their reported reasons, and the states that a step saves."""

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
from slot_rig import LastUsedPolicy, Listening
from work import calls_made

from mamba_cache import DeviceTokens
from mamba_cache.cache import EveryNthBlock, LastBlock
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, MissReason, PrefixMatch, Request
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference.no_model import NoModel, count_as_computed

PROMPT = [(5 * i * i + i) % 13 for i in range(3 * BLOCK + 2)]


def test_a_match_reports_cached_and_usable_blocks():
    context = make_context()
    generate(context, PROMPT, 1)
    hashes = prepared(context, PROMPT).hashes
    blocks = tuple(map(context.kv_block_allocator.find_block, hashes.digests))
    assert context.match(prepared(context, PROMPT)) == PrefixMatch(
        prompt_tokens=len(PROMPT),
        block_ids=blocks,
        state_matched_blocks=3,
        skip_tokens=3 * BLOCK,
        miss_reason=None,
    )
    assert context.match(prepared(context, PROMPT[:-3])) == PrefixMatch(
        prompt_tokens=len(PROMPT) - 3,
        block_ids=blocks[:2],
        state_matched_blocks=0,
        skip_tokens=0,
        miss_reason=MissReason.NO_STATE,
    )


def test_a_hit_makes_at_most_200_calls():
    """Counted from the second request's admission to its end: one decoded token, no model."""
    sizes = {"block_size_tokens": 16, "ssm_chunk_size": 16, "num_kv_blocks": 50, "max_slots": 9}
    config = CacheConfig(max_requests=4, max_tokens=256, max_sequence_length=256, **sizes)
    context = DynamicInferenceContext(config, NoModel().state_spec(torch.float32))

    def begin(name):
        add(context, name, [*range(2, 102)])
        steps.append(context.begin_step())

    def end(name):
        context.commit_step({name: 5})
        context.begin_step()
        context.commit_step({name: 6})
        context.finish(name)

    for name in ("miss", "hit"):
        steps = []
        num_calls = calls_made(partial(begin, name))
        count_as_computed(context, steps[0].metadata)
        num_calls += calls_made(partial(end, name))
    assert num_calls <= 200
    assert context.stats().hits == 1


def test_the_only_token_of_a_prompt_is_computed_though_it_is_a_block():
    context = make_context(make_config(block_size_tokens=1, ssm_chunk_size=1))
    for _ in range(2):
        found = context.match(prepared(context, [5]))
        add(context, "x", [5])
        context.begin_step()
        context.commit_step({"x": 1})
        context.finish("x")
    assert (found.kv_matched_blocks, found.skip_tokens) == (1, 0)
    assert found.miss_reason is MissReason.STATE_TOO_LATE


def test_min_computed_tokens_backs_off():
    context = make_context(make_config(min_computed_tokens=3), placement=EveryNthBlock(1))
    generate(context, PROMPT, 1)
    assert generate(context, PROMPT, 1)[2].state_matched_blocks == 2
    assert generate(context, [*PROMPT, 0], 1)[2].state_matched_blocks == 3


def test_branch_point_is_saved_for_the_third_request():
    context = make_context()
    tails = ([1] * 10, [2] * 10, [3] * 10)
    stem = PROMPT[: 2 * BLOCK]
    skipped = [generate(context, stem + tail, 1)[2].skip_tokens for tail in tails]
    assert skipped == [0, 0, 2 * BLOCK]


def test_answers_can_be_excluded_from_the_cache():
    """This holds also if the caller asked for a state inside the answer."""
    context = make_context(make_config(reuse_answers=False))
    answer = generate(context, PROMPT, 3 * BLOCK, checkpoint_positions=[5 * BLOCK])[0]
    match = context.match(Request(request_id="next", prompt_tokens=[*PROMPT, *answer]))
    complete = len(PROMPT) // BLOCK
    assert (match.kv_matched_blocks, match.skip_tokens) == (complete, complete * BLOCK)
    assert context.slot_allocator.num_cached_slots == 1
    context.check_invariants()


def test_superseding_spares_a_state_that_is_being_read():
    """The reader is admitted when the writer is one token before its next boundary."""
    context = make_context()
    add(context, "writer", PROMPT)
    answer = []
    while len(PROMPT) + len(answer) < 5 * BLOCK:
        answer.append(run_step(context)["writer"][1])
    assert saved_prefix_lengths(context, PROMPT + answer) == [3, 4]
    reader = add(context, "reader", [*PROMPT, *answer][: 4 * BLOCK + 1])
    assert reader.skip_tokens == 4 * BLOCK
    sampled = run_step(context)
    assert saved_prefix_lengths(context, [*PROMPT, *answer]) == [3, 4, 5]
    assert_same_run(([sampled["reader"][1]], [sampled["reader"][0]]), [*PROMPT, *answer][:33])
    context.check_invariants()


def test_superseding_spares_a_state_that_a_hit_has_used():
    context = make_context()
    add(context, "writer", PROMPT)
    answer = []
    while len(PROMPT) + len(answer) < 4 * BLOCK + 2:
        answer.append(run_step(context)["writer"][1])
    prompt = [*PROMPT, *answer][: 4 * BLOCK + 1]
    assert add(context, "reader", prompt).skip_tokens == 4 * BLOCK
    run_step(context)
    context.finish("reader")
    for _ in range(BLOCK):
        run_step(context)
    assert add(context, "again", prompt).skip_tokens == 4 * BLOCK


@pytest.mark.parametrize("save_decode_states", [True, False])
def test_a_requested_checkpoint_in_the_answer_is_saved_and_kept(save_decode_states):
    context = make_context(make_config(save_decode_states=save_decode_states))
    answer = generate(context, PROMPT, 3 * BLOCK, checkpoint_positions=[4 * BLOCK + 3])[0]
    kept = saved_prefix_lengths(context, PROMPT + answer)
    assert kept == ([3, 4, 6] if save_decode_states else [3, 4])


def test_a_requested_state_of_one_answer_spares_none_of_another():
    context, other = make_context(), [7, *PROMPT[1:]]
    add(context, "wants", PROMPT, checkpoint_positions=[4 * BLOCK])
    add(context, "other", other)
    for _ in range(3 * BLOCK):
        run_step(context)
    kept = [
        saved_prefix_lengths(context, prompt + context.finish(name))
        for name, prompt in (("wants", PROMPT), ("other", other))
    ]
    assert kept == [[3, 4, 6], [3, 6]]


def test_shared_blocks_are_not_written_again_in_any_chunk():
    context = make_context(placement=EveryNthBlock(1))
    generate(context, PROMPT, 1)
    blocks = context.kv_block_allocator.match_prefix(prepared(context, PROMPT).hashes)
    for block in blocks[1:]:
        context.slot_allocator.invalidate_block(block)
    assert add(context, "x", PROMPT, chunk_tokens=BLOCK).skip_tokens == BLOCK
    run_step(context)
    context.schedule_prefill("x")
    places = context.begin_step().metadata.kv_slot_mapping[: len(PROMPT) - 2 * BLOCK]
    assert (places >= 0).tolist() == [False] * BLOCK + [True] * 2


def test_a_policy_learns_which_states_of_an_answer_are_requested():
    policy = Listening()
    options = {"checkpoint_positions": [5 * BLOCK], "will_continue": True, "source": "a"}
    generate(make_context(slot_policy=policy), PROMPT, 3 * BLOCK, **options)
    [facts] = policy.requests
    assert (facts.will_continue, facts.source) == (True, "a")
    told = {each.num_blocks: (each.kind, each.is_asked) for each in policy.proposed}
    assert told == {n: ("end", n == 5) for n in (3, 4, 5, 6)}


def test_a_policy_learns_whether_prompts_branch_at_a_state():
    policy = Listening()
    context = make_context(slot_policy=policy, placement=EveryNthBlock(1))
    generate(context, PROMPT + [1] * (BLOCK - 3), 1)
    assert [each.kind for each in policy.proposed] == ["inside", "inside", "end"]
    context.slot_allocator.reset()
    policy.proposed.clear()
    generate(context, PROMPT[: 2 * BLOCK] + [5] * (BLOCK + 1), 1)
    assert [each.kind for each in policy.proposed] == ["inside", "branch", "end"]
    generate(context, [7] * BLOCK, 1)
    assert policy.proposed[-1][2:] == ("end", False, None)


def test_a_hit_keeps_its_state_where_the_policy_goes_by_hits():
    context = make_context(make_config(max_slots=2), slot_policy=LastUsedPolicy())
    first, second, third = ([n] * (BLOCK + 1) for n in (1, 2, 3))
    generate(context, first, 1)
    generate(context, second, 1)
    assert generate(context, first, 1)[2].skip_tokens == BLOCK
    generate(context, third, 1)
    assert saved_prefix_lengths(context, first) == [1]
    assert saved_prefix_lengths(context, second) == []


def test_short_prompt_reports_its_miss_reason():
    """vLLM 40696, 51198: prompts shorter than a block never hit, without any report."""
    context = make_context()
    assert generate(context, [1, 2, 3], 1)[2].miss_reason is MissReason.PROMPT_SHORTER_THAN_BLOCK
    assert context.stats().misses == {"prompt_shorter_than_block": 1}


def test_empty_step_keeps_the_cache():
    """Megatron 5502: an idle dummy step wiped the cache."""
    context = make_context()
    generate(context, PROMPT, 1)
    with pytest.raises(RuntimeError, match="nothing to compute"):
        context.begin_step()
    context.reset(preserve_prefix_cache=True)
    assert generate(context, PROMPT, 1)[2].skip_tokens == 3 * BLOCK


@pytest.mark.parametrize("keys", [None, 0, "cat", [(0,)], ((0, None),)])
def test_multimodal_keys_that_are_none_are_refused(keys):
    """Taken for a prompt without images, it would match other prompts."""
    context = make_context()
    with pytest.raises(InvalidArgumentError):
        context.prepare(Request(request_id="a", prompt_tokens=PROMPT, multimodal_keys=keys))


def test_more_checkpoints_than_the_buffers_hold_are_skipped():
    context = make_context(make_config(max_checkpoints_per_step=2), placement=EveryNthBlock(1))
    generate(context, PROMPT + [1] * (2 * BLOCK), 1)
    assert saved_prefix_lengths(context, PROMPT + [1] * (2 * BLOCK)) == [4, 5]
    assert context.stats().skipped_checkpoints == 3


@pytest.mark.parametrize("save_decode_states", [True, False])
def test_blocks_of_an_answer_are_found_while_the_request_runs(save_decode_states):
    """This does not depend on saving the answer's states."""
    context = make_context(make_config(save_decode_states=save_decode_states))
    add(context, "x", PROMPT)
    for number in range(1, 2 * BLOCK):
        run_step(context)
        computed = len(PROMPT) + number - 1
        probe = prepared(context, [*PROMPT, *context.output("x")])
        assert context.match(probe).kv_matched_blocks == computed // BLOCK


def test_disabled_cache_is_a_miss_reason():
    context = make_context(make_config(enable_prefix_caching=False))
    assert context.stats().free_slots == 0, "slots would hold nothing"
    found = context.match(prepared(context, PROMPT))
    assert (found.prompt_tokens, found.miss_reason) == (len(PROMPT), MissReason.CACHE_DISABLED)
    add(context, "x", PROMPT)
    for _ in range(BLOCK + 1):
        run_step(context)
    [active] = context.request_table
    context.request_table.take_over(active)
    assert list(active.hashes) == [], "the answer is not hashed either"
    context.finish("x")
    assert generate(context, PROMPT, 1)[2].miss_reason is MissReason.CACHE_DISABLED
    assert context.stats().cached_blocks == 0


def test_positions_of_every_chunk_stay_requested():
    context = make_context(placement=LastBlock())
    add(context, "x", [5] * 40, chunk_tokens=2, checkpoint_positions=[8])
    run_step(context)
    context.schedule_prefill("x", chunk_tokens=2, checkpoint_positions=[16])
    run_step(context)
    context.schedule_prefill("x")
    run_step(context)
    assert saved_prefix_lengths(context, [5] * 40) == [1, 2, 5]


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
        context.check_invariants()
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
    assert (table.num_computed[active.row], table.num_uncollected[active.row]) == (BLOCK - 1, 1)
    assert active.checkpoint.position == BLOCK
    context.abort_step()
    assert context.slot_allocator.num_reserved_slots == 0
    context.check_invariants()


def test_requests_that_end_a_block_together_reserve_and_commit_in_one_call(monkeypatch):
    """Forks with equal tokens afterwards keep one state."""
    context, calls = make_context(), []
    slots = context.slot_allocator
    for number, name in enumerate(("x", "y")):
        add(context, name, [number, *PROMPT[: BLOCK - 2]])
    run_step(context)
    context.fork("x", ["fork of x"])

    def watched(call, given, *others, **named):
        calls.append(given)
        return call(given, *others, **named)

    for name in ("reserve", "commit"):
        monkeypatch.setattr(slots, name, partial(watched, getattr(slots, name)))
    context.begin_step()
    context.commit_step([1, 2, 1])
    [blocks, taken] = calls
    assert (len(blocks), len(taken)) == (3, 3)
    assert context.stats().saved_states == 2
    context.check_invariants()


@pytest.mark.parametrize("length", [3, BLOCK + 3])
def test_each_state_of_an_answer_supersedes_the_one_before(length):
    """The shorter prompt's first state of the answer lies at block 0."""
    context = make_context()
    answer = generate(context, PROMPT[:length], 3 * BLOCK)[0]
    kept = saved_prefix_lengths(context, PROMPT[:length] + answer)
    assert kept == ([3] if length < BLOCK else [1, 4])


def test_a_state_is_not_put_beside_a_block_that_shares_the_hash_id_alone(monkeypatch):
    """Fails if ``Publisher.publish`` does not compare the digest."""
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
