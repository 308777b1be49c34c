"""Options of `generate` that the prefix cache serves, and the states it keeps under each."""

import copy
import pickle
import random
import re

import numpy as np
import pytest
import torch
import transformers
from torch import distributed
from transformers import GenerationConfig, LogitsProcessorList, WatermarkingConfig
from transformers.generation import utils as generation_utils
from transformers_rig import (
    BLOCK,
    GREEDY,
    VOCABULARY,
    RecordingStreamer,
    assert_same,
    budgets,
    cached,
    join,
    make_cache,
    make_model,
    num_batched,
    plain,
    skipped,
    take_batches,
    text,
)

from mamba_cache.cache import SLOT_POLICIES, EveryNthBlock, LruSlotPolicy
from mamba_cache.errors import ConcurrentUseError, InvalidArgumentError, NotCopyableError
from mamba_cache.integrations.transformers import options as served
from mamba_cache.integrations.transformers.layers import read_layers


@pytest.fixture(scope="module")
def shared_model():
    return make_model("nemotron_h")


@pytest.fixture
def model(shared_model):
    """The model, whose generation configuration a test may change."""
    shared_model.generation_config = GenerationConfig(
        pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    return shared_model


@pytest.fixture(scope="module")
def refusing(shared_model):
    """A cache for refused calls only."""
    cache = make_cache(shared_model)
    yield cache
    cache.check_invariants()
    assert cache.stats().requests == 0


def states_of(model, cache, tokens):
    """Return the tensors of the model's cache after `tokens`, computed in one piece."""
    past = cache._runner.new_cache()
    with torch.no_grad():
        model(torch.tensor([tokens]), past_key_values=past, use_cache=True)
    return read_layers(past, cache._store.layout.layers, len(tokens))


def assert_published_states_are_right(model, cache, tokens) -> int:
    """Compare every state that a prefix of `tokens` finds with a recomputed one."""
    found = 0
    for end in range(1, len(tokens) + 1):
        record = cache._store.open(tokens[:end], cache._runner.fingerprint.key, min_computed=0)
        try:
            if record.match.skip_tokens != end:
                continue
            saved, expected = record.load(), states_of(model, cache, tokens[:end])
        finally:
            record.close()
        found += 1
        pairs = [*zip(saved.states, expected.states, strict=True)]
        pairs += zip(saved.tokens, expected.tokens, strict=True)
        for one, other in pairs:
            assert (one - other).norm() <= 1e-4 * other.norm(), f"wrong at {end} of {len(tokens)}"
    return found


# Every option has been thought about.


def test_every_field_of_a_generation_configuration_is_classified():
    known = [*served.REFUSED, *served.FIELDS]
    assert set(vars(GenerationConfig())) <= set(known)
    assert len(known) == len(set(known))


def test_every_argument_of_generate_is_classified(model):
    taken = served._arguments_of_generate(model)
    assert taken <= served.ARGUMENTS | served.REFUSED.keys()


def test_every_generation_mode_is_served_or_refused(model, cache, prompt):
    """Unknown modes are refused; the set lists the known modes that are refused."""
    modes = {mode.value for mode in transformers.generation.GenerationMode}
    assert modes - served.ROWS_FOLLOWED - served.ROWS_MIXED == {
        "assisted_generation",
        "constrained_beam_search",
        "contrastive_search",
        "dola_generation",
        "group_beam_search",
    }
    for others in (
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"force_words_ids": [[5]], "num_beams": 2},
    ):
        for options in (others, {"generation_config": GenerationConfig(**others)}):
            with pytest.raises(InvalidArgumentError, match=r"generation mode '\w+' cannot"):
                cache.generate(prompt, trust_remote_code=True, max_new_tokens=2, **options)


@pytest.mark.parametrize("name", sorted(served.REFUSED))
def test_what_is_refused_is_refused_wherever_it_is_set(model, refusing, prompt, name):
    ways = [{name: True}]
    if hasattr(GenerationConfig(), name):
        config = GenerationConfig()
        setattr(config, name, 1)
        ways += [{"generation_config": config}, {}]
    for options in ways:
        if not options:
            setattr(model.generation_config, name, 1)
        with pytest.raises(InvalidArgumentError, match=f"{name} cannot be used with a prefix"):
            refusing.generate(prompt, **options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_cache", False, "nothing to reuse"),
        ("cache_implementation", "static", "'dynamic' or None, got 'static'"),
    ],
)
def test_settings_hidden_in_the_models_configuration(
    model, cache, refusing, prompt, field, value, message
):
    """In other implementations a caller's own configuration hid them from the cache."""
    with pytest.raises(InvalidArgumentError, match=message):
        refusing.generate(prompt, **{field: value})
    setattr(model.generation_config, field, value)
    for config in (None, GenerationConfig(max_new_tokens=2)):
        with pytest.raises(InvalidArgumentError, match=message):
            refusing.generate(prompt, generation_config=config)
    overriding = {"use_cache": True, "cache_implementation": "dynamic"}
    assert_same(plain(model, prompt, **overriding), cached(cache, prompt, **overriding))


def test_arguments_that_a_later_version_adds_are_refused(model, cache, prompt, monkeypatch):
    def generate(inputs=None, draft_everything=None, **kwargs):
        raise AssertionError

    monkeypatch.setattr(model, "generate", generate, raising=False)
    with pytest.raises(InvalidArgumentError, match=r"\['draft_everything'\] cannot be used"):
        cache.generate(prompt, draft_everything=True)


def test_fields_that_a_later_version_adds_keep_answers_out(model, cache, prompt, monkeypatch):
    """Whether the field is set or not; a field of the model's own configuration does not count."""
    original = GenerationConfig.__init__

    def init(self, **kwargs):
        self.rewrites_states = kwargs.pop("rewrites_states", None)
        original(self, **kwargs)

    monkeypatch.setattr(GenerationConfig, "__init__", init)
    served._new_fields.cache_clear()
    model.generation_config.chat_format = "own"
    options = {"max_new_tokens": 2 * BLOCK}
    try:
        assert served.read_options(model, options).follows_rows
        assert not served.read_options(model, {**options, "rewrites_states": 3}).follows_rows
        answer = cached(cache, prompt, rewrites_states=3, **options).sequences
    finally:
        served._new_fields.cache_clear()
    hit = skipped(cache, lambda: cached(cache, join(answer, answer[:, :5])))
    assert hit == prompt.shape[1] // BLOCK * BLOCK


def test_sharded_weights_are_refused(model, cache, prompt, monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(generation_utils, "is_fsdp_managed_module", lambda _: True)
    with pytest.raises(InvalidArgumentError, match="FSDP or ZeRO-3: ranks that wait"):
        cache.generate(prompt)


# Beam search, wherever it is switched on.


CHOICES = {
    "num_beams": [1, 1, 2, 3],
    "do_sample": [False, True, True],
    "num_return_sequences": [1, 1, 2],
    "repetition_penalty": [None, 1.4],
    "no_repeat_ngram_size": [None, 2],
    "bad_words_ids": [None, [[5], [6, 7]]],
    "temperature": [None, 0.7, 4.0],
    "top_k": [None, 3],
    "top_p": [None, 0.9],
    "min_p": [None, 0.05],
    "typical_p": [None, 0.9],
    "epsilon_cutoff": [None, 1e-3],
    "eta_cutoff": [None, 1e-3],
    "renormalize_logits": [None, True],
    "forced_eos_token_id": [None, 4],
    "suppress_tokens": [None, [8, 9]],
    "sequence_bias": [None, [[[11], 3.0]]],
    "guidance_scale": [None, None, 1.5],
    "watermarking_config": [None, WatermarkingConfig(bias=4.0)],
    "min_new_tokens": [None, 5],
    "max_new_tokens": [7, 2 * BLOCK + 3, 3 * BLOCK],
    "eos_token_id": [None, 2, [2, 17]],
    "use_cache": [None, True],
    "early_stopping": [None, True],
    "length_penalty": [None, 0.5],
    "exponential_decay_length_penalty": [None, (3, 1.2)],
    "output_scores": [None, True],
}


def scattered(source, settings):
    """The settings, each in the model's configuration, the caller's or among the options."""
    places = {}, {}, {}
    for name, value in settings.items():
        source.choice(places)[name] = value
    if source.random() < 0.3:  # the caller gives no configuration
        places[0].update(places[1])
        places[1].clear()
    for place in places[:2]:  # a configuration by itself must be a valid one
        places[2].update(
            {name: place.pop(name) for name in ("num_return_sequences",) if name in place}
        )
    return places


@pytest.mark.parametrize(
    ("is_batched", "seed"),
    [(False, seed) for seed in range(8)] + [(True, seed) for seed in range(6)],
)
def test_random_configurations_answer_and_publish_as_without_a_cache(
    model, is_batched, seed, monkeypatch
):
    """Conversations of several turns, each under another configuration from up to three places.

    Those without beams are computed by the library's loop and by batches.
    """
    choices, expected_batched = CHOICES, 0
    if is_batched:
        take_batches(monkeypatch)
        choices = {**CHOICES, "num_beams": [1]}
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    settings = {"segment_tokens": 64 * BLOCK} if is_batched else {}  # the loop takes longer prompts
    cache = make_cache(model, reuse_answers=source.random() < 0.8, **settings)
    ids = text(generator, source.randint(1, 4 * BLOCK))
    for turn in range(4):
        settings = {name: source.choice(values) for name, values in choices.items()}
        settings = {name: value for name, value in settings.items() if value is not None}
        if settings["num_beams"] == 1 and not settings["do_sample"]:
            settings["num_return_sequences"] = 1
        if settings["num_beams"] > 1:
            settings.pop("guidance_scale", None)  # plain generate has no guidance with beams
        if "eos_token_id" not in settings:
            settings.pop("exponential_decay_length_penalty", None)  # it needs an end token
        of_model, of_caller, options = scattered(source, settings)
        model.generation_config = GenerationConfig(pad_token_id=0, **of_model)
        if of_caller:
            options["generation_config"] = GenerationConfig(**of_caller)
        torch.manual_seed(turn)
        try:
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        except (RuntimeError, ValueError) as error:  # in some versions: logits that are all NaN
            torch.manual_seed(turn)
            with pytest.raises(type(error), match=re.escape(str(error)[:40])):
                cache.generate(ids, attention_mask=torch.ones_like(ids), **options)
            cache.check_invariants()
            continue
        torch.manual_seed(turn)
        actual = cache.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert torch.equal(actual, expected), settings
        cache.check_invariants()
        # A row of one token has none to wait before for the others.
        expected_batched += is_batched and (len(actual) == 1 or ids.shape[1] > 1)
        assert num_batched(cache) == expected_batched
        for row in actual.tolist():
            assert_published_states_are_right(model, cache, row)
        ids = join(actual[:1], text(generator, source.randint(1, BLOCK)))


def test_without_answers_nothing_is_kept_that_was_computed_token_by_token(model, prompt):
    whole = [prompt[0, : 4 * BLOCK].tolist(), prompt[0, 3 : 2 * BLOCK + 3].tolist()]
    for reuse, blocks in ((True, 5 + 3), (False, 4 + 2)):
        cache = make_cache(model, reuse_answers=reuse)
        cache.generate(whole, **{**GREEDY, "max_new_tokens": BLOCK + 1})
        assert cache.stats().cached_blocks == blocks
        cache.check_invariants()


# Prompts.


@pytest.mark.parametrize(
    "prompts",
    [
        [np.array([3, 4, 5]), range(3, 9)],
        [torch.tensor([3, 4, 5]), (3, 4, 5, 6, 7, 8)],
        [[np.int64(3), 4, np.int32(5)], [3, 4, 5, 6, 7, 8]],
    ],
)
def test_prompts_may_be_sequences_of_any_ints(model, cache, prompts):
    expected = cache.generate([[3, 4, 5], [3, 4, 5, 6, 7, 8]], **GREEDY)
    assert_same(expected, cache.generate(prompts, **GREEDY))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_pad_id_inside_a_prompt_without_a_mask(model, cache, generator, rows):
    """`generate` masks the pad id then. Other implementations raised an error."""
    prompt = text(generator, 3 * BLOCK).repeat(rows, 1)
    hidden = prompt.clone()
    hidden[0, 5] = 0
    expected = model.generate(hidden, **GREEDY)
    with pytest.warns(UserWarning, match=r"nothing is reused or cached: .* token \(0\)"):
        actual = [cache.generate(hidden, **GREEDY)]
    actual.append(cache.generate(hidden, **GREEDY))  # one warning, and a count for each call
    for one in actual:
        assert_same(expected, one)
    cache.check_invariants()
    assert cache.stats().bypasses == {"hidden tokens": 2}
    assert (cache.stats().cached_blocks, cache.stats().requests) == (0, 0)
    # Where it counts as a token, it is cached like any other.
    shown = {"attention_mask": torch.ones_like(hidden)}
    for _ in range(2):
        assert_same(
            model.generate(hidden, **shown, **GREEDY), cache.generate(hidden, **shown, **GREEDY)
        )
    assert_same(
        model.generate(hidden, **shown, **GREEDY), cache.generate(hidden.tolist(), **GREEDY)
    )
    assert cache.stats().hits > 0


def test_pad_ids_on_the_left_and_such_that_end_answers(model, prompt):
    """Without a mask the first are padding, and the others tokens: `generate` infers no mask."""
    padded, inside = join(torch.zeros(1, 5, dtype=torch.long), prompt), prompt.clone()
    inside[0, 4] = 5
    for ids, ends in ((padded, {}), (inside, {"pad_token_id": 5, "eos_token_id": [5, 6]})):
        cache = make_cache(model)
        for _ in range(2):
            assert_same(model.generate(ids, **GREEDY | ends), cache.generate(ids, **GREEDY | ends))
        assert cache.stats().hits == 1


# Callbacks.


def callbacks(act):
    """All kinds of caller code that run within `generate`."""

    def processor(_, scores):
        act()
        return scores

    def criterion(ids, _, **__):
        act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    def allowed(*_):
        act()
        return list(range(VOCABULARY))

    return {
        "streamer": RecordingStreamer(act),
        "logits_processor": LogitsProcessorList([processor]),
        "stopping_criteria": [criterion],
        "prefix_allowed_tokens_fn": allowed,
    }


CALLBACKS = sorted(callbacks(None))


@pytest.mark.parametrize("kind", CALLBACKS)
def test_callbacks_may_call_the_model_and_another_cache_of_it(
    model, cache, prompt, generator, kind
):
    """Other implementations took the thread's first forward for `generate`'s own."""
    ids, other = text(generator, 2 * BLOCK + 1), make_cache(model)
    logits, expected = model(ids).logits.detach(), plain(model, ids, max_new_tokens=3)

    def act():
        torch.testing.assert_close(model(ids).logits.detach(), logits)
        assert_same(expected, plain(model, ids, max_new_tokens=3))
        assert_same(expected, cached(other, ids, max_new_tokens=3))

    options = {"max_new_tokens": 2 * BLOCK}
    actual = cached(cache, prompt, **options, **{kind: callbacks(act)[kind]})
    assert_same(plain(model, prompt, **options), actual)
    assert other.stats().hits >= 2 * BLOCK - 1
    assert cache.stats().requests == 1
    assert not model._forward_pre_hooks
    assert assert_published_states_are_right(model, cache, actual.sequences[0].tolist()) == 2
    assert assert_published_states_are_right(model, cache, ids[0].tolist()) == 0


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        *(("streamer", call) for call in ("prefill", "reset", "close", "check_invariants")),
        *((kind, "generate") for kind in CALLBACKS),
    ],
)
def test_callbacks_may_not_call_the_cache(model, cache, prompt, kind, call):
    def act():
        getattr(cache, call)(*([prompt] if call in ("generate", "prefill") else []))

    with pytest.raises(ConcurrentUseError, match=f"{call} was called from within it"):
        cache.generate(prompt, **GREEDY, **{kind: callbacks(act)[kind]})
    cache.check_invariants()
    assert_same(plain(model, prompt), cached(cache, prompt))


@pytest.mark.parametrize("when", ["before the forward", "after it"])
def test_callbacks_that_write_to_the_ids(model, cache, prompt, when):
    """The computed ids then differ from the returned ids; no state of them is kept."""

    def criterion(ids, _, **__):  # its changes reach the model
        if ids.shape[1] == prompt.shape[1] + 3:
            ids[:, -1] = 7
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    def processor(ids, scores):  # its changes do not reach the model
        if ids.shape[1] == prompt.shape[1] + 5:
            ids[:, prompt.shape[1] + 1] ^= 1  # never the token that was there
        return scores

    options = {"max_new_tokens": 2 * BLOCK}
    if when == "after it":
        options["logits_processor"] = LogitsProcessorList([processor])
    else:
        options["stopping_criteria"] = [criterion]
    expected, actual = plain(model, prompt, **options), cached(cache, prompt, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    found = assert_published_states_are_right(model, cache, actual.sequences[0].tolist())
    assert found == (1 if when == "after it" else 2)


# Other things that a caller may do.


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda cache: copy.deepcopy({"deep": [cache]})],
)
def test_a_cache_is_not_copied(cache, prompt, copied):
    with pytest.raises(NotCopyableError, match="make a new one around the copy"):
        copied(cache)
    cached(cache, prompt)


def test_each_policy_has_a_name(model):
    for name, kind in SLOT_POLICIES.items():
        assert type(make_cache(model, slot_policy=name).slot_allocator.policy) is kind
    for slots, name in ((3, "lru"), (4, "adaptive")):
        made = make_cache(model, **budgets(make_cache(model), slots=slots, blocks=4))
        assert type(made.slot_allocator.policy) is SLOT_POLICIES[name]
    assert make_cache(model, placement=EveryNthBlock(2), slot_policy=LruSlotPolicy())


def test_a_compiled_model_is_served(generator):
    """In other implementations the cache's own code was compiled too, and failed."""
    model = make_model("lfm2")
    prompt = text(generator, 3 * BLOCK + 2)
    expected = plain(model, prompt, max_new_tokens=2)
    model.compile(backend="eager", dynamic=False)
    cache = make_cache(model)
    for _ in range(2):
        assert_same(expected, cached(cache, prompt, max_new_tokens=2))
    assert (cache.stats().hits, cache.stats().requests) == (1, 2)
    assert model._compiled_call_impl is not None
