"""The engine's calls: events, ends, cancelling, bad input, and the state after a failure."""

import textwrap

import pytest
import torch
from engine_rig import (
    BLOCK,
    MODEL,
    alone,
    draw_prompt,
    greedy,
    make_engine,
    run_checked,
    step_checked,
)

from mamba_cache.config import CacheConfig
from mamba_cache.errors import (
    InvalidArgumentError,
    SequenceLengthError,
    StepOrderError,
    UnknownRequestError,
)
from mamba_cache.reference import (  # noqa: F401 - a fixture
    Engine,
    HybridModel,
    HybridModelConfig,
    SamplingParams,
)


def test_events_have_tokens_and_the_end(rng):
    engine = make_engine()
    request_id = engine.submit(draw_prompt(rng, 5), greedy(3))
    events = list(engine.stream())
    assert [event.completion is not None for event in events] == [False, False, True]
    end = events[-1].completion
    assert end.tokens == tuple(event.token for event in events)
    assert (end.request_id, end.finish_reason) == (request_id, "length")
    assert end.ttft_seconds > 0
    assert engine.num_requests == 0


def test_the_next_step_returns_the_events_missed_by_an_interrupted_stream(rng):
    engine = make_engine()
    for name in "ab":
        engine.submit(draw_prompt(rng, 5), greedy(1), request_id=name)
    first = next(engine.stream())
    assert engine.num_requests == 1
    assert {first.request_id, *(event.request_id for event in engine.step())} == {"a", "b"}


BAD_CALLS = {
    "empty prompt": (lambda e: e.submit([]), InvalidArgumentError, "empty"),
    "past the vocabulary": (lambda e: e.submit([256]), InvalidArgumentError, "vocab_size"),
    "negative token": (lambda e: e.submit([-1]), InvalidArgumentError, "-1"),
    "nested prompt": (lambda e: e.submit([[1]]), InvalidArgumentError, r"\[1\]"),
    "long prompt": (lambda e: e.submit([1] * 257), SequenceLengthError, "257"),
    "unhashable id": (lambda e: e.submit([1], request_id=[]), InvalidArgumentError, "hashable"),
    "id with a list in it": (
        lambda e: e.submit([1], request_id=([],)), InvalidArgumentError, r"hashable.*\(\[\],\)"
    ),
    "sampling of a dict": (
        lambda e: e.submit([1], {"n": 3}), InvalidArgumentError, "sampling must be a .*{'n': 3}"
    ),
    "sampling of a tuple": (lambda e: e.submit([1], ()), InvalidArgumentError, r"sampling.*\(\)"),
    "id that is not there": (lambda e: e.cancel("never"), UnknownRequestError, "'never'"),
    "id to cancel": (lambda e: e.cancel([1]), InvalidArgumentError, r"hashable.*\[1\]"),
    "id in use": (
        lambda e: e.submit([1], request_id="good"), InvalidArgumentError, "'good' is in use"
    ),
    "busy": (lambda e: e.generate([[1]]), StepOrderError, "this one has 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused_and_change_nothing(rng, name):
    call, error, message = BAD_CALLS[name]
    engine = make_engine()
    engine.submit(draw_prompt(rng, 20), greedy(2), request_id="good")
    with pytest.raises(error, match=message):
        call(engine)
    assert engine.num_requests == 1
    assert list(run_checked(engine)) == ["good"]


def test_the_vocabulary_is_the_models_if_none_is_given():
    engine = make_engine(vocab_size=None)
    engine.submit([255], greedy(1), request_id="good")
    # A token past the model's embeddings would make every later step fail.
    with pytest.raises(InvalidArgumentError, match="256"):
        engine.submit([256])
    assert list(run_checked(engine)) == ["good"]


def test_ids_past_a_smaller_vocabulary_are_never_generated(rng):
    prompt = draw_prompt(rng, 20) * 3
    small = [token % 16 for token in prompt]
    sampling = SamplingParams(max_new_tokens=30, temperature=9.0)
    [completion] = make_engine(vocab_size=16).generate([small], sampling)
    assert max(completion.tokens) < 16 <= max(alone(small, sampling))


@pytest.mark.parametrize(
    ("name", "value", "most"), [("ssm_chunk_size", 8, 4), ("vocab_size", 257, 256)]
)
def test_a_cache_that_the_model_cannot_serve_is_refused(name, value, most):
    with pytest.raises(InvalidArgumentError, match=f"{name} is {value}.*{most}"):
        make_engine(**{name: value})


def test_the_engines_own_example_runs(rng, capsys):
    example = textwrap.dedent(Engine.__doc__.split("Example::")[1].split("One thread")[0])
    prompt_tokens = draw_prompt(rng, 200)  # several chunks of 64, and more than a block
    exec(example, globals() | {"prompt_tokens": prompt_tokens})
    assert len(capsys.readouterr().out.split()) == 32


class LogitsOf:
    """A model that replaces the logits of one step."""

    def __init__(self, value):
        self.config, self.dtype, self.device = MODEL.config, MODEL.dtype, MODEL.device
        self.value = value

    def forward(self, metadata, caches):
        logits = MODEL.forward(metadata, caches)
        if self.value is not None:
            logits[-1], self.value = self.value, None
        return logits


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_cannot_be_sampled_take_the_step_back(rng, value):
    engine = make_engine(LogitsOf(value))
    prompts = [draw_prompt(rng, 12) for _ in range(2)]
    ids = [engine.submit(prompt, greedy(3)) for prompt in prompts]
    with pytest.raises(InvalidArgumentError, match="logits"):
        step_checked(engine)
    done = run_checked(engine)
    assert [done[i].tokens for i in ids] == [alone(prompt, greedy(3)) for prompt in prompts]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((MODEL, None), "config must be a CacheConfig, got None"),
        ((None, CacheConfig(num_kv_blocks=4, max_slots=1)), "model must be a LanguageModel, got N"),
        ((torch.nn.Linear(1, 1), CacheConfig(num_kv_blocks=4, max_slots=1)), "got Linear; around"),
    ],
)
def test_an_engine_needs_a_model_and_settings(given, said):
    """Regression: AttributeError was raised."""
    with pytest.raises(InvalidArgumentError, match=said):
        Engine(*given)
    with pytest.raises(InvalidArgumentError, match=r"max_wait_steps.*-1"):
        make_engine(max_wait_steps=-1)
    engine = make_engine()
    for prompts, message in ((5, r"prompts.*5"), ([[1], []], "empty")):
        with pytest.raises(InvalidArgumentError, match=message):
            engine.generate(prompts)
        assert engine.num_requests == 0


def test_a_request_that_fits_alone_does_not_fail(rng):
    """Found by search: the request had its own copy of a cached block. Its next block was a child
    of the other copy, which could not be evicted therefore."""
    engine = make_engine(num_kv_blocks=3, max_wait_steps=0)
    prompt = draw_prompt(rng, BLOCK)
    engine.submit(prompt, greedy(1), request_id="short")
    engine.submit([*prompt, 7], greedy(BLOCK + 1), request_id="long")
    done = run_checked(engine)
    assert done["long"].tokens == alone([*prompt, 7], greedy(BLOCK + 1))
