"""What hits, what misses, and what is said of it."""

import pytest
from context_rig import (
    BLOCK,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    run_step,
    saved_prefix_lengths,
)

from mamba_cache.context import MissReason, RequestStatus
from mamba_cache.slots import EveryNthBlock

PROMPT = [(5 * i * i + i) % 13 for i in range(3 * BLOCK + 2)]


def test_identical_prompt_hits():
    """SGLang 21158: a look-up capped one token before the end found nothing of the same prompt."""
    context, prompt = make_context(), PROMPT[: 3 * BLOCK]
    generate(context, prompt, 1)
    tokens, logits, admission = generate(context, prompt, 4)
    assert (admission.kv_matched_blocks, admission.state_matched_blocks) == (3, 2)
    assert_same_run((tokens, logits), prompt)


def test_state_at_the_very_end_alone_is_too_late():
    context, prompt = make_context(), PROMPT[:BLOCK]
    generate(context, prompt, 1)
    admission = generate(context, prompt, 1)[2]
    assert admission.kv_matched_blocks == 1
    assert admission.miss_reason is MissReason.STATE_TOO_LATE


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


def test_wanted_checkpoint_makes_the_second_request_hit():
    """SGLang 22935, 38625; vLLM 45238: a long shared prefix was missed until the third prompt."""
    context = make_context()
    stem = PROMPT[: 2 * BLOCK + 3]
    generate(context, stem + [1] * 10, 1, checkpoint_positions=[len(stem)])
    tokens, logits, admission = generate(context, stem + [2] * 10, 3)
    assert admission.skip_tokens == 2 * BLOCK
    assert_same_run((tokens, logits), stem + [2] * 10)


def test_long_prompt_does_not_flood_the_slots():
    """SGLang 36935: the chunk states of one huge prompt pushed all others out."""
    context = make_context(make_config(max_sequence_length=256, max_slots=8))
    generate(context, PROMPT, 1)
    generate(context, [i % 11 for i in range(30 * BLOCK + 1)], 1)
    assert saved_prefix_lengths(context, PROMPT) == [3]
    assert context.slot_allocator.num_cached_slots == 2


def test_next_turn_reuses_the_answer():
    context = make_context()
    answer = generate(context, PROMPT, 14)[0]
    turn = PROMPT + answer + [4, 5, 6]
    tokens, logits, admission = generate(context, turn, 3)
    assert admission.skip_tokens == (len(PROMPT) + 13) // BLOCK * BLOCK
    assert_same_run((tokens, logits), turn)


def test_one_slot_serves_an_answer_of_any_length():
    context = make_context()
    generate(context, PROMPT, 5 * BLOCK)
    assert context.slot_allocator.num_cached_slots == 2  # the prompt's and the newest


def test_decode_states_can_be_left_out():
    context = make_context(make_config(save_decode_states=False))
    generate(context, PROMPT, 3 * BLOCK)
    assert context.slot_allocator.num_cached_slots == 1


def test_superseding_spares_a_state_that_is_being_read():
    context = make_context()
    add(context, "long", PROMPT)
    run_step(context)
    while context.stats().saved_states < 2:
        run_step(context)
    run = context.finish("long")
    answer = PROMPT + run
    # Another request is about to read the answer's state while its owner saves a newer one.
    add(context, "again", answer[: len(PROMPT)])
    for _ in range(len(run)):
        run_step(context)
    assert context.status("again") is RequestStatus.DECODING
    reader = add(context, "reader", [*answer, 1, 2])
    assert reader.skip_tokens == 4 * BLOCK
    for _ in range(BLOCK):
        sampled = run_step(context, decode_ids=["again"])
    assert "again" in sampled
    context.check_invariants()


def test_short_prompt_says_why_it_missed():
    """vLLM 40696, 51198: prompts shorter than a block never hit, and nothing said so."""
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


def test_reset_forgets_the_cache():
    context = make_context()
    generate(context, PROMPT, 1)
    add(context, "in-flight", [7] * 20)
    context.begin_step()
    context.reset()
    context.check_invariants()
    assert generate(context, PROMPT, 1)[2].miss_reason is MissReason.NO_KV_MATCH
    assert context.stats().requests == 1


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "tenant"},
        {"lora_id": 1},
        {"multimodal_keys": [(0, "image")]},
    ],
)
def test_no_cross_talk(other):
    context = make_context()
    generate(context, PROMPT, 1)
    assert generate(context, PROMPT, 1, **other)[2].kv_matched_blocks == 0
    assert generate(context, PROMPT, 1, **other)[2].skip_tokens == 3 * BLOCK


def test_multimodal_key_concerns_its_block_and_all_after():
    context = make_context(placement=EveryNthBlock(1))
    generate(context, PROMPT, 1)
    keyed = generate(context, PROMPT, 1, multimodal_keys=[(BLOCK + 1, "image")])[2]
    assert (keyed.kv_matched_blocks, keyed.skip_tokens) == (1, BLOCK)


def test_more_checkpoints_than_the_buffers_hold_are_skipped():
    context = make_context(make_config(max_checkpoints_per_step=2), placement=EveryNthBlock(1))
    generate(context, PROMPT + [1] * (2 * BLOCK), 1)
    assert saved_prefix_lengths(context, PROMPT + [1] * (2 * BLOCK)) == [4, 5]
    assert context.stats().skipped_checkpoints == 3


def test_disabled_cache_says_so():
    context = make_context(make_config(enable_prefix_caching=False))
    generate(context, PROMPT, 1)
    assert generate(context, PROMPT, 1)[2].miss_reason is MissReason.CACHE_DISABLED
    assert context.stats().cached_blocks == 0
