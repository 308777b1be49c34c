"""Batches whose next step begins before the tokens of the last one are on the host."""

import pytest
import torch
from batch_rig import answers, batch, subject, tokens
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers_rig import BLOCK, budgets

from mamba_cache.integrations.transformers.batching import batcher as batcher_module
from mamba_cache.integrations.transformers.batching.answers import AnswerSettings
from mamba_cache.integrations.transformers.batching.batcher import Batcher

FAMILIES = ("nemotron_h", "qwen3_5", "mamba2")


def draw(generator, *numbers):
    return numbers[int(torch.randint(len(numbers), (), generator=generator))]


def settings(generator, one, prompt):
    """Settings of an answer: long and short, sampled, with an end token, several per prompt."""
    count = draw(generator, 1, 2, 5, BLOCK, 2 * BLOCK + 1)
    options = {"max_new_tokens": count, "eos_token_id": -1}
    kind = draw(generator, "greedy", "greedy", "ended", "drawn", "several", "processed")
    if kind == "ended":
        options["eos_token_id"] = draw(generator, *one.answer(prompt, count))
    if kind in ("drawn", "several"):
        options |= {"do_sample": True, "temperature": 2.0, "top_k": draw(generator, 0, 5)}
    if kind == "several":
        options["num_return_sequences"] = 2
    if kind == "processed":
        options["repetition_penalty"] = 1.5
    return GenerationConfig(**options)


@pytest.mark.parametrize("is_scarce", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_steps_that_wait(name, is_scarce, generator, monkeypatch):
    """Also where a request is preempted while its newest token is only on the device."""
    one = subject(name)
    room = budgets(one.cache(), slots=16, blocks=17) if is_scarce and name != "mamba2" else {}
    stem = tokens(generator, 2 * BLOCK)
    prompts = [stem[: draw(generator, 0, 2 * BLOCK)] for _ in range(10)]
    prompts = [[*each, *tokens(generator, draw(generator, 2, 9, 17))] for each in prompts]
    configs = [settings(generator, one, prompt) for prompt in prompts]
    limits = ContinuousBatchingConfig(
        max_batch_tokens=draw(generator, BLOCK, 3 * BLOCK, 512),
        return_logprobs=draw(generator, False, False, True),
    )
    found = []
    for devices in (("cuda",), ("cuda", "cpu")):
        monkeypatch.setattr(batcher_module, "_AHEAD_ON", devices)
        cache = one.cache(**room)
        outputs = batch(
            cache,
            prompts,
            generation_config=configs,
            continuous_batching_config=limits,
            seeds=7,
        )
        found.append([(one.generated_tokens, len(one.logprobs)) for one in outputs])
    assert found[0] == found[1]
    assert {count for _, count in found[0]} == {0} or all(
        count == len(answer) for answer, count in found[0]
    )


def test_batches_of_blocks_of_one_token_wait_for_each_step(ahead, generator):
    """Two steps fill two blocks."""
    one, prompts = subject("qwen3_5"), [tokens(generator, length) for length in (1, 5)]
    cache = one.cache(block_size_tokens=1)
    found = answers(batch(cache, prompts, max_new_tokens=6))
    assert found == [one.answer(prompt, 6) for prompt in prompts]


def test_nothing_is_computed_past_the_lengths_of_answers(ahead, nemotron, generator, monkeypatch):
    """Ends by length are known before the step."""
    cache = nemotron.cache()
    batch(cache, [[5, 6, 7]])
    before = cache.batch_stats()
    compute, rows, are_late = Batcher._compute_decodes, [], []

    def counted(batcher, step):
        rows.append(len(step.decode_rows))
        are_late.append(batcher.context._uncollected is not None)
        return compute(batcher, step)

    monkeypatch.setattr(Batcher, "_compute_decodes", counted)
    prompts = [tokens(generator, length) for length in (5, 9, 17, 3)]
    lengths = [1, BLOCK, 2 * BLOCK + 3, 2]
    configs = [nemotron.config(max_new_tokens=length) for length in lengths]
    outputs = batch(cache, prompts, generation_config=configs)
    expected = [nemotron.answer(p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert answers(outputs) == expected
    decoded = cache.batch_stats().decoded_tokens - before.decoded_tokens
    assert sum(are_late) > len(rows) / 2  # ranks are closed when all tokens are there
    assert sum(rows) == decoded == sum(length - 1 for length in lengths)


def test_the_step_after_an_answers_end_is_discarded(ahead, nemotron, generator):
    """The discarded token is not streamed, counted or findable."""
    cache, prompt = nemotron.cache(), tokens(generator, BLOCK + 3)
    whole = nemotron.answer(prompt, 2 * BLOCK)
    end = whole[BLOCK]
    expected = whole[: whole.index(end) + 1]
    received = []
    [output] = batch(
        cache,
        [prompt],
        max_new_tokens=2 * BLOCK,
        eos_token_id=end,
        streamer=lambda _, token: received.append(token),
    )
    assert output.generated_tokens == received == expected
    assert cache.batch_stats().decoded_tokens == len(expected) - 1
    [after] = batch(cache, [[*prompt, *expected, 5]], max_new_tokens=4)
    assert after.generated_tokens == nemotron.answer([*prompt, *expected, 5], 4)


@pytest.mark.parametrize("num_ended", [1, 2])
def test_a_request_may_be_ended_while_its_token_is_on_its_way(
    ahead, nemotron, generator, num_ended
):
    """The server ends requests of clients that disconnect."""
    cache, prompts = nemotron.cache(), [tokens(generator, n) for n in (5, 2 * BLOCK)]
    batch(cache, [[5, 6, 7]])
    batcher = cache._batcher
    greedy = AnswerSettings(
        max_new_tokens=9, num_answers=1, eos_token_ids=frozenset(), is_greedy=True
    )
    batcher.configure()
    before = cache.batch_stats().decoded_tokens
    made = [
        batcher.submit(f"{number}", torch.tensor(prompt).numpy(), greedy, seed=0)[0]
        for number, prompt in enumerate(prompts)
    ]
    batcher.begin()
    while not made[0].num_late or len(made[0].answer) < 3:
        batcher.step()
    for request in made[:num_ended]:
        batcher.end(request)
    while batcher.num_unfinished:
        batcher.step()
    expected = [nemotron.answer(prompt, 9) for prompt in prompts]
    assert [one.answer for one in made[num_ended:]] == expected[num_ended:]
    assert made[0].answer == expected[0][: len(made[0].answer)]
    decoded = cache.batch_stats().decoded_tokens - before
    assert decoded == sum(max(len(one.answer) - 1, 0) for one in made)
    assert answers(batch(cache, prompts, max_new_tokens=9)) == expected


def test_requests_that_can_be_resumed_but_not_decoded_get_on(
    ahead, nemotron, generator, monkeypatch
):
    """A failed step lost the newest token of each request, which was recomputed for ever."""
    cache, prompts = nemotron.cache(), [tokens(generator, n) for n in (5, BLOCK + 3)]
    failed = []

    def fails(batcher, step):
        if not len(step.decode_rows):
            return None
        failed.append(step.request_ids)
        if len(failed) > 20:
            pytest.fail("no request gets on")
        raise RuntimeError("out of order")

    batch(cache, [[5, 6, 7]])
    monkeypatch.setattr(Batcher, "_compute_decodes", fails)
    outputs = batch(cache, prompts, max_new_tokens=6)
    assert answers(outputs) == [nemotron.answer(prompt, 6) for prompt in prompts]
    assert len(failed) == 5


def test_a_request_that_has_ended_does_not_fail_with_its_discarded_step(
    ahead, nemotron, generator, monkeypatch
):
    """Its last token was lost with that step."""
    cache, prompt = nemotron.cache(), tokens(generator, BLOCK + 3)
    whole = nemotron.answer(prompt, BLOCK)
    expected = whole[: whole.index(whole[4]) + 1]
    received, compute = [], Batcher._compute_decodes

    def fails(batcher, step):
        if len(received) == len(expected) - 1:
            raise RuntimeError("out of order")
        return compute(batcher, step)

    batch(cache, [[5, 6, 7]])
    monkeypatch.setattr(Batcher, "_compute_decodes", fails)
    before = cache.batch_stats().steps
    options = {"max_new_tokens": BLOCK, "eos_token_id": expected[-1]}
    [output] = batch(cache, [prompt], streamer=lambda _, token: received.append(token), **options)
    assert output.generated_tokens == received == expected
    assert output.error is None
    assert cache.batch_stats().steps - before == len(expected)


def test_a_first_token_is_not_decoded_though_the_request_before_it_is_gone(
    ahead, nemotron, generator
):
    """The step gives a decoded token, to a request that is ended, and a first token."""
    cache, prompts = nemotron.cache(), [tokens(generator, n) for n in (5, BLOCK)]
    batch(cache, [[5, 6, 7]])
    batcher = cache._batcher
    greedy = AnswerSettings(
        max_new_tokens=4, num_answers=1, eos_token_ids=frozenset(), is_greedy=True
    )
    batcher.configure()
    before, made = cache.batch_stats().decoded_tokens, []
    for number, prompt in enumerate(prompts):
        made += batcher.submit(f"{number}", torch.tensor(prompt).numpy(), greedy, seed=0)
        batcher.begin()
        batcher.step()
    one, other = made
    assert (len(one.answer), one.num_late) == (1, 1)
    assert (other.answer, other.num_late) == ([], 1)
    batcher.end(one)
    while batcher.num_unfinished:
        batcher.step()
    assert other.answer == nemotron.answer(prompts[1], 4)
    assert cache.batch_stats().decoded_tokens - before == 3
