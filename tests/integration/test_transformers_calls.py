"""Work of a call beside the model's forward: each reading and copy at most once."""

import re

import pytest
import torch
from transformers import GenerationConfig
from transformers_rig import (
    BLOCK,
    RecordingStreamer,
    assert_same,
    cached,
    make_cache,
    plain,
    skipped,
    text,
)

from mamba_cache.errors import InvalidArgumentError, ModelChangedError
from mamba_cache.integrations.transformers import fingerprint
from mamba_cache.integrations.transformers.options import OptionsReader


def counted(monkeypatch, owner, name):
    """Returns a list that gets an item at each call of a method."""
    calls, method = [], getattr(owner, name)

    def run(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, run)
    return calls


# Options.


def test_the_same_options_again_are_not_joined_again(model, monkeypatch):
    joined = counted(monkeypatch, type(model), "_prepare_generation_config")
    reader, options = OptionsReader(model), {"max_new_tokens": 3, "eos_token_id": [5, 6]}
    first = reader.read({**options, "attention_mask": torch.ones(1, 3), "streamer": object()})
    again = reader.read({**options, "attention_mask": torch.ones(1, 9), "streamer": object()})
    assert len(joined) == 1
    for _ in range(2):  # values that cannot be compared are read each time
        reader.read({"eos_token_id": torch.tensor([5, 6])})
    assert len(joined) == 3
    assert first.eos_token_ids == again.eos_token_ids == (5, 6)


def test_options_that_changed_are_read_again(model):
    reader, options = OptionsReader(model), {"eos_token_id": [5, 6]}
    reader.read({})
    model.generation_config.eos_token_id = 7
    assert reader.read({}).eos_token_ids == (7,)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=8)
    assert reader.read({}).eos_token_ids == (8,)
    assert reader.read(options).eos_token_ids == (5, 6)
    options["eos_token_id"][:] = [7]
    assert reader.read(options).eos_token_ids == (7,)
    assert reader.read({"generation_config": GenerationConfig(eos_token_id=9)}).eos_token_ids == (
        9,
    )


def test_a_given_configuration_that_changes_is_read_again(model):
    reader, config = OptionsReader(model), GenerationConfig(eos_token_id=7, pad_token_id=0)
    assert reader.read({"generation_config": config}).follows_rows
    config.num_beams = 3
    assert not reader.read({"generation_config": config}).follows_rows
    config.num_beams, config.use_cache = 1, False
    with pytest.raises(InvalidArgumentError, match="use_cache must be True"):
        reader.read({"generation_config": config})
    config.use_cache = True
    assert reader.read({"generation_config": config}).eos_token_ids == (7,)


def test_another_method_reads_the_options_again(model, monkeypatch):
    reader = OptionsReader(model)
    assert reader.read({}).follows_rows
    monkeypatch.setattr(type(model), "_sample", lambda *_, **__: None, raising=False)
    assert not reader.read({}).follows_rows


# The first token.


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_prompt_is_kept_once_before_its_first_token(cache, model, generator, num_tokens):
    prompt, saved = text(generator, 2 * BLOCK + 3), []
    streamer = RecordingStreamer(lambda: saved.append(cache.stats().saved_states))
    options = {"max_new_tokens": num_tokens}
    cached(cache, prompt, streamer=streamer, **options)
    assert saved == [0, *[1] * num_tokens]  # the prompt, then each token
    assert cache.stats().saved_states == 1
    answer = plain(model, prompt, **options).sequences[0, prompt.shape[1] :].tolist()
    assert streamer.received == [prompt[0].tolist(), *([one] for one in answer), "end"]


def test_a_streamer_that_writes_to_the_first_token_changes_no_prompt(cache, model, generator):
    class Writes(RecordingStreamer):
        def put(self, value):
            super().put(value)
            if value.dim() == 1:  # the value for the prompt is the prompt tensor itself
                value.fill_(7)

    prompt = text(generator, 2 * BLOCK + 3)
    expected = plain(model, prompt)
    assert_same(expected, cached(cache, prompt.clone(), streamer=Writes()))


# Weights.


def test_the_first_prompt_after_a_reset_waits_for_no_reading_of_the_weights(
    cache, generator, monkeypatch
):
    cached(cache, text(generator, 2 * BLOCK))
    cache.reset()
    read = counted(monkeypatch, fingerprint._Weights, "measure")
    cached(cache, text(generator, 2 * BLOCK))
    assert read == []


@pytest.mark.parametrize("weights_check", ["full", "sample", "off"])
def test_weights_may_change_while_nothing_is_cached(model, generator, weights_check):
    """A cache just made or reset has no entries that a change could invalidate."""
    cache = make_cache(model, weights_check=weights_check)
    prompt = text(generator, 2 * BLOCK + 3)
    for factor in (2, 0.5):
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(factor)
        assert_same(plain(model, prompt), cached(cache, prompt))
        assert skipped(cache, lambda: assert_same(plain(model, prompt), cached(cache, prompt)))
        with torch.no_grad():
            model.get_input_embeddings().weight[5].mul_(3)
        with pytest.raises(ModelChangedError, match="call reset"):
            cached(cache, prompt)
        cache.reset()


def test_a_cache_shows_its_contents_and_the_tokens_last_skipped(model, generator):
    prompt = text(generator, 4 * BLOCK + 3)
    with make_cache(model) as cache:
        assert cache.last_skipped_tokens == 0
        cached(cache, prompt)
        assert cache.last_skipped_tokens == 0
        for call in (cached, lambda c, p: c.generate_batch(p.tolist(), max_new_tokens=1)):
            call(cache, prompt)
            assert cache.last_skipped_tokens == 4 * BLOCK
        cache.prefill(prompt[:, : BLOCK - 1])
        assert cache.last_skipped_tokens == 0
        assert re.fullmatch(
            r"<PrefixCache of NemotronHForCausalLM on cpu: \d+ of [\d,]+ states and \d+ KV blocks "
            r"of 8 tokens are cached; 4 requests, 50% hits, 64 tokens skipped>",
            repr(cache),
        )
        cache.prefill(prompt)
        cache.reset()
        assert cache.last_skipped_tokens == 0
    assert repr(cache) == "<PrefixCache of NemotronHForCausalLM, closed>"
