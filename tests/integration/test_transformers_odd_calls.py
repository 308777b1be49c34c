"""Rare legal calls, and common mistakes: each is answered, or refused at no cost."""

import asyncio
import atexit
import contextvars
import threading
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from batch_rig import answers, batch, tokens
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig
from transformers.generation import utils as generation_utils
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

from mamba_cache.errors import InvalidArgumentError, MissingStateError, PoisonedError
from mamba_cache.integrations.transformers import PrefixCache
from mamba_cache.integrations.transformers import tiers as prefix_tiers
from mamba_cache.integrations.transformers.batching.answers import AnswerSettingsReader
from mamba_cache.integrations.transformers.batching.batcher import Batcher
from mamba_cache.integrations.transformers.capture import _functions_of, _is_scan
from mamba_cache.integrations.transformers.replacement import intercepted, replaced
from mamba_cache.integrations.transformers.serve.models import (
    BatchManager,
    ServedModel,
    ServedRequest,
    current_request,
)

NEW = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


# The cost of a refused call.


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
    """A typing error emptied it, and so did pinning a prompt that was not cached."""
    cache = make_cache(model, host_cache_gb=0.01)
    cached(cache, prompt)
    held = cache.tier_stats()[0].entries
    assert held["state"] > 0
    with pytest.raises(error):
        refused(cache, prompt)
    assert cache.tier_stats()[0].entries == held
    cache.check_invariants()


# Hooks on the model itself, which see each of its calls.


def test_a_hook_on_the_model_itself_reads_each_part_of_a_prompt_once(model, prompt):
    """Parts before the last one went through the hook twice."""

    def other_ids(_, args, kwargs):
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] * 2 + 1) % VOCABULARY}

    model.register_forward_pre_hook(other_ids, with_kwargs=True)
    cache = make_cache(model, segment_tokens=BLOCK, variant="other ids")
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
    """Guidance ran all answers of a batch through one state, some without the prompt."""
    prompts = [tokens(generator, n) for n in (9, 12, 12)]
    expected = [
        nemotron.model.generate(torch.tensor([p]), **NEW, **options)[0, len(p) :].tolist()
        for p in prompts
    ]
    cache = nemotron.cache()
    for _ in range(2):
        assert answers(batch(cache, prompts, **NEW, **options)) == expected


def test_each_answer_to_a_prompt_has_a_watermark_of_its_own(nemotron, generator):
    """Each answer gets the watermark that it gets alone."""
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
    """Without room for a trial batch, a model was refused for different results in batches."""
    room = budgets(nemotron.cache(), slots=slots, blocks=blocks)
    for rows in (1, 4):
        cache = nemotron.cache(**room, max_requests=rows)
        assert (
            answers(batch(cache, [[5, 6, 7]] * 2, max_new_tokens=3))
            == [nemotron.answer([5, 6, 7], 3)] * 2
        )


# The model changes.


def test_the_disk_is_used_again_after_a_reset_in_training_mode(
    model, prompt, tmp_path, monkeypatch
):
    """Weights cannot be read in training mode; later calls read neither weights nor disk."""
    # The package's clock jumps in tests, so loads from disk have no deadline.
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


# Mistakes.


def test_a_configuration_may_come_second_as_for_the_model(model, cache, prompt):
    config = GenerationConfig(**GREEDY)
    assert_same(model.generate(prompt, config), cache.generate(prompt, config))


def test_a_batch_under_autocast_is_refused_and_not_the_model(nemotron):
    """The model was refused for different results in batches, or raised RuntimeError midway."""
    cache = nemotron.cache()
    for _ in range(2):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(InvalidArgumentError, match=r"under autocast: .*; generate can"),
        ):
            batch(cache, [[5, 6]])
        assert answers(batch(cache, [[5, 6]])) == [nemotron.answer([5, 6], 6)]


# Requests that come one by one.


class Runner:
    """Runs a manager's requests once ``may_run`` is set, as a cache does."""

    def __init__(self, cache):
        self.cache = cache
        self.may_run = threading.Event()

    def run_batches(self, manager):
        self.may_run.wait()
        self.cache.run_batches(manager)

    def reset(self):
        self.cache.reset()


class Clients:
    """A manager of a model's batches, and clients that send requests before it may run."""

    def __init__(self, one):
        config, reader = one.config(max_new_tokens=5), AnswerSettingsReader(one.model, None, {})
        self.runner = Runner(one.cache())
        self.manager = BatchManager(self.runner)
        self.settings = reader.read(config, 9)
        current_request.set(ServedRequest(settings=self.settings))

    def ask(self, *requests):
        """Returns the outputs of each client; a request is a name, a prompt and is_streaming."""

        async def ask(name, prompt, is_streaming):
            outputs, over = [], asyncio.get_running_loop().create_future()
            current_request.set(ServedRequest(settings=self.settings))

            def receive(output):
                outputs.append(output)
                if output.is_finished() and not over.done():
                    over.set_result(outputs)

            if not is_streaming:
                self.manager.register_result_handler(name, receive)
            given = self.manager.add_request(prompt, name, streaming=is_streaming)
            if is_streaming:
                self.manager.register_result_handler(given, receive)
            return await over

        async def ask_all():
            asked = [asyncio.ensure_future(ask(*request)) for request in requests]
            await asyncio.sleep(0)
            self.runner.may_run.set()
            return await asyncio.wait_for(asyncio.gather(*asked), 30)

        self.manager.start()
        try:
            return asyncio.run(ask_all())
        finally:
            self.manager.stop()

    def forgot_all(self):
        """Return whether no record of any request is left."""
        return not self.manager._arrivals


@pytest.mark.parametrize("are_streaming", [(False, False), (True, True), (True, False)])
def test_requests_of_one_name_are_each_answered(nemotron, generator, are_streaming):
    """A client may send one x-request-id with all its calls; both requests waited for ever."""
    prompts, clients = [tokens(generator, n) for n in (9, 12)], Clients(nemotron)
    requests = zip(["one name"] * 2, prompts, are_streaming, strict=True)
    found = [outputs[-1].generated_tokens for outputs in clients.ask(*requests)]
    assert found == [nemotron.answer(prompt, 5) for prompt in prompts]
    assert clients.forgot_all()


def test_a_stream_that_never_began_answers_no_other_request(nemotron, generator):
    """Another client's request of the same name got the answer to its prompt."""
    prompts, clients = [tokens(generator, n) for n in (9, 12)], Clients(nemotron)
    contextvars.copy_context().run(_begin_a_stream, clients.manager, prompts[0], clients.settings)
    [outputs] = clients.ask(("one name", prompts[1], False))
    assert outputs[-1].generated_tokens == nemotron.answer(prompts[1], 5)
    assert clients.forgot_all()


def _begin_a_stream(manager, prompt, settings):
    """The server's code raises before it registers a callback."""
    current_request.set(ServedRequest(settings=settings))
    manager.add_request(prompt, "one name", streaming=True)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stopped_manager_leaves_no_client_waiting(nemotron, generator, is_late):
    """A request for another model stops the manager; clients of the first got no answer."""
    prompt, clients = tokens(generator, 9), Clients(nemotron)
    manager, runner = clients.manager, clients.runner

    async def ask():
        over = asyncio.get_running_loop().create_future()
        manager.register_result_handler("one", over.set_result)
        if is_late:
            runner.may_run.set()
            manager.stop()
            manager.add_request(prompt, "one")
        else:
            manager.add_request(prompt, "one")
            manager.stop(block=False)
            runner.may_run.set()
        return await asyncio.wait_for(over, 30)

    manager.start()
    output = asyncio.run(ask())
    manager.stop()
    if is_late:
        assert "has ended" in output.error
    else:
        assert output.generated_tokens == nemotron.answer(prompt, 5)
    assert clients.forgot_all()


def test_a_managers_thread_ends_before_the_interpreter_does(nemotron, generator, monkeypatch):
    """The thread freed tensors while the interpreter ended, which aborted the process."""
    at_exit, clients = [], Clients(nemotron)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    manager = clients.manager
    manager.start()

    async def ask():
        manager.register_result_handler("one", print)
        manager.add_request(tokens(generator, 9), "one")

    asyncio.run(ask())
    exiting = threading.Thread(target=at_exit[0])
    exiting.start()
    while not manager._is_stopped:
        assert exiting.is_alive()
    clients.runner.may_run.set()
    exiting.join()
    assert not manager._thread.is_alive()
    assert clients.forgot_all()  # it was not answered
    assert at_exit == []


@pytest.mark.parametrize("error", [RuntimeError, PoisonedError])
@pytest.mark.parametrize("breaks", [(3,), (3, 5)])
def test_requests_run_again_after_a_call_that_broke_off(
    nemotron, generator, monkeypatch, error, breaks
):
    """Requests without an output so far are run again once; all requests failed before."""
    prompts, clients = [tokens(generator, n) for n in (9, 12)], Clients(nemotron)
    step, calls = Batcher.step, []

    def broken(self):
        calls.append(1)
        if len(calls) in breaks:
            raise error("out of order")
        return step(self)

    monkeypatch.setattr(Batcher, "step", broken)
    [silent], streamed = clients.ask(("silent", prompts[0], False), ("streamed", prompts[1], True))
    assert [len(output.generated_tokens) for output in streamed] == [1, 2, 0]
    assert "out of order" in streamed[-1].error
    if len(breaks) == 1:
        assert (silent.error, silent.generated_tokens) == (None, nemotron.answer(prompts[0], 5))
    else:
        assert "out of order" in silent.error
    clients.runner.cache.check_invariants()


def test_a_model_without_memory_for_batches_is_served_request_by_request(nemotron, monkeypatch):
    """Each request failed, after trying to allocate the memory again."""
    tried = []

    def run_out(cache):
        tried.append(cache)
        raise torch.OutOfMemoryError("no memory for live states")

    monkeypatch.setattr(PrefixCache, "prepare_batches", run_out)
    settings = {"mamba_cache_gb": 0.01, "kv_cache_gb": 0.01, "block_size_tokens": BLOCK}
    one = ServedModel(nemotron.model, settings, lambda *_: None)
    assert (one.batches(), one.batches()) == (None, None)
    assert tried == [one.cache]


# Two caches of one model, in two threads.


def passing_on(function, *args, **kwargs):
    return function(*args, **kwargs)


def test_what_another_cache_replaces_meanwhile_is_no_setting(nemotron, generator):
    """A batch with a streamer was cancelled with the error that the model had changed."""
    model, prompt = nemotron.model, tokens(generator, 2 * BLOCK + 3)
    owner, scan = next(
        (one, name) for one, name, function in _functions_of(model) if _is_scan(function)
    )
    replacements = [
        (intercepted, model, "forward", passing_on),
        (replaced, model.config, "_attn_implementation_internal", lambda _: "mamba_cache_paged"),
        (intercepted, owner, scan, passing_on),
    ]
    cache = nemotron.cache()
    with ExitStack() as other_thread:

        def receive(*_):
            while replacements:
                replace, *what = replacements.pop()
                other_thread.enter_context(replace(cache.stats, *what))

        assert answers(batch(cache, [prompt], streamer=receive)) == [nemotron.answer(prompt, 6)]
        assert not replacements
        key = cache._runner.fingerprint.key
        assert answers(batch(cache, [prompt], streamer=receive)) == [nemotron.answer(prompt, 6)]
        assert cache._runner.fingerprint.key == key
    assert answers(batch(cache, [prompt])) == [nemotron.answer(prompt, 6)]
    assert cache.stats().hits == 2


# Where the host does not wait for each token, as on MPS, one more is computed and taken back.


class NoEvent:
    """An event that is always done, as work on the CPU is."""

    def __init__(self, **_):
        """Take the arguments of an event."""

    def record(self):
        """Does nothing."""

    synchronize = record


@pytest.mark.parametrize("returns_dict", [True, False])
@pytest.mark.parametrize("family", ["lfm2", "inkling", "granite 4"])
def test_a_token_that_is_taken_back_is_in_no_state(family, returns_dict, generator, monkeypatch):
    """The answer was lost: a RuntimeError, because the model's cache was a token shorter."""
    model = make_model(family)
    cache, prompt = make_cache(model), text(generator, 2 * BLOCK + 3)
    answer = plain(model, prompt).sequences[0, prompt.shape[1] :].tolist()
    kind = generation_utils.DeferredStopCheck
    monkeypatch.setattr(torch, "Event", NoEvent)
    monkeypatch.setattr(kind, "is_supported", staticmethod(partial(_as_on_mps, kind.is_supported)))
    options = {"eos_token_id": answer[-1], "return_dict_in_generate": returns_dict}
    expected = plain(model, prompt, **options)
    actual = cached(cache, prompt, **options)
    if returns_dict:
        expected, actual = expected.sequences, actual.sequences
    assert torch.equal(actual, expected)
    monkeypatch.undo()
    longer = torch.cat([actual, text(generator, 3)], dim=1)
    assert_same(plain(model, longer), cached(cache, longer))
    assert cache.stats().skipped_tokens == (actual.shape[1] - 1) // BLOCK * BLOCK


def _as_on_mps(is_supported, _, *args, **kwargs):
    return is_supported(torch.device("mps"), *args, **kwargs)


def test_what_is_cached_after_a_lost_request_is_cancelled_still_goes_below(nemotron, generator):
    """The request's end was counted twice, after which no request ever counted as the last."""
    cache = nemotron.cache(host_cache_gb=0.05)
    batch(cache, [tokens(generator, 5)])
    batcher, config = cache._batcher, nemotron.config(max_new_tokens=5)
    settings = AnswerSettingsReader(nemotron.model, None, {}).read(config, 9)
    [request] = batcher.submit("one", tokens(generator, 9), settings, seed=0)
    batcher.drop()
    batcher.end(request)
    before = cache.tier_stats()[0].entries["state"]
    batch(cache, [tokens(generator, 2 * BLOCK)])
    assert cache.tier_stats()[0].entries["state"] > before
