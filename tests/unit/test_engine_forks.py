"""Several answers to one prompt equal those of separate requests."""

from dataclasses import replace

import pytest
from engine_rig import BLOCK, alone, draw_prompt, greedy, make_engine, run_checked

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=11, temperature=1.5, top_k=40, seed=3)


def check_answers(done, prompt, n, sampling=SAMPLING):
    """Each answer equals that of a separate request with its seed."""
    for index in range(n):
        name = ("x", index) if index else "x"
        wanted = alone(prompt, replace(sampling, seed=sampling.seed + index))
        assert done[name].tokens == wanted, name


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("length", [1, 2 * BLOCK, 2 * BLOCK + 3])
def test_the_prompt_is_computed_once(rng, length, drafts):
    engine, prompt = make_engine(num_speculative_tokens=drafts), draw_prompt(rng, length)
    assert engine.submit(prompt, SAMPLING, n=5, request_id="x") == "x"
    assert engine.num_requests == 5
    done = run_checked(engine)
    check_answers(done, prompt, 5)
    assert len({completion.tokens for completion in done.values()}) == 5
    assert engine.context.stats().forks == 4
    assert engine.context.stats().requests == 1
    for name, completion in done.items():
        computed = (length, 0) if name == "x" else (0, length)
        assert (completion.computed_tokens, completion.skipped_tokens) == computed
        assert completion.ttft_seconds > 0


def test_the_first_tokens_are_returned_together(rng):
    engine = make_engine()
    engine.submit(draw_prompt(rng, 9), SAMPLING, n=3, request_id="x")
    events = engine.step()
    assert [event.request_id for event in events] == ["x", ("x", 1), ("x", 2)]


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_the_first_answer_may_end_at_its_first_token(rng, max_new_tokens):
    """The request is forked before it is removed."""
    engine, prompt = make_engine(), draw_prompt(rng, 9)
    sampling = replace(SAMPLING, max_new_tokens=max_new_tokens)
    engine.submit(prompt, sampling, n=3, request_id="x")
    check_answers(run_checked(engine), prompt, 3, sampling)
    stopped = replace(SAMPLING, stop_tokens=alone(prompt, SAMPLING)[:1])
    engine.submit(prompt, stopped, n=3, request_id="x")
    done = run_checked(engine)
    check_answers(done, prompt, 3, stopped)
    assert done["x"].finish_reason == "stop"
    assert engine.context.stats().forks == 4


def test_an_answer_that_is_cancelled_before_the_first_token_is_not_forked(rng):
    engine = make_engine()
    engine.submit(draw_prompt(rng, 9), SAMPLING, n=3, request_id="x")
    engine.cancel(("x", 1))
    assert set(run_checked(engine)) == {"x", ("x", 2)}
    assert engine.context.stats().forks == 1


def test_refused_numbers_of_answers(rng):
    engine, prompt = make_engine(), draw_prompt(rng, 5)
    for bad in (0, -1, 1.5, True, None, "2"):
        with pytest.raises(InvalidArgumentError, match="n must be an int >= 1"):
            engine.submit(prompt, SAMPLING, n=bad)
    with pytest.raises(InvalidArgumentError, match="n must be 1, got 2"):
        engine.submit(prompt, greedy(3), n=2)
    engine.submit(prompt, SAMPLING, request_id=("x", 1))
    with pytest.raises(InvalidArgumentError, match=r"request id \('x', 1\) is in use"):
        engine.submit(prompt, SAMPLING, n=2, request_id="x")
    assert engine.num_requests == 1
    engine.submit(prompt, SAMPLING, n=2, request_id="y")
    assert len(run_checked(engine)) == 3


def test_an_interrupt_before_the_forks_leaves_requests_of_their_own(rng, monkeypatch):
    engine, prompt = make_engine(), draw_prompt(rng, 12)
    engine.submit(prompt, SAMPLING, n=3, request_id="x")
    with monkeypatch.context() as patches:

        def interrupted(*_, **__):
            raise KeyboardInterrupt

        patches.setattr(engine.context, "fork", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    done = run_checked(engine)
    check_answers(done, prompt, 3)
    assert engine.context.stats().forks == 0
