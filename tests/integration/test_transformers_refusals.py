"""Calls and models that the prefix cache of a transformers model refuses."""

import sys

import pytest
import torch
import transformers
from batch_rig import subject
from chats import CHATML, make_tokenizer
from memory_store import MemoryStore
from transformers import BatchEncoding, ContinuousBatchingConfig, GenerationConfig, cache_utils
from transformers_rig import (
    GREEDY,
    UNKNOWN_LAYERS,
    UNRESUMABLE,
    VOCABULARY,
    assert_same,
    cached,
    make_cache,
    make_model,
    plain,
)

from mamba_cache.cache import LastBlock, LruSlotPolicy
from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    MissingExtraError,
    ModelChangedError,
    StepOrderError,
    UnresumableModelError,
    UnsupportedVersionError,
)

HOST = {"host_cache_gb": 0.01}
SETTINGS = [
    ({"block_size_tokens": 0}, "block_size_tokens must be an int in .*, got 0"),
    ({"block_size_tokens": 8193}, r"block_size_tokens must be an int in \[1, 8192\], got 8193"),
    ({"block_size_tokens": 10**9}, r"block_size_tokens must be an int in \[1, 8192\]"),
    ({"max_requests": 10**9}, r"max_requests must be an int in \[1, 715827882\], got"),
    ({"mamba_cache_gb": 2.0**33}, "mamba_cache_gb=8589934592.0 and .* fit into the memory of this"),
    (
        {"kv_cache_gb": 2.0**33},
        "kv_cache_gb=8589934592.0 must fit into .* are needed, .* are there",
    ),
    (
        {"host_cache_gb": 2.0**33},
        "host_cache_gb=8589934592.0 must fit into the memory of this mach",
    ),
    ({"segment_tokens": 12}, r"segment_tokens must be .* \(8\), got 12"),
    ({"mamba_cache_gb": -1}, "mamba_cache_gb must be a number in"),
    ({"reuse_answers": "no"}, "reuse_answers must be a bool, got 'no'"),
    ({"weights_check": "some"}, "weights_check must be one of"),
    ({"hash_algorithm": "md5"}, r"hash_algorithm must be one of \['blake2b', 'sha256'"),
    ({"hash_secret": b""}, "hash_secret must be bytes, at least one of them"),
    ({"hash_secret": "text"}, "hash_secret must be bytes, .* got str"),
    ({"max_pinned_share": 2}, "max_pinned_share must be a number in"),
    ({"variant": ""}, "variant must be a str that is not empty"),
    ({"clock": 5}, "clock must return seconds when it is called, got 5"),
    ({"verify_hits": 2}, "verify_hits"),
    ({"placement": LastBlock}, r"placement must be .* EveryNthBlock\(4\), got"),
    ({"slot_policy": "oldest"}, "slot_policy must be one of .*'adaptive'.*, got 'oldest'"),
    ({"slot_policy": LruSlotPolicy}, "methods of SlotEvictionPolicy, got"),
    ({"mamba_cache_gb": 1e-9}, "mamba_cache_gb must be at least .* to hold one state"),
    ({"kv_cache_gb": 1e-9}, "kv_cache_gb must be at least .* to hold one KV block"),
    ({"host_cache_gb": -1}, "host_cache_gb must be"),
    ({"host_cache_gb": 1e-7}, "host_cache_gb=1e-07 GiB is too small"),
    ({"disk_cache_path": "folder"}, "disk_cache_path needs a host tier"),
    ({**HOST, "disk_cache_path": 5}, "must be a path"),
    ({"store": MemoryStore(), "hash_secret": b"a"}, "needs a host tier"),
    ({**HOST, "store": MemoryStore()}, "store needs hash_secret"),
    ({**HOST, "store": 5, "hash_secret": b"a"}, "a stores.BlobStore or the URL of one, got int"),
    ({**HOST, "weights_check": "off"}, "weights_check"),
]


@pytest.fixture(scope="module")
def refusing():
    """A cache for refused calls only."""
    cache = subject("nemotron_h").cache()
    yield cache
    cache.check_invariants()
    assert cache.stats().requests == 0


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings_out_of_range(refusing, settings, message):
    is_budget = any(words in message for words in (" hold one ", "too small", " fit into "))
    error = BudgetError if is_budget else InvalidArgumentError
    with pytest.raises(error, match=message):
        make_cache(refusing._runner.model, **settings)


class Endless:
    """A streamer that is an iterator of text: iterating over it never ended."""

    put = end = None

    def __iter__(self):
        return self

    def __next__(self):
        raise AssertionError("it waits for text")


def batching(**options):
    return {"continuous_batching_config": ContinuousBatchingConfig(**options)}


ONE, TWO = [[3, 4, 5]], [[5, 6], [7, 8]]
IDS = torch.tensor([[3, 4, 5, 6]])
SAMPLED = {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
CALLS = [
    # Prompts.
    ("generate", None, {}, "inputs must be a collection of prompts, .* got None"),
    ("generate", "text", {}, "got str: tokenize it"),
    ("generate", [], {}, "at least one prompt, got an empty list"),
    ("generate", [3, 4, 5], {}, r"a list of int: for one prompt write \[\[1, 2, 3\]\]"),
    ("generate", [[3], 4], {}, "prompt 1 must be a tensor .* or a list of ints, got int"),
    ("generate", [[3], []], {}, "prompt 1 must not be empty"),
    ("generate", [[1.5, 2.7]], {}, "the token ids of prompt 0 must be ints, got 1.5"),
    ("generate", [[3, True]], {}, "the token ids of prompt 0 must be ints, got True"),
    ("generate", [[3, -1]], {}, r"must be in \[0, 97\), the model's vocabulary; prompt 0 has -1"),
    ("generate", [[3, VOCABULARY]], {}, r"token ids must be in \[0, 97\).* has 97"),
    ("generate", [[2**70]], {}, r"token ids must be in \[0, 97\)"),
    ("generate", {"input_ids": [[3]]}, {}, r"got dict: .*unpack it, as in generate\(\*\*inputs\)"),
    ("generate", torch.tensor([3, 4]), {}, r"tensor \[rows, length\] .* of shape \(2,\)"),
    ("generate", torch.ones(1, 2), {}, "got torch.float32"),
    ("generate", torch.ones(1, 0, dtype=torch.long), {}, r"of shape \(1, 0\)"),
    ("generate", torch.tensor([[3, -100]]), {}, "input_ids has -100"),
    ("generate", torch.tensor([[3, VOCABULARY]]), {}, "input_ids has 97"),
    ("prefill", None, {}, "got NoneType"),
    ("prefill", [[]], {}, "must not be empty"),
    ("prefill", [3, [4]], {}, r"must be ints, got \[4\]"),
    ("prefill", [[3], [4]], {}, "one prompt, got 2 rows"),
    ("prefill", torch.tensor(3), {}, "of shape"),
    ("prefill", torch.tensor([VOCABULARY]), {}, r"\[0, 97\)"),
    ("prefill", BatchEncoding({"input_ids": [[3]]}), {}, "give its input_ids"),
    ("pin", "text", {}, "the prompt must be a tensor .* got str: tokenize it"),
    ("pin", [3], {"ttl_seconds": -1}, "ttl_seconds must be a number"),
    ("unpin", "pin", {}, "pin must be"),
    ("verify_pending", 0, {}, "max_hits"),
    ("generate_batch", 5, {}, "inputs must be"),
    ("generate_batch", [3, 4], {}, r"a list of int: for one prompt write \[\[1, 2, 3\]\]"),
    ("generate_batch", [[3], 4], {}, "prompt 1 must be a tensor .* got int"),
    ("generate_batch", [[5], []], {}, "prompt"),
    ("generate_batch", [[5], torch.tensor([])], {}, "prompt 1 must not be empty"),  # of floats
    ("generate_batch", [[5, 10**6]], {}, "vocabulary"),
    # Masks.
    ("generate", IDS, {"attention_mask": [[1] * 4]}, "of the shape of input_ids, .* got list"),
    ("generate", IDS, {"attention_mask": torch.tensor([[2, 1, 1, 1]])}, "1 for tokens and 0 for"),
    ("generate", IDS, {"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "attention_mask must be"),
    ("generate", IDS, {"attention_mask": torch.tensor([[0, 1, 0, 1]])}, "attention_mask must be"),
    ("generate", IDS, {"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "attention_mask must be"),
    ("generate", IDS, {"attention_mask": torch.tensor([[1, 1, 1]])}, "attention_mask must be"),
    ("generate", ONE, {"attention_mask": torch.ones(1, 3)}, "goes with a tensor of token ids only"),
    # Options.
    ("generate", ONE, {"input_ids": ONE}, "as inputs or as input_ids, not both"),
    ("generate", ONE, {"pixel_values": [torch.ones(2)]}, r"no other input of the model .* got \['"),
    ("generate", ONE, {"token_type_ids": IDS}, r"no other input of the model .* got \['"),
    ("generate", ONE, {"max_tokens": 2}, r"did you mean max_new_tokens\?"),
    ("generate", ONE, {"generation_config": {"num_beams": 2}}, "GenerationConfig, got dict"),
    ("generate", ONE, {"logits_to_keep": IDS}, "logits_to_keep must be an int"),
    ("generate", ONE, {"stopping_criteria": print}, "a collection of criteria, got <built-in"),
    ("generate", ONE, {"will_continue": "yes"}, "will_continue must be True, False or None"),
    ("generate", ONE, {"source": []}, r"source must be hashable, got \[\]"),
    ("generate", ONE, {"variant": 3}, "variant must be a str"),
    ("prefill", ONE, {"variant": ""}, "variant must be a str"),
    ("generate_batch", TWO, {"variant": b"a"}, "variant must be a str"),
    ("generate_batch", TWO, {"generation_config": [GenerationConfig()]}, "each of the 2 prompts"),
    ("generate_batch", TWO, {"generation_config": 7}, "GenerationConfig"),
    ("generate_batch", TWO, {"num_beams": 3}, "beam_search"),
    ("generate_batch", TWO, {"max_time": 3.0}, "max_time"),
    ("generate_batch", TWO, {"max_new_tokens": 0}, "max_new_tokens"),
    ("generate_batch", ONE, {"max_new_tokens": None, "max_length": 3}, "more than the prompt's 3"),
    ("generate_batch", TWO, {"stop_strings": ["x"]}, "give tokenizer="),
    ("generate_batch", TWO, {"assistant_model": "x"}, "goes back"),
    ("generate_batch", TWO, {"stopping_criteria": []}, "stopping_criteria"),
    ("generate_batch", TWO, {"pixel_values": 3}, "pixel_values"),
    ("generate_batch", TWO, {"seeds": [1]}, "each of the 2 prompts"),
    ("generate_batch", TWO, {"seeds": -1}, "seeds"),
    ("generate_batch", TWO, {"streamer": [None]}, "each of the 2 prompts"),
    ("generate_batch", TWO, {"streamer": [object(), None], **SAMPLED}, "one answer"),
    ("generate_batch", ONE, {"streamer": Endless()}, r"for each prompt: streamer=\[streamer\]"),
    ("generate_batch", TWO, {"cache_salt": ["a"]}, "each of the 2 prompts"),
    ("generate_batch", TWO, {"will_continue": [True]}, "will_continue must be one for all, or a"),
    ("generate_batch", ONE, {"continuous_batching_config": {}}, "BatchingConfig, got dict"),
    ("generate_batch", ONE, batching(max_batch_tokens=-1), "max_batch_tokens must be an int >= 1"),
    ("generate_batch", ONE, batching(max_requests_per_batch=0), "must be an int >= 1, got 0"),
    # Positions of states.
    ("generate", ONE, {"checkpoints": [0]}, r"in \[1, 3\].*got 0"),
    ("generate", ONE, {"checkpoints": [4]}, r"in \[1, 3\], numbers of tokens of the prompt, got 4"),
    ("generate", ONE, {"checkpoints": [True]}, "must be ints"),
    ("generate", ONE, {"checkpoints": "ab"}, "must be ints"),
    ("generate", ONE, {"checkpoints": 7}, "must be a collection"),
    ("generate", ONE, {"checkpoints": [[1], 2]}, "for each of the 1 rows, got 2 items"),
    ("generate", ONE, {"checkpoints": [[1.5]]}, "checkpoints of row 0 must be ints"),
    ("generate", [[5] * 9, [6] * 3], {"checkpoints": [4]}, r"in \[1, 3\].*in row 1, got 4"),
    ("prefill", ONE, {"checkpoints": [4]}, r"in \[1, 3\]"),
    ("generate_batch", TWO, {"checkpoints": [99]}, "checkpoints must be"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "prompts", "options", "message"), CALLS)
def test_calls_that_are_refused(refusing, call, prompts, options, message):
    """Some raised TypeError, were ignored, or failed an assertion about memory."""
    with pytest.raises(InvalidArgumentError, match=message):
        getattr(refusing, call)(prompts, **options)


def test_models_of_other_kinds(model):
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    for other, message in (
        (transformers.LlamaForCausalLM(config).eval(), r"linear-attention layers.*crop"),
        (torch.nn.Linear(2, 2), "causal language model"),
        ("folder", r"load it with .*from_pretrained\('folder'\)"),
        (torch.compile(model, backend="eager"), r"call model.compile\(\) and give the model"),
        (model.train(), "training mode"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            make_cache(other)


@pytest.mark.parametrize("name", [*UNRESUMABLE, *UNKNOWN_LAYERS])
def test_families_that_are_refused(name):
    error = UnresumableModelError if name in UNRESUMABLE else InvalidArgumentError
    message = r"layer 0 of kind 'linear_attention' .* by |layer 1 of the cache .* DynamicIndexed"
    with pytest.raises(error, match=message):
        make_cache(make_model(name))


def layers_of(model):
    return getattr(model, model.base_model_prefix).layers


@pytest.mark.parametrize("index", [0, 1, -1])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "lfm2", "falcon_h1"])
def test_a_model_without_one_of_its_layers_needs_another_cache(name, index, prompt):
    """The call raised AttributeError: a tensor of the model's cache was None."""
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


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.to(torch.float64), "float64 now: make a new cache"),
        (
            lambda model: model.resize_token_embeddings(VOCABULARY + 31),
            r"97 embeddings .* 128 embeddings .* now: make",
        ),
    ],
    ids=["dtype", "vocabulary"],
)
def test_a_model_of_other_tensors_needs_another_cache(
    model, cache, prompt, is_used, change, message
):
    """Logits did not fit the slot: each call raised RuntimeError, after a reset too."""
    if is_used:
        cached(cache, prompt)
    change(model)
    for call in (
        lambda: cache.generate(prompt, **GREEDY),
        lambda: cache.generate_batch(prompt, max_new_tokens=3),
        lambda: cache.prefill(prompt),
        cache.reset,
    ):
        with pytest.raises(ModelChangedError, match=message):
            call()
    other = make_cache(model)
    for _ in range(2):
        assert_same(plain(model, prompt), cached(other, prompt))


def test_a_closed_cache_is_of_no_use(model, prompt):
    with make_cache(model) as cache:
        cached(cache, prompt)
        cache.generate_batch(prompt.tolist(), max_new_tokens=1)
    for call in (cache.generate, cache.generate_batch, cache.prefill):
        with pytest.raises(StepOrderError, match="closed"):
            call(prompt)
    assert not model._forward_pre_hooks


def test_a_pipeline_refuses_a_cache_as_its_model(cache):
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


def test_without_the_extra_the_error_names_it(model, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[transformers\]'"):
        make_cache(model)


def test_a_library_without_linear_attention_is_too_old(model, monkeypatch):
    monkeypatch.delattr(cache_utils, "LinearAttentionLayer")
    with pytest.raises(UnsupportedVersionError, match=r"must be >= 5.10, got"):
        make_cache(model)
