"""Sampling of tokens: checks of parameters, and draws that depend on seed and number only."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import SamplingParams, sample


@pytest.fixture
def logits(generator):
    return torch.randn(50, generator=generator)


def draws(logits, count, **params):
    return [sample(logits, SamplingParams(**params), n) for n in range(count)]


def test_draws_follow_the_softmax(logits):
    count = 4000
    found = np.bincount(draws(logits, count, temperature=0.7), minlength=50) / count
    expected = (logits.double() / 0.7).softmax(0).numpy()
    assert np.abs(found - expected).max() < 0.05


def test_top_k_draws_among_the_k_likeliest(logits):
    likeliest = set(logits.topk(3).indices.tolist())
    assert set(draws(logits, 200, temperature=5.0, top_k=3)) == likeliest


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, None])
def test_a_token_of_probability_0_is_never_drawn(logits, monkeypatch, uniform):
    if uniform is not None:
        fixed = SimpleNamespace(random=lambda: uniform)
        monkeypatch.setattr(np.random, "default_rng", lambda _: fixed)
    logits[::2] = logits[-3:] = -torch.inf
    tokens = draws(logits, 300, temperature=9.0)
    assert all(token % 2 and token < 47 for token in tokens)


def test_draws_depend_on_seed_and_number_alone(logits):
    first = draws(logits, 40, temperature=2.0, seed=1)
    assert first == draws(logits, 40, temperature=2.0, seed=1)
    assert first == draws(logits, 40, temperature=2.0, seed=1, top_k=99)  # above the vocabulary
    assert first != draws(logits, 40, temperature=2.0, seed=2)
    assert len(set(first)) > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_broken_logit_is_refused(logits, value, temperature):
    logits[7] = value
    with pytest.raises(InvalidArgumentError, match=rf"logits.*{value}"):
        sample(logits, SamplingParams(temperature=temperature), 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_leave_no_token_are_refused(logits, temperature):
    with pytest.raises(InvalidArgumentError, match="-inf"):
        sample(torch.full_like(logits, -torch.inf), SamplingParams(temperature=temperature), 0)


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-308, 1e-3])
@pytest.mark.parametrize("top_k", [None, 1, 5])
def test_the_lowest_temperatures_take_the_likeliest(logits, temperature, top_k):
    likeliest = int(logits.argmax())
    assert draws(1e3 * logits, 20, temperature=temperature, top_k=top_k) == [likeliest] * 20


def test_the_highest_temperature_draws_among_all(logits):
    tokens = draws(logits, 400, temperature=1.7e308)
    assert min(tokens) >= 0
    assert len(set(tokens)) > 40


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_new_tokens", 0, ">= 1"),
        ("max_new_tokens", 2.0, "int"),
        ("temperature", -0.1, r"\[0, "),
        ("temperature", float("nan"), r"\[0, "),
        ("temperature", float("inf"), r"\[0, "),
        ("top_k", 0, ">= 1"),
        ("seed", -1, ">= 0"),
        ("temperature", True, "number"),
        ("temperature", 10**400, r"\[0, "),
        ("stop_tokens", (3, -1), ">= 0"),
        ("stop_tokens", "5", "ints"),
        ("stop_tokens", (3.0,), "ints"),
    ],
)
def test_bad_parameters_are_refused(name, value, allowed):
    with pytest.raises(InvalidArgumentError, match=rf"{name}.*{allowed}"):
        SamplingParams(**{name: value})
