"""Drafts change how many steps an answer takes, and nothing else."""

from functools import partial

import numpy as np
import pytest
import torch
from engine_rig import (
    BLOCK,
    MODEL,
    FailingModel,
    alone,
    draw_prompt,
    greedy,
    make_engine,
    prompts_with_shared_prefixes,
    run_together,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.context import ScheduledRequest
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import DecodingStats, FinishReason, NgramDrafter, SamplingParams


class Oracle:
    """Knows how some sequences go on, and errs now and then on purpose.

    Args:
        known: Prompts with their answers.
        wrong: The part of its drafts that it spoils.
    """

    def __init__(self, known, wrong=0.0):
        self.known = known
        self.wrong = wrong
        self.rng = np.random.default_rng(len(known))

    def propose(self, tokens, max_drafts):
        end = len(tokens)
        for sequence in self.known:
            if len(sequence) > end and sequence[:end] == list(tokens):
                drafts = np.array(sequence[end : end + max_drafts])
                spoilt = self.rng.random(len(drafts)) < self.wrong
                return ((drafts + spoilt) % 256).tolist()
        return []


class Wild:
    """Guesses at random, more than it is asked for."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def propose(self, tokens, max_drafts):
        return self.rng.integers(256, size=self.rng.integers(2 * max_drafts + 1)).tolist()


def oracle_for(prompts, sampling, wrong=0.0):
    return partial(Oracle, [[*p, *alone(p, sampling)] for p in prompts], wrong)


def drafter_for(kind, prompts, sampling):
    if kind == "oracle":
        return oracle_for(prompts, sampling)
    if kind == "mixed":
        return oracle_for(prompts, sampling, wrong=0.3)
    return {"ngram": partial(NgramDrafter, 3, 1), "wild": Wild}[kind]


class LogitsKeeper:
    """Keeps the last logits that its model gave."""

    def __init__(self):
        self.config, self.dtype, self.device = MODEL.config, MODEL.dtype, MODEL.device

    def forward(self, metadata, caches):
        self.logits = MODEL.forward(metadata, caches)
        return self.logits


@pytest.mark.parametrize(
    ("kind", "temperature"), [("ngram", 0.0), ("wild", 1.2), ("oracle", 1.2), ("mixed", 0.0)]
)
def test_every_drafter_leaves_every_token(rng, kind, temperature):
    sampling = SamplingParams(max_new_tokens=3 * BLOCK, temperature=temperature, seed=4)
    phrase = draw_prompt(rng, 6)
    prompts = [[*phrase, *draw_prompt(rng, 3), *phrase, *draw_prompt(rng, n)] for n in (0, 5, 9)]
    drafter = drafter_for(kind, prompts, sampling)
    engine = make_engine(num_speculative_tokens=3, drafter=drafter, max_tokens=40)
    completions = run_together(engine, prompts, sampling)
    if kind in ("oracle", "mixed"):
        assert all(c.decoding.accepted_tokens > 0 for c in completions)
    if kind != "oracle":
        drafted = engine.decoding.drafted_tokens
        assert engine.decoding.accepted_tokens < drafted or (temperature and not drafted)


def test_right_drafts_save_steps(rng):
    prompt = draw_prompt(rng, 11)
    drafter = oracle_for([prompt], greedy(25))
    engine = make_engine(num_speculative_tokens=3, drafter=drafter)
    [completion] = run_together(engine, [prompt], greedy(25))
    # The prompt's step gives the first token, six steps four each.
    expected = DecodingStats(steps=6, tokens=24, drafted_tokens=18, accepted_tokens=18)
    assert completion.decoding == engine.decoding == expected
    assert (expected.tokens_per_step, expected.acceptance_rate) == (4.0, 1.0)


def test_without_drafts_a_step_brings_a_token(rng):
    def never():
        raise AssertionError("nobody can use drafts")

    engine = make_engine(drafter=never)
    completions = run_together(engine, [draw_prompt(rng, 9), draw_prompt(rng, 3)], greedy(5))
    assert [c.decoding for c in completions] == [DecodingStats(steps=4, tokens=4)] * 2
    assert (engine.decoding.steps, engine.decoding.tokens_per_step) == (8, 1.0)
    assert engine.decoding.acceptance_rate == DecodingStats().tokens_per_step == 0.0


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


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_token_among_right_drafts_ends_the_answer(rng, place):
    prompt = draw_prompt(rng, 2 * BLOCK + 5)
    tokens = alone(prompt, greedy(12))
    sampling = SamplingParams(max_new_tokens=12, stop_tokens=(tokens[place],))
    drafter = oracle_for([prompt], greedy(12))
    engine = make_engine(num_speculative_tokens=3, drafter=drafter)
    [completion] = run_together(engine, [prompt], sampling)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.tokens == tokens[: tokens.index(tokens[place]) + 1]
    [again] = run_together(engine, [[*prompt, *completion.tokens, 7]], greedy(4))
    assert again.skipped_tokens >= 2 * BLOCK


@pytest.mark.parametrize("max_new_tokens", range(1, 8))
def test_no_answer_is_longer_than_asked_for(rng, max_new_tokens):
    prompt = draw_prompt(rng, 10)
    drafter = oracle_for([prompt], greedy(20))
    engine = make_engine(num_speculative_tokens=3, drafter=drafter)
    [completion] = run_together(engine, [prompt], greedy(max_new_tokens))
    assert len(completion.tokens) == max_new_tokens


@pytest.mark.parametrize("prompt_tokens", range(24, 33))
def test_drafts_end_where_the_longest_sequence_does(rng, prompt_tokens):
    prompt = draw_prompt(rng, prompt_tokens)
    drafter = oracle_for([prompt], greedy(20))
    engine = make_engine(num_speculative_tokens=3, drafter=drafter, max_sequence_length=32)
    [completion] = engine.generate([prompt], greedy(20))
    assert completion.tokens == alone(prompt, greedy(33 - prompt_tokens))
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", ["oracle", "mixed", "wild"])
def test_the_next_turn_resumes_from_states_saved_inside_drafts(rng, kind):
    """A boundary crossed by accepted drafts has the state of just that boundary."""
    model, history, reusable = LogitsKeeper(), draw_prompt(rng, 3 * BLOCK), 0
    sampling = greedy(2 * BLOCK + 3)
    known = []
    drafter = Wild if kind == "wild" else partial(Oracle, known, 0.3 * (kind == "mixed"))
    engine = make_engine(model, num_speculative_tokens=3, drafter=drafter)
    for _ in range(3):
        known[:] = [[*history, *alone(history, sampling)]]
        [completion] = run_together(engine, [history], sampling)
        assert completion.skipped_tokens == reusable
        history = [*history, *completion.tokens]
        reusable = (len(history) - 1) // BLOCK * BLOCK  # the last token is sampled, not computed
        history += draw_prompt(rng, 3)
    [hit] = run_together(engine, [history], greedy(1))
    resumed = model.logits.clone()
    make_engine(model, enable_prefix_caching=False).generate([history], greedy(1))
    assert hit.skipped_tokens == reusable
    torch.testing.assert_close(resumed, model.logits, rtol=0, atol=1e-10)


def test_more_drafts_than_a_step_holds_are_left_out(rng):
    """Prompts of one token become requests that all might bring drafts."""
    prompts = [draw_prompt(rng, 1) for _ in range(8)]
    drafter = oracle_for(prompts, greedy(9))
    engine = make_engine(num_speculative_tokens=3, drafter=drafter, max_tokens=10)
    run_together(engine, prompts, greedy(9))
    assert engine.decoding.accepted_tokens > 0


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


def test_a_prompt_is_computed_beside_requests_with_drafts(rng):
    """Its chunks take what the drafts leave of the step's tokens."""
    engine = make_engine(num_speculative_tokens=3, drafter=Wild, max_tokens=10)
    engine.submit(draw_prompt(rng, 3), greedy(40), request_id="decoding")
    engine.step()
    engine.submit(draw_prompt(rng, 5 * BLOCK), greedy(1), request_id="prompt")
    finished = [event.request_id for event in engine.stream() if event.finished]
    assert finished == ["prompt", "decoding"]


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


@examples(20)
@given(
    prompts=prompts_with_shared_prefixes(4),
    sampling=st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 2 * BLOCK),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        stop_tokens=st.lists(st.integers(0, 255), max_size=9),
    ),
    kind=st.sampled_from(["ngram", "wild", "oracle", "mixed"]),
    settings=st.fixed_dictionaries(
        {
            "block_size_tokens": st.sampled_from([8, 12]),
            "num_speculative_tokens": st.integers(1, 5),
            "max_requests": st.integers(1, 4),
            "max_tokens": st.sampled_from([5, 17, 40, 200]),
            "num_kv_blocks": st.integers(12, 24),
            "max_slots": st.sampled_from([0, 1, 4, 32]),
            "max_wait_steps": st.integers(0, 8),
            "eviction_policy": st.sampled_from(["lru", "ref_zero"]),
        }
    ),
    failing_steps=st.sets(st.integers(1, 20), max_size=2),
    new_turn=st.lists(st.integers(0, 3), min_size=1, max_size=BLOCK),
)
def test_no_mix_of_drafts_and_requests_changes_a_token(
    prompts, sampling, kind, settings, failing_steps, new_turn
):
    """Hits, chunks, preemption, eviction, failing steps; then the next turn of each, from hits."""
    most = settings["block_size_tokens"] // 2 - 1
    settings["num_speculative_tokens"] = min(most, settings["num_speculative_tokens"])
    model, drafter = FailingModel(*failing_steps), drafter_for(kind, prompts, sampling)
    engine = make_engine(model, drafter=drafter, **settings)
    completions = run_together(engine, prompts, sampling)
    turns = [
        [*prompt, *completion.tokens, *new_turn]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    run_together(engine, turns, greedy(3))
