"""What the prefix cache of a transformers model refuses, and how it finds out."""

import sys

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
import transformers
from chats import CHATML, make_tokenizer
from transformers import cache_utils
from transformers_rig import GREEDY, assert_same, cached, make_cache, make_model, plain

from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    MissingExtraError,
    ModelChangedError,
    StepOrderError,
    UnsupportedVersionError,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size_tokens": 0}, "block_size_tokens must be an int in .*, got 0"),
        ({"segment_tokens": 12}, r"segment_tokens must be .* \(8\), got 12"),
        ({"mamba_cache_gb": -1}, "mamba_cache_gb must be a number in"),
        ({"reuse_answers": "no"}, "reuse_answers must be a bool, got 'no'"),
        ({"weights_check": "some"}, "weights_check must be one of"),
        ({"hash_algorithm": "md5"}, r"hash_algorithm must be one of \['blake2b', 'sha256'"),
        ({"hash_secret": b""}, "hash_secret must be bytes, at least one of them"),
        ({"hash_secret": "text"}, "hash_secret must be bytes, .* got str"),
    ],
)
def test_settings_out_of_range(model, settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make_cache(model, **settings)


@pytest.mark.parametrize(
    ("budget", "unit"), [("mamba_cache_gb", "one state"), ("kv_cache_gb", "one KV block")]
)
def test_budgets_that_hold_nothing(model, budget, unit):
    with pytest.raises(BudgetError, match=f"{budget} must be at least .* to hold {unit}"):
        make_cache(model, **{budget: 1e-9})


def test_models_of_other_kinds(model):
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(InvalidArgumentError, match=r"linear-attention layers.*crop"):
        make_cache(llama)
    with pytest.raises(InvalidArgumentError, match="causal language model"):
        make_cache(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidArgumentError, match=r"load it with .*from_pretrained\('folder'\)"):
        make_cache("folder")
    with pytest.raises(InvalidArgumentError, match="training mode"):
        make_cache(model.train())


def layers_of(model):
    return getattr(model, model.base_model_prefix).layers


@pytest.mark.parametrize("index", [0, 1, -1])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "lfm2", "falcon_h1"])
def test_a_model_without_one_of_its_layers_needs_another_cache(name, index, prompt):
    """It raised AttributeError: a tensor of its cache was None."""
    model = make_model(name)
    cache = make_cache(model)
    cached(cache, prompt)
    expected = plain(model, prompt)
    layer = layers_of(model).pop(index)
    for call in (
        lambda: cache.generate(prompt, **GREEDY),
        lambda: cache.prefill(prompt),
        lambda: cache.generate_batch(prompt.tolist(), max_new_tokens=3),
    ):
        with pytest.raises(ModelChangedError, match=r"expected|not those that|no longer hand over"):
            call()
        cache.check_invariants()
    layers_of(model).insert(index if index >= 0 else len(layers_of(model)), layer)
    cache.reset()
    assert_same(expected, cached(cache, prompt))


def test_what_a_removed_layer_kept_is_named(model, cache, prompt):
    del layers_of(model)[1]
    with pytest.raises(ModelChangedError, match=r"where keys and values in layer 1 are expected"):
        cache.prefill(prompt)
    model = make_model("qwen3_5")
    cache = make_cache(model)
    del layers_of(model)[-1]
    model.config.num_hidden_layers -= 1
    with pytest.raises(ModelChangedError, match=r"layers of the model's cache were .* are .* now"):
        cache.prefill(prompt)


def test_a_moved_model_needs_another_cache(model, cache, prompt):
    model.to(torch.float64)
    for call in (lambda: cache.generate(prompt), cache.reset):
        with pytest.raises(ModelChangedError, match=r"float64 now: make a new cache"):
            call()


def test_a_closed_cache_is_of_no_use(model, prompt):
    with make_cache(model) as cache:
        cached(cache, prompt)
        cache.generate_batch(prompt.tolist(), max_new_tokens=1)
    for call in (cache.generate, cache.generate_batch, cache.prefill):
        with pytest.raises(StepOrderError, match="closed"):
            call(prompt)
    assert not model._forward_pre_hooks


def test_a_pipeline_is_told_that_a_cache_is_no_model(cache):
    for call in (
        lambda: transformers.pipeline(
            "text-generation", model=cache, tokenizer=make_tokenizer(CHATML)
        ),
        lambda: cache.config,
    ):
        with pytest.raises(
            AttributeError, match=r"no attribute '\w+'. It is no model.* cache\.gen"
        ):
            call()


# The library.


def test_without_the_extra_its_name_is_told(model, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[transformers\]'"):
        make_cache(model)


def test_a_library_without_linear_attention_is_too_old(model, monkeypatch):
    monkeypatch.delattr(cache_utils, "LinearAttentionLayer")
    with pytest.raises(UnsupportedVersionError, match=r"must be >= 5.10, got"):
        make_cache(model)
