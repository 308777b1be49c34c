"""The engine gives the same tokens with and without the cache, under preemption and with drafts."""

from functools import partial

import pytest
from engine_rig import (
    BLOCK,
    FailingModel,
    alone,
    draw_prompt,
    greedy,
    make_engine,
    run_checked,
    run_together,
    step_checked,
)

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import SamplingParams


def test_a_prompt_that_arrives_late_hits_what_is_being_computed(rng):
    early = draw_prompt(rng, 9 * BLOCK)
    late = [*early[: 6 * BLOCK], *draw_prompt(rng, 5)]
    engine = make_engine(max_tokens=2 * BLOCK + 3)
    engine.submit(early, greedy(3))
    step_checked(engine)
    late_id = engine.submit(late, greedy(3))
    completion = run_checked(engine)[late_id]
    assert completion.tokens == alone(late, greedy(3))
    assert completion.skipped_tokens == 6 * BLOCK


def test_chunks_end_with_blocks_where_they_can(rng):
    starts = []

    class Watcher(FailingModel):
        def forward(self, metadata, caches):
            starts.append(int(metadata.num_computed_tokens[metadata.num_decodes]))
            return super().forward(metadata, caches)

    engine = make_engine(Watcher(), max_tokens=2 * BLOCK + 5)
    engine.generate([draw_prompt(rng, 7 * BLOCK + 3)], greedy(1))
    assert starts == [0, 2 * BLOCK, 4 * BLOCK, 6 * BLOCK]


@pytest.mark.parametrize("max_tokens", [2 * BLOCK, 200])
def test_requests_that_outgrow_memory_together_are_preempted_and_resume(rng, max_tokens):
    engine = make_engine(num_kv_blocks=7, max_tokens=max_tokens)
    prompts = [draw_prompt(rng, length) for length in (20, 13, 9, 17)]
    oldest, *others = run_together(engine, prompts, greedy(3 * BLOCK))
    assert engine.context.stats().preemptions > 0
    assert oldest.computed_tokens == oldest.admission.prompt_tokens, "the oldest gave way to others"
    assert any(other.computed_tokens > other.admission.prompt_tokens for other in others)
    assert all(other.skipped_tokens == 0 for other in others), "of the first admission"


# Drafts change how many steps an answer takes, and nothing else.


class Oracle:
    """A drafter that looks up continuations: prompts with their answers."""

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
    run_together(engine, [prompt], greedy(25))
    # The prompt's step gives the first token, six steps four each.
    expected = {"steps": 6, "tokens": 24, "drafted_tokens": 18, "accepted_tokens": 18}
    assert engine.decoding == expected


def test_without_drafts_a_step_brings_a_token(rng):
    def never():
        raise AssertionError("no request can use drafts")

    engine = make_engine(drafter=never)
    run_together(engine, [draw_prompt(rng, 9), draw_prompt(rng, 3)], greedy(5))
    assert +engine.decoding == {"steps": 8, "tokens": 8}


def test_an_answer_that_repeats_itself_is_drafted_from_the_prompt(rng):
    """Prompts hold the model's own answers, and drafts are looked up in the prompts.

    A few per cent of the answers never repeat themselves; of eight, some do.
    """
    prompts = [draw_prompt(rng, 5) for _ in range(8)]
    plain = make_engine(enable_prefix_caching=False)
    answers = plain.generate(prompts, greedy(40))
    longer = [[*p, *answer.tokens] for p, answer in zip(prompts, answers, strict=True)]
    engine = make_engine(num_speculative_tokens=3)
    completions = engine.generate(longer, greedy(60))
    expected = plain.generate(longer, greedy(60))
    assert [one.tokens for one in completions] == [one.tokens for one in expected]
    assert engine.decoding["accepted_tokens"] > 0
    assert engine.decoding["tokens"] > engine.decoding["steps"]


def test_drafts_take_no_block_from_another_request(rng):
    """Drafts end at the end of a block, so no request is preempted for the room of a draft."""
    prompts = [draw_prompt(rng, BLOCK - 3) for _ in range(2)]
    stops = [alone(prompt, greedy(3))[-1] for prompt in prompts]
    sampling = SamplingParams(max_new_tokens=12, stop_tokens=stops)
    drafter = oracle_for(prompts, greedy(12))
    engine = make_engine(num_speculative_tokens=3, drafter=drafter, num_kv_blocks=2)
    completions = run_together(engine, prompts, sampling)
    assert {c.finish_reason for c in completions} == {"stop"}
    assert engine.context.stats().preemptions == 0


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
