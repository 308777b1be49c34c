"""A model that changes between two calls: the cache gives the changed model's answer."""

import pytest
import torch
from changes_rig import check_change
from model_changes import KINDS, norms
from transformers_rig import (
    BLOCK,
    GREEDY,
    RecordingStreamer,
    assert_same,
    cached,
    generate_about_an_image,
    make_cache,
    make_model,
    make_multimodal_model,
    plain,
    text,
)

from mamba_cache.errors import ModelChangedError
from mamba_cache.integrations.transformers.fingerprint import global_settings


@pytest.mark.parametrize("name", KINDS)
def test_a_prefix_of_the_model_before_is_never_served(name, generator):
    kind = KINDS[name]
    model = make_model(kind.family)
    kind.prepare(model)
    check_change(kind, model, generator)


@pytest.mark.parametrize(
    "name",
    [
        "optimizer step: AdamW, fused",
        "write through .data",
        "two values swapped",
        "write to an inference tensor",
        "a buffer that is not saved: rotary frequencies",
        "a parameter replaced",
    ],
)
def test_a_sample_notices_changes_of_small_weights_too(name, generator):
    kind = KINDS[name]
    model = make_model(kind.family)
    kind.prepare(model)
    check_change(kind, model, generator, weights_check="sample")


@pytest.mark.parametrize("size", [6, 24])
def test_a_sliding_window_of_another_size_is_noticed(size, generator):
    """A hit used the window from the cache's construction, and its logits differed."""
    model = make_model("inkling")
    cache, prompt = make_cache(model), text(generator, 8 * BLOCK)
    cache.generate(prompt, **GREEDY)
    model.config.sliding_window_size = size
    for module in model.modules():
        if "sliding_window" in vars(module):
            module.sliding_window = size
    for _ in range(2):
        with pytest.raises(ModelChangedError, match=rf"sliding window had 12 .* {size} now"):
            cache.generate(prompt, **GREEDY)
    cache.check_invariants()
    again = make_cache(model)
    for _ in range(2):
        assert_same(again.generate(prompt, **GREEDY), model.generate(prompt, **GREEDY))


@pytest.mark.parametrize("puts_before", [0, 3])
def test_an_answer_during_which_a_setting_changed_is_not_kept(generator, puts_before):
    """It changes as the streamer gets the prompt, before any forward, or some tokens later."""
    model = make_model("nemotron_h")
    cache = make_cache(model)
    prompt = text(generator, 2 * BLOCK + 3)
    answer = plain(model, prompt, max_new_tokens=3 * BLOCK).sequences
    norm = norms(model)[0]
    midway = RecordingStreamer(lambda: setattr(norm, "variance_epsilon", 0.5), at=puts_before + 1)
    cache.generate(prompt, streamer=midway, **{**GREEDY, "max_new_tokens": 3 * BLOCK})
    norm.variance_epsilon = 1e-5
    for ids in (prompt, answer):
        assert_same(plain(model, ids), cached(cache, ids))
    if puts_before:
        assert cache.stats().hits == 2


@pytest.mark.parametrize("weights_check", ["full", "sample", "off"])
def test_what_a_multimodal_model_keeps_of_a_generation_is_no_weight(weights_check, generator):
    """``rope_deltas`` are set by each generation, and differ after an image."""
    model = make_multimodal_model()
    cache = make_cache(model, weights_check=weights_check)
    prompt = text(generator, 2 * BLOCK + 3)
    expected = plain(model, prompt)
    for _ in range(3):
        assert_same(expected, cached(cache, prompt))
    assert cache.stats().hits == 2
    generate_about_an_image(model)
    assert model.model.rope_deltas.any()
    assert cache.prefill(text(generator, 2 * BLOCK)).get_seq_length() == 2 * BLOCK
    generate_about_an_image(model)
    assert_same(expected, cached(cache, prompt))
    assert cache.stats().hits == 3


@pytest.mark.parametrize("weights_check", ["full", "sample", "off"])
def test_what_a_forward_rewrites_is_neither_a_setting_nor_a_weight(weights_check, generator):
    """A module counts its calls and keeps its last input, in a buffer and as an attribute."""
    model = make_model("nemotron_h")
    norm = norms(model)[0]
    norm.register_buffer("seen", torch.zeros(3), persistent=False)
    norm.calls, norm.last = 0, None

    class Counting(type(norm)):
        def forward(self, x):
            self.calls += 1
            self.last = x.detach()
            self.seen.copy_(x.detach().flatten()[:3])
            return super().forward(x)

    norm.__class__ = Counting
    cache = make_cache(model, weights_check=weights_check)
    prompt = text(generator, 2 * BLOCK + 3)
    for _ in range(3):
        assert_same(plain(model, prompt), cached(cache, prompt))
    assert cache.stats().hits == 2


@pytest.mark.parametrize(("backend", "precisions"), [
    (torch.backends.cuda.matmul, ["none", "tf32", "ieee"]),
    (torch.backends.cudnn.conv, ["none", "tf32", "ieee"]),
    (torch.backends.mkldnn.matmul, ["none", "tf32", "bf16"]),
    (torch.backends.mkldnn.conv, ["none", "tf32", "bf16"]),
])  # fmt: skip
def test_each_precision_of_a_backend_is_another_key(backend, precisions):
    keys, before = set(), backend.fp32_precision
    try:
        for precision in precisions:
            backend.fp32_precision = precision
            keys.add(global_settings())
    finally:
        backend.fp32_precision = before
    assert len(keys) == len(precisions)
