"""Single interrupts of an engine, by name; ``tests/property/test_interrupts.py`` has many lines."""

import pytest
from engine_rig import MODEL, alone, draw_prompt, greedy, make_engine

from mamba_cache.errors import (
    ConcurrentUseError,
    InvalidArgumentError,
    PoisonedError,
    UnknownRequestError,
)


def strike_after(monkeypatch, owner, name, *, error=KeyboardInterrupt):
    """Has a method of ``owner`` do its work and then be interrupted, once."""
    method = getattr(owner, name)

    def run(*args, **kwargs):
        monkeypatch.setattr(owner, name, method)
        method(*args, **kwargs)
        raise error

    monkeypatch.setattr(owner, name, run)


def run_to_the_end(engine, told):
    ends = {}
    while engine.num_requests:
        for event in engine.step():
            told.setdefault(event.request_id, []).append(event.token)
            if event.finished:
                assert event.request_id not in ends
                ends[event.request_id] = event.completion
    return ends


@pytest.fixture
def engine(rng):
    engine = make_engine()
    engine.prompt = draw_prompt(rng, 19)
    engine.submit(engine.prompt, greedy(4), request_id="x")
    return engine


@pytest.mark.parametrize("num_steps", range(4))
def test_tokens_that_were_committed_are_told_by_the_next_step(engine, monkeypatch, num_steps):
    """They were in the context and not in the answer, which went on without them."""
    told = {}
    for _ in range(num_steps):
        told.setdefault("x", []).extend(event.token for event in engine.step())
    strike_after(monkeypatch, engine.context, "commit_step")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    before = engine.context.stats().computed_tokens
    ends = run_to_the_end(engine, told)
    assert told["x"] == list(ends["x"].tokens) == list(alone(engine.prompt, greedy(4)))
    if num_steps == 3:  # the last token was there, and nothing was computed after it
        assert engine.context.stats().computed_tokens == before


@pytest.mark.parametrize("num_steps", range(4))
def test_what_nobody_got_is_told_again(engine, monkeypatch, num_steps):
    told = {}
    for _ in range(num_steps):
        told.setdefault("x", []).extend(event.token for event in engine.step())
    strike_after(monkeypatch, engine, "_mark_told")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.num_requests == 1
    with pytest.raises(InvalidArgumentError, match="in use"):
        engine.submit([1], greedy(1), request_id="x")
    ends = run_to_the_end(engine, told)
    assert told["x"] == list(ends["x"].tokens) == list(alone(engine.prompt, greedy(4)))
    engine.submit([1], greedy(1), request_id="x")


def test_the_end_of_one_that_is_cancelled_is_not_told(engine, monkeypatch):
    for _ in range(3):
        engine.step()
    strike_after(monkeypatch, engine, "_mark_told")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.cancel("x")
    assert engine.num_requests == 0
    assert engine.step() == []
    with pytest.raises(UnknownRequestError):
        engine.cancel("x")


def test_a_step_is_not_in_flight_for_ever(engine, monkeypatch):
    """Every later step raised StepOrderError."""
    strike_after(monkeypatch, engine.context, "begin_step")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    told = {}
    run_to_the_end(engine, told)
    assert told["x"] == list(alone(engine.prompt, greedy(4)))


def test_an_id_is_not_in_use_for_ever(engine, monkeypatch):
    strike_after(monkeypatch, engine, "_add")
    with pytest.raises(KeyboardInterrupt):
        engine.submit(engine.prompt, greedy(2), request_id="y")
    assert engine.num_requests == 1
    engine.submit(engine.prompt, greedy(2), request_id="y")


def test_a_request_half_cancelled_is_gone(engine, monkeypatch):
    engine.step()
    finish = engine.context.finish

    def interrupted(request_id):
        monkeypatch.setattr(engine.context, "finish", finish)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.context, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.cancel("x")
    assert engine.num_requests == len(engine.context.statuses()) == 0
    engine.submit(engine.prompt, greedy(4), request_id="x")
    told = {}
    run_to_the_end(engine, told)
    assert told["x"] == list(alone(engine.prompt, greedy(4)))


def test_the_failure_of_a_request_is_told_though_its_step_was_interrupted(rng, monkeypatch):
    engine = make_engine(num_kv_blocks=2)
    engine.submit(draw_prompt(rng, 40), greedy(4), request_id="large")
    strike_after(monkeypatch, engine._scheduler, "_make_room")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.num_requests == 1
    [event] = engine.step()
    assert event.completion.error.detail == "request 'large' does not fit even alone"
    assert engine.num_requests == 0


def test_a_stream_that_is_left_early_loses_nothing(rng):
    prompts = {name: draw_prompt(rng, 9) for name in "abc"}
    engine, told = make_engine(), {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.submit(prompt, greedy(3), request_id=name)
    while engine.num_requests:
        for event in engine.stream():  # one event of each stream
            told[event.request_id].append(event.token)
            break
    assert told == {name: list(alone(prompt, greedy(3))) for name, prompt in prompts.items()}


def test_a_context_that_is_poisoned_poisons_the_engine_until_its_reset(engine, monkeypatch):
    def broken(*_, **__):
        raise OSError("broken")

    with monkeypatch.context() as patches:
        patches.setattr(engine.context.kv_block_allocator, "register_kv_block_hashes", broken)
        with pytest.raises(OSError, match="broken"):
            engine.step()
    for call in (
        engine.step,
        lambda: engine.submit([1], greedy(1)),
        lambda: engine.cancel("x"),
        lambda: next(engine.stream()),
    ):
        with pytest.raises(PoisonedError, match=r"reset\(\) makes everything new"):
            call()
    engine.reset()
    assert engine.num_requests == 0
    [done] = engine.generate([engine.prompt], greedy(4))
    assert done.tokens == alone(engine.prompt, greedy(4))


def test_generate_of_a_poisoned_engine_says_what_broke_it(rng, monkeypatch):
    engine = make_engine()

    def broken(*_, **__):
        raise OSError("broken")

    monkeypatch.setattr(engine.context.kv_block_allocator, "register_kv_block_hashes", broken)
    with pytest.raises(OSError, match="broken"):
        engine.generate([draw_prompt(rng, 20)], greedy(2))
    monkeypatch.undo()
    engine.reset()
    assert len(engine.generate([draw_prompt(rng, 20)], greedy(2))) == 1


def test_a_call_from_within_a_step_is_refused_and_does_no_harm(rng):
    class Meddling:
        config, dtype, device = MODEL.config, MODEL.dtype, MODEL.device
        refused = 0

        def forward(self, metadata, caches):
            for call in (engine.step, lambda: engine.cancel("x")):
                with pytest.raises(ConcurrentUseError, match="from within it"):
                    call()
                self.refused += 1
            return MODEL.forward(metadata, caches)

    engine, prompt = make_engine(Meddling()), draw_prompt(rng, 9)
    engine.submit(prompt, greedy(3), request_id="x")
    told = {}
    run_to_the_end(engine, told)
    assert told["x"] == list(alone(prompt, greedy(3)))
    assert engine._model.refused


def test_the_context_says_how_far_its_requests_are(engine):
    context = engine.context
    assert context.statuses() == {}
    engine.step()
    assert context.statuses() == {"x": context.status("x")}
    first = context.output("x")
    engine.step()
    assert context.output("x")[:1] == first
    assert context.output("x", 1) == context.output("x")[1:]
    progress = context.progress("x")
    assert (progress.num_computed, progress.num_generated) == (20, 2)
    assert progress.status is context.status("x")
    for call in (context.output, context.progress):
        with pytest.raises(UnknownRequestError):
            call("nobody")
    with pytest.raises(InvalidArgumentError, match="start"):
        context.output("x", -1)
