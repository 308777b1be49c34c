"""Drafts change how many steps an answer takes, and nothing else."""

from functools import partial

import pytest
from engine_rig import (
    BLOCK,
    alone,
    draw_prompt,
    greedy,
    make_engine,
    run_together,
)

from mamba_cache.context import ScheduledRequest
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import DecodingStats, FinishReason, SamplingParams


class Oracle:
    """Knows how some sequences go on: prompts with their answers."""

    def __init__(self, known):
        self.known = known

    def propose(self, tokens, max_drafts):
        end = len(tokens)
        for sequence in self.known:
            if len(sequence) > end and sequence[:end] == list(tokens):
                return sequence[end : end + max_drafts]
        return []


def oracle_for(prompts, sampling):
    return partial(Oracle, [[*p, *alone(p, sampling)] for p in prompts])


def test_right_drafts_save_steps(rng):
    prompt = draw_prompt(rng, 11)
    drafter = oracle_for([prompt], greedy(25))
    engine = make_engine(num_speculative_tokens=3, drafter=drafter)
    [completion] = run_together(engine, [prompt], greedy(25))
    # The prompt's step gives the first token, six steps four each.
    expected = DecodingStats(steps=6, tokens=24, drafted_tokens=18, accepted_tokens=18)
    assert completion.decoding == engine.decoding == expected
    assert expected.tokens_per_step == 4.0


def test_without_drafts_a_step_brings_a_token(rng):
    def never():
        raise AssertionError("nobody can use drafts")

    engine = make_engine(drafter=never)
    completions = run_together(engine, [draw_prompt(rng, 9), draw_prompt(rng, 3)], greedy(5))
    assert [c.decoding for c in completions] == [DecodingStats(steps=4, tokens=4)] * 2
    assert (engine.decoding.steps, engine.decoding.tokens_per_step) == (8, 1.0)
    assert DecodingStats().tokens_per_step == 0.0


def test_an_answer_that_repeats_itself_is_drafted_from_the_prompt(rng):
    """The model's own answers, given to it as parts of the prompts, are looked up.

    One in some tens of them never comes back to what it said: of eight, some do.
    """
    prompts = [draw_prompt(rng, 5) for _ in range(8)]
    plain = make_engine(enable_prefix_caching=False)
    answers = plain.generate(prompts, greedy(40))
    longer = [[*p, *answer.tokens] for p, answer in zip(prompts, answers, strict=True)]
    completions = make_engine(num_speculative_tokens=3).generate(longer, greedy(60))
    wanted = plain.generate(longer, greedy(60))
    assert [one.tokens for one in completions] == [one.tokens for one in wanted]
    decoding = [completion.decoding for completion in completions]
    assert sum(one.accepted_tokens for one in decoding) > 0
    assert max(one.tokens_per_step for one in decoding) > 1


def test_drafts_take_no_block_from_another_request(rng):
    """Each stops within its block, so nobody is preempted for a draft that lies behind it."""
    prompts = [draw_prompt(rng, BLOCK - 3) for _ in range(2)]
    stops = [alone(prompt, greedy(3))[-1] for prompt in prompts]
    sampling = SamplingParams(max_new_tokens=12, stop_tokens=stops)
    drafter = oracle_for(prompts, greedy(12))
    engine = make_engine(num_speculative_tokens=3, drafter=drafter, num_kv_blocks=2)
    completions = run_together(engine, prompts, sampling)
    assert {c.finish_reason for c in completions} == {FinishReason.STOP}
    assert engine.context.stats().preemptions == 0


def test_drafts_that_stand_are_counted():
    engine = make_engine()
    request = engine._scheduler.find(engine.submit([1] * 9, greedy(20)))
    scheduled = ScheduledRequest(
        request_id=0, row=0, start=11, num_tokens=4, skip_tokens=0, is_prefill=False, samples=True,
        drafts=(5, 6, 7),
    )  # fmt: skip
    brought = request.note_computed(scheduled, [5, 9])
    assert brought == DecodingStats(steps=1, tokens=2, drafted_tokens=3, accepted_tokens=1)
    assert request.decoding == brought


def test_a_draft_outside_the_vocabulary_is_refused_before_the_step(rng):
    class Foreign:
        def propose(self, tokens, max_drafts):
            return [256]

    engine = make_engine(num_speculative_tokens=1, drafter=Foreign)
    request_id = engine.submit(draw_prompt(rng, 4), greedy(5))
    engine.step()
    with pytest.raises(InvalidArgumentError, match="256"):
        engine.step()
    engine.context.check_invariants()
    engine.cancel(request_id)
    assert engine.context.stats().used_blocks == 0
