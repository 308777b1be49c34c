"""How the answers of a batch are made: draws, limits, stop strings, streams."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batch_rig import answers, batch, tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerFast
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers_rig import BLOCK, VOCABULARY, RecordingStreamer

from mamba_cache.integrations.transformers.batching import answers as answer_settings
from mamba_cache.integrations.transformers.batching.answers import (
    AnswerSettings,
    choose_tokens,
    uniforms,
)

pytestmark = pytest.mark.usefixtures("either_way")

DRAWN = {"do_sample": True, "temperature": 3.0, "top_k": 0}


@pytest.fixture
def cache(nemotron):
    return nemotron.cache()


def settings(**changes):
    return AnswerSettings(
        **{"max_new_tokens": 1, "num_answers": 1, "eos_token_ids": frozenset(), "is_greedy": False}
        | changes
    )


def drawing(own, seed, number):
    """The sampler's view of a request with so many answer tokens."""
    return SimpleNamespace(
        settings=own, seed=seed, answer=range(number), processors=None, num_late=0
    )


def librarys_shares(logits, *warpers):
    """Each token's probability after the library's processors."""
    return LogitsProcessorList(warpers)(None, logits.float().clone()).softmax(-1)


LIMITS = {
    "none": ({}, []),
    "temperature": ({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)]),
    "top k": ({"top_k": 5}, [TopKLogitsWarper(5)]),
    "top p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    "min p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "all": (
        {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
        [
            TemperatureLogitsWarper(1.5), TopKLogitsWarper(9), TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.05),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("together", [False, True])
def test_draws_follow_the_librarys_probabilities(generator, together):
    """Over many draws each token's frequency is its probability, with and without other rows."""
    count = 4000
    logits = torch.randn(len(LIMITS), 13, generator=generator) * 2
    rows = [settings(**changes) for changes, _ in LIMITS.values()]
    groups = [list(range(len(rows)))] if together else [[index] for index in range(len(rows))]
    for group in groups:
        requests = [drawing(rows[i], seed=7, number=n) for n in range(count) for i in group]
        chosen = choose_tokens(logits[group].repeat(count, 1), requests).view(count, len(group))
        for column, index in enumerate(group):
            expected = librarys_shares(logits[index : index + 1], *[*LIMITS.values()][index][1])[0]
            found = torch.bincount(chosen[:, column], minlength=13) / count
            assert set(found.nonzero().flatten().tolist()) <= set(
                expected.nonzero().flatten().tolist()
            )
            # The seed is fixed, so the draws are the same in each run.
            assert (found - expected).abs().max() < 0.03


@pytest.mark.parametrize("limit", [0, 1])
def test_rows_that_draw_and_rows_that_do_not(generator, limit):
    """A row that samples from all tokens makes rows beside it sample too, unless they are kept."""
    logits = torch.randn(30, 50, generator=generator)
    requests = [drawing(settings(is_greedy=True), 0, n) for n in range(28)]
    requests += [None, drawing(settings(top_k=limit), 3, 1)]
    chosen = choose_tokens(logits, requests)
    likeliest = logits.argmax(-1)
    assert chosen[:28].tolist() == likeliest[:28].tolist()
    assert limit == 0 or chosen[29] == likeliest[29]


def test_a_row_without_limits_draws_the_same_beside_one_with_limits(generator):
    """Beside a limited row its tokens were sorted before the draw: one seed gave other tokens."""
    logits = torch.randn(40, 50, generator=generator)
    free = [drawing(settings(temperature=2.0), 3, number) for number in range(40)]
    mixed = [drawing(settings(top_k=5), 4, n) if n % 2 else free[n] for n in range(40)]
    alone = choose_tokens(logits, free)
    beside = choose_tokens(logits, mixed)
    assert beside[::2].tolist() == alone[::2].tolist()
    assert beside[1::2].tolist() == choose_tokens(logits[1::2], mixed[1::2]).tolist()


def test_uniform_numbers_are_those_of_seed_and_number():
    seeds = np.array([1, 1, 2, 2**64 - 1], dtype=np.uint64)
    numbers = np.array([0, 1, 0, 0], dtype=np.uint64)
    found = uniforms(seeds, numbers)
    assert len({*found.tolist()}) == 4
    assert found[1] == uniforms(seeds[1:2], numbers[1:2])[0]
    many = uniforms(np.full(20000, 5, dtype=np.uint64), np.arange(20000, dtype=np.uint64))
    assert np.abs(np.histogram(many, bins=10, range=(0, 1))[0] - 2000).max() < 200
    assert many.max() < 1


def test_draws_depend_on_the_seed_and_not_on_the_company(cache, generator):
    prompts = [tokens(generator, 2 * BLOCK + 1), tokens(generator, 5), tokens(generator, 11)]
    options = {**DRAWN, "max_new_tokens": 12}
    together = answers(batch(cache, prompts, seeds=[3, 4, 5], **options))
    alone = [
        answers(batch(cache, [prompt], seeds=[seed], **options))[0]
        for prompt, seed in zip(prompts, (3, 4, 5), strict=True)
    ]
    assert together == alone
    assert answers(batch(cache, prompts, seeds=[9, 4, 5], **options))[0] != together[0]


def test_seeds_of_a_call(cache, generator):
    prompts = [tokens(generator, 5)] * 3
    first = answers(batch(cache, prompts, seeds=1, **DRAWN))
    assert first == answers(batch(cache, prompts, seeds=1, **DRAWN))
    assert len({*map(tuple, first)}) == 3
    drawn = [answers(batch(cache, prompts, **DRAWN)) for _ in range(2)]
    assert drawn[0] != drawn[1]
    repeated = []
    for _ in range(2):
        torch.manual_seed(5)
        repeated.append(answers(batch(cache, prompts, **DRAWN)))
    assert repeated[0] == repeated[1]


@pytest.mark.parametrize("rows", [8, 2])
def test_answers_to_one_prompt_differ_and_are_the_same_again(nemotron, generator, rows):
    """As forks, and computed again where there is no room for forks."""
    prompt = tokens(generator, 2 * BLOCK + 5)
    options = {**DRAWN, "num_return_sequences": 4, "seeds": 11, "max_new_tokens": 9}
    found = answers(batch(nemotron.cache(max_requests=rows), [prompt], **options))
    again = answers(batch(nemotron.cache(), [prompt, prompt], **options))[:4]
    assert found == again
    assert len({*map(tuple, found)}) == 4


def test_each_prompt_has_its_own_configuration(cache, nemotron, generator):
    prompts = [tokens(generator, 7) for _ in range(4)]
    configs = [
        nemotron.config(max_new_tokens=3),
        nemotron.config(max_new_tokens=9, do_sample=True, top_k=1),
        GenerationConfig(max_new_tokens=7, eos_token_id=nemotron.answer(prompts[2], 4)[3]),
        GenerationConfig(max_new_tokens=20),
    ]
    found = answers(list(cache.generate_batch(prompts, configs).values()))
    assert found[0] == nemotron.answer(prompts[0], 3)
    assert found[1] == nemotron.answer(prompts[1], 9)
    ends = nemotron.answer(prompts[2], 7)
    assert found[2] == ends[: ends.index(ends[3]) + 1]
    library = nemotron.model.generate(torch.tensor([prompts[3]]), max_new_tokens=20)[0]
    assert found[3] == library[len(prompts[3]) :].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": [*range(50)]},
        {"min_new_tokens": 8, "eos_token_id": [*range(3, 90)]},
        {"max_length": 24},
        {"repetition_penalty": 3.0, "do_sample": True, "top_k": 1},
    ],
    ids=str,
)
def test_the_librarys_other_processors_do_what_they_do_in_generate(
    cache, nemotron, generator, options
):
    prompts = [tokens(generator, n) for n in (9, 12)]
    options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None, **options}
    if "max_length" in options:
        del options["max_new_tokens"]
    expected = [
        nemotron.model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts
    ]
    found = answers(list(cache.generate_batch(prompts, **options).values()))
    assert found == expected


@pytest.fixture(scope="module")
def tokenizer():
    """Each token is one letter."""
    letters = {chr(0x21 + number): number for number in range(VOCABULARY)}
    own = Tokenizer(models.WordLevel(letters, unk_token="!"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=own)


def test_stop_strings(cache, nemotron, generator, tokenizer):
    prompts = [tokens(generator, 5), tokens(generator, 9)]
    answer = nemotron.answer(prompts[0], 12)
    text = "".join(tokenizer.convert_ids_to_tokens(answer))
    options = {
        "stop_strings": [text[4:6], "nowhere"], "tokenizer": tokenizer, "do_sample": False,
        "max_new_tokens": 12, "eos_token_id": None,
    }  # fmt: skip
    expected = [
        nemotron.model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts
    ]
    assert len(expected[0]) < 12
    assert answers(batch(cache, prompts, **options)) == expected


def test_streamers_receive_the_same_values_as_from_generate(cache, nemotron, generator):
    prompts = [tokens(generator, 5), tokens(generator, 9)]
    streamers = [RecordingStreamer(), None]
    alone = RecordingStreamer()
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    nemotron.model.generate(torch.tensor([prompts[0]]), streamer=alone, **options)
    batch(cache, prompts, streamer=streamers, **options)
    assert streamers[0].received == alone.received


def test_a_callback_receives_every_token_as_it_comes(cache, generator):
    received = {}
    prompts = [tokens(generator, 5), tokens(generator, 3 * BLOCK)]
    options = {**DRAWN, "num_return_sequences": 2, "max_new_tokens": 5, "eos_token_id": None}
    returned = cache.generate_batch(
        prompts, streamer=lambda name, token: received.setdefault(name, []).append(token), **options
    )
    assert received == {name: output.generated_tokens for name, output in returned.items()}


def test_log_probabilities_of_what_was_chosen(cache, nemotron, generator):
    prompts = [tokens(generator, 5), tokens(generator, 3 * BLOCK)]
    config = ContinuousBatchingConfig(return_logprobs=True)
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 4}
    outputs = batch(cache, prompts, continuous_batching_config=config, **options)
    for output in outputs:
        ids = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.no_grad():
            shares = nemotron.model(ids).logits[0].log_softmax(-1)
        at = range(len(output.prompt_ids) - 1, ids.shape[1] - 1)
        expected = [shares[i, ids[0, i + 1]].item() for i in at]
        assert output.logprobs == pytest.approx(expected, abs=1e-4)
    assert max(max(output.generated_tokens) for output in outputs) < VOCABULARY


def test_an_answer_has_one_log_probability_for_each_token(cache, nemotron, generator, monkeypatch):
    """A fork recomputed in its parent's step had its first token's log probability twice."""
    prompt = tokens(generator, 2 * BLOCK + 5)
    config = ContinuousBatchingConfig(return_logprobs=True)
    batch(cache, [tokens(generator, 5)])

    def find_no_room(request, _):
        cache._batcher.context.preempt(request.key)
        return []

    monkeypatch.setattr(cache._batcher._scheduler, "fork", find_no_room)
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 4}
    options |= {"eos_token_id": None, "continuous_batching_config": config}
    outputs = batch(cache, [prompt], **options)
    assert answers(outputs) == [nemotron.answer(prompt, 4)] * 2
    assert [len(output.logprobs) for output in outputs] == [4, 4]
    assert outputs[0].logprobs == pytest.approx(outputs[1].logprobs, abs=1e-4)


def _raise(*_):
    raise TypeError("broken on purpose")


def _raise_the_third_time(make):
    """Processors are made once per prompt to read the settings, and again for its answer."""
    made = []

    def fails(*arguments):
        made.append(1)
        return _raise() if len(made) == 3 else make(*arguments)

    return fails


FAILURES = {
    "at the prompt": ({}, [RecordingStreamer(_raise, at=1), RecordingStreamer()], 0),
    "first token": ({}, [RecordingStreamer(_raise, at=2), RecordingStreamer()], 1),
    "second token": ({}, [RecordingStreamer(_raise, at=3), RecordingStreamer()], 2),
    "at the end": ({}, [RecordingStreamer(_raise, at="end"), RecordingStreamer()], 4),
    "function": ({}, lambda name, token: _raise() if name == "req_0" else None, 1),
    "making processors": ({"repetition_penalty": 2.0}, None, 0),
    "a processor": ({"sequence_bias": [[[10**6], 3.0]]}, None, 0),
    "a stop string": ({"stop_strings": ["x"]}, None, 0),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_fails_in_an_answer_fails_its_own_request(
    cache, nemotron, generator, tokenizer, monkeypatch, name
):
    """One answer's error lost every answer of the call."""
    options, streamer, kept = FAILURES[name]
    if name == "making processors":
        make = answer_settings._processors
        monkeypatch.setattr(answer_settings, "_processors", _raise_the_third_time(make))
    monkeypatch.setattr(StopStringCriteria, "__call__", _raise)
    prompts = [tokens(generator, 5), tokens(generator, 9)]
    configs = [nemotron.config(max_new_tokens=4, **each) for each in (options, {})]
    first, second = batch(
        cache, prompts, generation_config=configs, streamer=streamer, tokenizer=tokenizer
    )
    message = "tokens were being biased" if name == "a processor" else "broken on purpose"
    assert message in first.error
    assert first.status.name == "FAILED"
    assert (second.error, second.generated_tokens) == (None, nemotron.answer(prompts[1], 4))
    if name != "a stop string":  # stop strings are searched from the first token on
        assert first.generated_tokens == nemotron.answer(prompts[0], 4)[:kept]
    monkeypatch.undo()
    [again] = batch(cache, [prompts[0]])
    assert again.generated_tokens == nemotron.answer(prompts[0], 6)
