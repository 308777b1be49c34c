"""Legal calls that are seldom made, and mistakes that are: each is answered, or costs nothing."""

import gc
import weakref

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from batch_rig import answers, batch, subject, tokens
from transformers import (
    BatchEncoding,
    SynthIDTextWatermarkingConfig,
)
from transformers_rig import (
    BLOCK,
    GREEDY,
    VOCABULARY,
    assert_same,
    budgets,
    cached,
    make_cache,
    make_model,
    plain,
    text,
)

from mamba_cache.errors import (
    BlockCapacityError,
    InvalidArgumentError,
    MissingStateError,
    ModelChangedError,
)
from mamba_cache.integrations.transformers import tiers as prefix_tiers

NEW = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def nemotron():
    return subject("nemotron_h")


@pytest.fixture
def model():
    return make_model("nemotron_h")


@pytest.fixture
def cache(model):
    return make_cache(model)


@pytest.fixture
def prompt(generator):
    return text(generator, 4 * BLOCK + 3)


# What a refused call costs.


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (lambda cache, ids: cache.generate("text"), InvalidArgumentError),
        (lambda cache, ids: cache.generate(ids, max_length=3), ValueError),
        (lambda cache, ids: cache.generate_batch([[10**6]]), InvalidArgumentError),
        (lambda cache, ids: cache.pin(ids[:, 1:]), MissingStateError),
        (lambda cache, ids: cache.unpin("pin"), InvalidArgumentError),
    ],
    ids=["no ids", "too short", "no id of the vocabulary", "nothing to pin", "no pin"],
)
def test_a_refused_call_leaves_host_memory_as_it_is(model, prompt, refused, error):
    """It was emptied: by a typing error, and by a prompt that was not there to be pinned."""
    cache = make_cache(model, host_cache_gb=0.01)
    cached(cache, prompt)
    held = cache.tier_stats()[0].entries
    assert held["state"] > 0
    with pytest.raises(error):
        refused(cache, prompt)
    assert cache.tier_stats()[0].entries == held
    cache.check_invariants()


def test_what_is_no_single_streamer_of_a_batch_is_refused_at_once(cache):
    """A streamer that is an iterator of text was iterated over, and nobody would ever end that."""

    class Endless:
        def put(self, _):
            """Takes a token."""

        end = None

        def __iter__(self):
            return self

        def __next__(self):
            raise AssertionError("it waits for text")

    with pytest.raises(InvalidArgumentError, match=r"one for each prompt: streamer=\[streamer\]"):
        cache.generate_batch([[5, 6]], streamer=Endless())


# Hooks on the model itself, which see each of its calls.


def _sharpened(_, __, output):
    output.logits = output.logits * -0.5 + torch.linspace(-3, 3, output.logits.shape[-1])
    return output


@pytest.mark.parametrize("first", ["generate", "prefill", "generate_batch"])
def test_a_hook_on_the_model_itself_moves_logits_once(model, prompt, first):
    """Kept logits had gone through it once, twice or not at all, by who kept and who used them."""
    model.register_forward_hook(_sharpened)
    cache, ids = make_cache(model), prompt[0].tolist()
    expected = plain(model, prompt)
    if first == "prefill":
        cache.prefill(prompt)
    elif first == "generate":
        assert_same(expected, cached(cache, prompt))
    for _ in range(2):
        [found] = answers(batch(cache, [ids], **NEW))
        assert found == expected.sequences[0, len(ids) :].tolist()
        assert_same(expected, cached(cache, prompt))
    assert cache.stats().hits > 0


def test_a_hook_on_the_model_itself_reads_each_part_of_a_prompt_once(model, prompt):
    """Parts before the last one went through it twice."""

    def other_ids(_, args, kwargs):
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] * 2 + 1) % VOCABULARY}

    model.register_forward_pre_hook(other_ids, with_kwargs=True)
    cache = make_cache(model, segment_tokens=BLOCK)
    for _ in range(2):
        assert_same(plain(model, prompt), cached(cache, prompt))
    assert cache.stats().hits == 1


# Processors that keep something of the answer that they see.


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.7},
        {"encoder_repetition_penalty": 3.0},
        {"encoder_no_repeat_ngram_size": 1},
    ],
    ids=str,
)
def test_processors_of_one_request_see_no_other(nemotron, generator, options):
    """Guidance ran all answers of a batch through one state; some were not given the prompt."""
    prompts = [tokens(generator, n) for n in (9, 12, 12)]
    expected = [
        nemotron.model.generate(torch.tensor([p]), **NEW, **options)[0, len(p) :].tolist()
        for p in prompts
    ]
    cache = nemotron.cache()
    for _ in range(2):
        assert answers(batch(cache, prompts, **NEW, **options)) == expected


def test_each_answer_to_a_prompt_has_a_watermark_of_its_own(nemotron, generator):
    """As it would have alone."""
    prompt = tokens(generator, 11)
    config = SynthIDTextWatermarkingConfig(keys=[3, 4, 5, 6], ngram_len=3)
    options = {"watermarking_config": config, "do_sample": True, "max_new_tokens": 8}
    options |= {"eos_token_id": None, "seeds": 7}
    alone = answers(batch(nemotron.cache(), [prompt], **options))
    both = answers(batch(nemotron.cache(), [prompt], num_return_sequences=3, **options))
    assert both[-1] == alone[0]


# Little room.


@pytest.mark.parametrize(("slots", "blocks"), [(1, 1), (1, 2), (1, 3), (2, 4)])
def test_a_batch_in_few_blocks(nemotron, slots, blocks):
    """A model was said to do something else in a batch, where there was no room to try it."""
    room = budgets(nemotron.cache(), slots=slots, blocks=blocks)
    for rows in (1, 4):
        cache = nemotron.cache(**room, max_batch_size=rows)
        assert (
            answers(batch(cache, [[5, 6, 7]] * 2, max_new_tokens=3))
            == [nemotron.answer([5, 6, 7], 3)] * 2
        )


def test_a_batch_where_all_blocks_are_pinned(model, prompt):
    """Likewise."""
    room = budgets(make_cache(model), slots=4, blocks=4)
    cache = make_cache(model, **room, max_pinned_share=1.0)
    cache.prefill(prompt[:, : 4 * BLOCK])
    pin = cache.pin(prompt[:, : 4 * BLOCK])
    with pytest.raises(BlockCapacityError):
        cache.generate_batch([[5, 6, 7]], **NEW)
    cache.unpin(pin)
    assert batch(cache, [[5, 6, 7]], **NEW)


# The model changes.


@pytest.mark.parametrize("is_used", [False, True])
def test_a_model_of_another_vocabulary_needs_another_cache(model, cache, prompt, is_used):
    """Its logits fitted in no slot: each call raised RuntimeError, after a reset as well."""
    if is_used:
        cached(cache, prompt)
    model.resize_token_embeddings(VOCABULARY + 31)
    calls = (
        lambda: cache.generate(prompt, **GREEDY),
        lambda: cache.generate_batch(prompt, **NEW),
        lambda: cache.prefill(prompt),
        cache.reset,
    )
    for call in calls:
        with pytest.raises(ModelChangedError, match=r"97 embeddings .* 128 now: make"):
            call()
    other = make_cache(model)
    for _ in range(2):
        assert_same(plain(model, prompt), cached(other, prompt))


def test_the_disk_is_used_again_after_a_reset_in_training_mode(
    model, prompt, tmp_path, monkeypatch
):
    """The weights cannot be read then; they were not in the next call either, and no disk was."""
    # The package's clock jumps in tests; the disk is waited for all the same.
    monkeypatch.setattr(prefix_tiers, "_DEADLINE_SECONDS", None)
    settings = {"host_cache_gb": 0.01, "disk_cache_path": tmp_path, "disk_cache_gb": 0.1}
    with make_cache(model, **settings) as cache:
        cached(cache, prompt)
        model.train()
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.5)
        cache.reset()
        model.eval()
        cached(cache, prompt)
        assert [tier.name for tier in cache.tier_stats()] == ["host", "disk"]
    with make_cache(model, **settings) as cache:
        assert_same(plain(model, prompt), cached(cache, prompt))
        assert cache.stats().hits == 1


def test_a_reset_keeps_no_disk_tier_of_before(model, tmp_path):
    """Each one lived as long as the cache, with all that it knew of the disk."""
    settings = {"host_cache_gb": 0.01, "disk_cache_path": tmp_path, "disk_cache_gb": 0.1}
    with make_cache(model, **settings) as cache:
        before = weakref.ref(cache._store.tiers._disk)
        cache.reset()
        gc.collect()
        assert before() is None


# What a call costs.


@pytest.mark.parametrize("family", ["nemotron_h", "mamba2"])
def test_a_miss_does_not_try_every_length_that_lies_below(family, generator, monkeypatch):
    """It matched the prompt, and named all of its blocks, once for each."""
    cache = make_cache(make_model(family), host_cache_gb=0.05)
    tiers, size = cache._store.tiers, 40 * BLOCK
    tiers._lengths.update(range(1, size + 1))
    tried, bring = [], tiers._bring_up_to
    monkeypatch.setattr(tiers, "_bring_up_to", lambda *a: tried.append(a[2]) or bring(*a))
    matches, match = [], cache._store.match
    monkeypatch.setattr(cache._store, "match", lambda *a, **k: matches.append(1) or match(*a, **k))
    cached(cache, text(generator, size))
    assert (tried, len(matches) <= 2) == ([], True)


def test_logits_that_are_kept_by_index_are_refused(cache, prompt):
    """Those of another token were kept as those that follow the prompt, and given out later."""
    options = {"logits_to_keep": torch.tensor([0]), "max_new_tokens": 1}
    with pytest.raises(InvalidArgumentError, match="logits_to_keep must be an int"):
        cache.generate(prompt, **options)
    cached(cache, prompt, logits_to_keep=2)


# Mistakes.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: c.generate_batch([3, 4]),
            r"a list of int: for one prompt write \[\[1, 2, 3\]\]",
        ),
        (lambda c: c.generate_batch("text"), "inputs must be prompts, .* got str: tokenize it"),
        (lambda c: c.generate_batch(["a", "b"]), "a list of str: tokenize it"),
        (lambda c: c.generate_batch([[3], 4]), "prompt 1 must be a tensor .* got int"),
        (
            lambda c: c.generate_batch(BatchEncoding({"input_ids": [[3]]})),
            "got BatchEncoding: give its input_ids",
        ),
        (lambda c: c.prefill(BatchEncoding({"input_ids": [[3]]})), "give its input_ids"),
        (lambda c: c.pin("text"), "the prompt must be a tensor .* got str: tokenize it"),
    ],
)
def test_what_is_no_prompt_is_said_to_be_none(cache, call, message):
    """Batches and pins were told what prefill takes."""
    with pytest.raises(InvalidArgumentError, match=message):
        call(cache)
