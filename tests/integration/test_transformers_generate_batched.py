"""Which calls of `generate` are computed as batches, and that their results are the same."""

import copy
from contextlib import contextmanager

import pytest
import torch
from model_changes import KINDS, attention
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import TopKLogitsWarper
from transformers_rig import (
    ANSWER,
    BLOCK,
    FAMILIES,
    RecordingStreamer,
    budgets,
    compute_in_double,
    join,
    make_model,
    num_batched,
    skipped,
    take_batches,
    text,
)
from transformers_rig import make_cache as make_small_cache

from mamba_cache.errors import ModelChangedError
from mamba_cache.events import Admitted
from mamba_cache.integrations.transformers import fingerprint
from mamba_cache.integrations.transformers.batching.batcher import Batcher

LOOP_ONLY = {"kimi_linear", "bailing_hybrid", "inkling", "zaya"}
"""Families whose batches the context cannot hold, or whose states it cannot take inside prompts."""

OPTIONS = {"do_sample": False, "max_new_tokens": ANSWER, "eos_token_id": None}


def make_cache(model, **settings):
    """Make a cache with steps that take all prompts of a test whole."""
    return make_small_cache(model, **{"segment_tokens": 64 * BLOCK, **settings})


@pytest.fixture(autouse=True)
def batches(monkeypatch):
    take_batches(monkeypatch)


@pytest.fixture(scope="module")
def shared_model():
    return make_model("nemotron_h")


@pytest.fixture
def model(shared_model):
    shared_model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2)
    return shared_model


@pytest.fixture
def cache(model):
    return make_cache(model)


def both(model, cache, ids, mask=None, **options):
    """Return the output without a cache and with a cache, from the same seed."""
    mask = torch.ones_like(ids) if mask is None else mask
    found = []
    for one in (model, cache):
        torch.manual_seed(11)
        found.append(one.generate(ids, attention_mask=mask, **{**OPTIONS, **options}))
    cache.check_invariants()
    assert cache._batcher is None or not cache._batcher.context.statuses()
    return found


def assert_equal(model, cache, ids, mask=None, **options):
    expected, actual = both(model, cache, ids, mask, **options)
    assert torch.equal(actual, expected)
    return actual


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_answers_misses_hits_and_rows_as_without_a_cache(name, monkeypatch, generator):
    """In float64: in float32 two logits of random weights were equal but for rounding."""
    compute_in_double(monkeypatch)
    model = make_model(name).double()
    model.set_experts_implementation("eager")  # the default has no float64
    cache, prompt = make_cache(model), text(generator, 4 * BLOCK + 3)
    for _ in range(2):
        answer = assert_equal(model, cache, prompt)
    turn = join(answer, text(generator, 3))
    assert_equal(model, cache, turn, do_sample=True, top_k=20)
    assert_equal(model, cache, prompt, do_sample=True, num_return_sequences=3)
    rows = torch.cat([turn, turn.flip(1), turn.roll(5, 1)])
    mask = torch.ones_like(rows)
    rows[1, :7], mask[1, :7] = 0, 0
    assert_equal(model, cache, rows, mask)
    assert_equal(model, cache, rows, mask, do_sample=True, temperature=2.0)
    assert num_batched(cache) == (0 if name in LOOP_ONLY else 6)
    assert cache.stats().hits >= 4


def test_a_streamed_call_does_not_have_the_model_read_anew(model, cache, prompt, monkeypatch):
    """Reading the model takes as long as some forwards, so an unchanged model is not read again."""
    readings, make = [], fingerprint._Reading
    monkeypatch.setattr(
        fingerprint, "_Reading", lambda *args: readings.append(len(args)) or make(*args)
    )
    for number in range(3):
        cache.generate(join(prompt, prompt[:, :number]), streamer=RecordingStreamer(), **OPTIONS)
    assert num_batched(cache) == 3
    assert readings.count(2) <= 1


def test_rows_with_a_common_beginning_wait_for_the_one_that_computes_it(model, cache, prompt):
    """Rows then stand at different positions, and decode together from their last tokens on."""
    whole = prompt[:, : 4 * BLOCK]
    rows = torch.cat([join(whole, whole[:, i : i + 3]) for i in range(3)])
    assert skipped(cache, lambda: assert_equal(model, cache, rows)) == 2 * 4 * BLOCK
    assert num_batched(cache) == 1


def test_a_prompt_that_ends_with_the_token_that_ends_answers_is_answered(model, cache, generator):
    """In a batch, a row's last prompt token is fed like an answer token."""
    rows = torch.cat([text(generator, 2 * BLOCK - 2) for _ in range(2)])
    rows[1, -1] = 5
    assert_equal(model, cache, rows, eos_token_id=5)
    assert num_batched(cache) == 1


def test_streamers_receive_the_same(model, cache, prompt):
    received = []
    for one in (model, cache):
        streamer = RecordingStreamer()
        one.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=streamer, **OPTIONS)
        received.append(streamer.received)
    assert received[0] == received[1]
    assert len(received[0]) == ANSWER + 2
    assert num_batched(cache) == 1


def test_a_streamer_that_raises_ends_the_call_and_keeps_the_cache(model, cache, prompt):
    def fail():
        raise RuntimeError("gone away")

    with pytest.raises(RuntimeError, match="gone away"):
        cache.generate(prompt, streamer=RecordingStreamer(fail, at=4), **OPTIONS)
    cache.check_invariants()
    assert not cache._batcher.context.statuses()
    assert "forward" not in vars(model)
    assert_equal(model, cache, prompt)
    assert num_batched(cache) == 2
    assert cache.stats().hits == 1


def test_a_streamer_that_changes_the_model_is_noticed(cache, prompt, monkeypatch):
    model = make_model("nemotron_h", seed=3)
    cache = make_cache(model)
    scale = model.config.time_step_min
    change = RecordingStreamer(lambda: setattr(model.config, "time_step_min", scale * 2), at=4)
    with pytest.raises(ModelChangedError, match="while generate ran, by a streamer"):
        cache.generate(prompt, streamer=change, **OPTIONS)
    cache.check_invariants()


def replace_an_attention_layer(model):
    """Replace an attention layer by code without keys and values, which a batch cannot compute."""
    attention(model).forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    yield
    del attention(model).forward


CHANGES = ("a norm's epsilon", "a forward hook", "a forward replaced on the object")


@pytest.mark.filterwarnings("ignore:nothing is reused or cached")
@pytest.mark.parametrize(
    "change",
    [*(KINDS[name].change for name in CHANGES), replace_an_attention_layer],
    ids=[*CHANGES, "an attention layer"],
)
def test_what_changed_since_the_last_call_is_found_while_its_batch_runs(change, prompt):
    """A call begins with the last call's settings; a change drops the tokens computed with them."""
    model = make_model("nemotron_h", seed=3)
    cache = make_cache(model)
    for number in range(3):
        assert_equal(model, cache, join(prompt, prompt[:, :number]))
    assert cache.stats().hits == 2
    admitted = []
    cache.listeners.add(admitted.append, Admitted)
    with contextmanager(change)(model):
        assert_equal(model, cache, prompt)
    assert len(admitted) <= 1  # at most one event: a call that bypasses the cache emits none
    assert cache.stats().hits == 2  # other settings, or a call that bypasses the cache
    cache.check_invariants()
    assert not cache._batcher.context.statuses()
    before = cache.stats().hits
    assert_equal(model, cache, prompt)
    assert cache.stats().hits == before + 1


def replace_a_weight(model):
    """Replace a weight tensor; the old one, which the weight comparison reads, is unchanged."""
    embeddings = model.get_input_embeddings()
    embeddings.weight = torch.nn.Parameter(embeddings.weight.detach().flip(1), requires_grad=False)


def replace_a_module(model):
    """Replace a module by one of the same class and shapes."""
    embeddings = copy.deepcopy(model.get_input_embeddings())
    embeddings.weight.data.copy_(embeddings.weight.detach().flip(1))
    model.set_input_embeddings(embeddings)


@pytest.mark.parametrize("replace", [replace_a_weight, replace_a_module])
def test_weights_replaced_since_the_last_call_are_found_while_its_batch_runs(replace, prompt):
    """Only the replacement shows: settings are the same, and the old tensors are unchanged."""
    model = make_model("nemotron_h", seed=3)
    cache = make_cache(model)
    for number in range(2):
        assert_equal(model, cache, join(prompt, prompt[:, :number]))
    replace(model)
    with pytest.raises(ModelChangedError, match=r"embeddings\.weight\): call reset\(\)"):
        cache.generate(prompt, **OPTIONS)
    cache.reset()
    assert_equal(model, cache, prompt)
    assert_equal(model, cache, prompt)
    assert (cache.stats().hits, num_batched(cache)) == (1, 2)


@pytest.mark.parametrize(
    ("options", "is_batched"),
    [
        ({}, True),
        ({"max_new_tokens": 1}, True),
        ({"max_length": 60}, True),
        ({"stop_strings": None, "max_time": 60.0, "guidance_scale": 1.5}, True),
        ({"do_sample": True, "repetition_penalty": 1.3, "min_new_tokens": 3}, True),
        ({"logits_processor": LogitsProcessorList([TopKLogitsWarper(3)])}, True),
        ({"return_dict_in_generate": True, "output_scores": True}, False),
        ({"num_beams": 2}, False),
        ({"logits_processor": [lambda _, scores: scores]}, False),
        ({"stopping_criteria": [lambda ids, _: torch.zeros(len(ids)).bool()]}, False),
        ({"prefix_allowed_tokens_fn": lambda *_: [5, 6, 7]}, False),
        ({"max_new_tokens": 2**20, "max_time": 0.0}, False),  # the blocks do not hold it
    ],
    ids=lambda value: "-".join(value) or "none" if isinstance(value, dict) else str(value),
)
def test_which_calls_are_batched(model, cache, prompt, options, is_batched):
    if options.get("max_length"):
        options = {"max_new_tokens": None, **options}
    expected, actual = both(model, cache, prompt, **options)
    tokens = [getattr(output, "sequences", output) for output in (expected, actual)]
    assert torch.equal(*tokens)
    assert num_batched(cache) == is_batched
    assert cache.stats().requests == 1


def test_settings_and_code_that_graphs_do_not_serve(model, cache, prompt, monkeypatch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache.generate(prompt, **OPTIONS)
    hook = model.model.register_forward_hook(lambda *_: None)
    cache.generate(prompt, variant="hooked", **OPTIONS)
    hook.remove()
    eager = make_cache(model, cuda_graphs=False)
    assert_equal(model, eager, prompt)
    assert (num_batched(cache), num_batched(eager)) == (0, 0)
    monkeypatch.setattr(Batcher, "replays", lambda *_: False)
    assert_equal(model, cache, prompt)
    assert num_batched(cache) == 0
    assert cache.stats().requests == 3


def test_more_new_tokens_than_a_step_takes_are_the_loops(model, generator):
    cache, prompt = make_cache(model, segment_tokens=2 * BLOCK), text(generator, 3 * BLOCK + 1)
    for number in range(3):
        assert_equal(model, cache, prompt)
        assert num_batched(cache) == number


def test_sequences_that_the_blocks_do_not_hold_are_the_loops(model, cache, prompt):
    small = make_cache(model, **budgets(cache, slots=4, blocks=5))
    for count, number in ((2 * BLOCK, 0), (5, 1)):
        assert_equal(model, small, prompt, max_new_tokens=count)
        assert num_batched(small) == number


def test_memory_that_runs_out_leaves_the_prompt_to_the_loop(model, cache, prompt, monkeypatch):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("too much")

    with monkeypatch.context() as patches:
        patches.setattr(Batcher, "_compute", run_out)
        assert_equal(model, cache, prompt)
    assert cache.stats().saved_states > 0
    assert skipped(cache, lambda: assert_equal(model, cache, prompt)) == 4 * BLOCK
    with monkeypatch.context() as patches:
        patches.setattr(Batcher, "__init__", run_out)
        other = make_cache(model)
        assert_equal(model, other, prompt)
    assert_equal(model, other, prompt)
    assert num_batched(other) == 0  # batching is not tried again


def test_a_call_after_a_batch_whose_last_step_is_discarded(ahead, model, cache, generator):
    """The discarded step is collected as the call begins; else the call's first step never ends."""
    prompt = text(generator, BLOCK + 3)
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS)
    end = answer[0, -5].item()
    cache.generate_batch(prompt.tolist(), max_new_tokens=ANSWER, eos_token_id=end)
    assert cache._batcher.context._uncollected is not None
    before = num_batched(cache)
    assert_equal(model, cache, text(generator, 2 * BLOCK))
    assert num_batched(cache) == before + 1
