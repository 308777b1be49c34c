"""transformers' own server with prefix caches, driven by OpenAI's client on loopback."""

import contextlib
import functools
import gc
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from types import SimpleNamespace
from unittest import mock

import pytest

openai = pytest.importorskip("openai", reason="needs the extra serve")
for package in ("accelerate", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="needs the extra serve")

import torch  # noqa: E402
from chats import CHATML, OPENING, STRIPPING, make_tokenizer  # noqa: E402
from clocks import ManualClock  # noqa: E402
from pages import python_blocks  # noqa: E402
from serve_rig import BLOCK, NEW, SETTINGS, SPECIAL, TOKENS, Server, draw_words, save  # noqa: E402
from sources import ROOT  # noqa: E402
from store_rig import valkey_server  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.cli.serving import chat_completion, model_manager, utils  # noqa: E402
from transformers.generation.logits_process import ForcedEOSTokenLogitsProcessor  # noqa: E402
from transformers_rig import make_model  # noqa: E402

from mamba_cache.cache import AdaptiveSlotPolicy  # noqa: E402
from mamba_cache.context import prefetch, tiering  # noqa: E402
from mamba_cache.errors import (  # noqa: E402
    InvalidArgumentError,
    MissingExtraError,
    StepOrderError,
    UnsupportedVersionError,
)
from mamba_cache.integrations.transformers import serve  # noqa: E402
from mamba_cache.integrations.transformers import tiers as prefix_tiers  # noqa: E402
from mamba_cache.integrations.transformers.batching.batcher import Batcher  # noqa: E402
from mamba_cache.integrations.transformers.serve import installing  # noqa: E402
from mamba_cache.tiers import lower  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models by name."""
    root = tmp_path_factory.mktemp("models")
    hybrids = {"main": ("nemotron_h", CHATML), "other": ("falcon_h1", CHATML)}
    hybrids |= {"batched": ("nemotron_h", CHATML), "windows": ("inkling", CHATML)}
    hybrids |= {"stripping": ("granite 4", STRIPPING), "opening": ("granite 4", OPENING)}
    found = {
        name: save(root / name, make_model(family, vocab_size=TOKENS, **SPECIAL), template)
        for name, (family, template) in hybrids.items()
    }
    llama = LlamaConfig(
        vocab_size=TOKENS, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, **SPECIAL,
    )  # fmt: skip
    torch.manual_seed(0)
    found["llama"] = save(root / "llama", LlamaForCausalLM(llama).eval())
    return found


@pytest.fixture(scope="module")
def plain_answers(folders):
    """Answers of the server without caches to malformed requests."""
    running = Server()
    try:
        return [running.post(path, fill(body, folders)) for path, body in MALFORMED]
    finally:
        running.close()


@pytest.fixture(scope="module")
def server(plain_answers):
    with serve.installed(**SETTINGS, max_requests=4):
        running = Server()
        yield running
        running.close()


@pytest.fixture(scope="module")
def batching(server):
    """A server with continuous batching, of models of its own."""
    running = Server(continuous_batching=True)
    yield running
    running.close()


@pytest.fixture(params=["main", "batched"])
def each(request, folders):
    """A server without and with continuous batching, and the folder of its model."""
    name = "batching" if request.param == "batched" else "server"
    return request.getfixturevalue(name), folders[request.param]


@pytest.fixture(scope="module")
def references(folders):
    """The same models, in no server."""
    return {name: AutoModelForCausalLM.from_pretrained(path) for name, path in folders.items()}


@pytest.fixture
def words(generator):
    """Makes text that no request has sent before."""
    return partial(draw_words, generator)


def prompt_ids(messages, template=CHATML):
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    inputs = make_tokenizer(template).apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return inputs["input_ids"]


def generated(model, ids, **options):
    """Return the text that the model generates without a server."""
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return make_tokenizer(CHATML).decode(output[0, ids.shape[1] :])


def text_of(answer):
    return answer.choices[0].message.content


def hit(answer):
    return answer.usage.prompt_tokens_details.cached_tokens


def reused(length):
    """Return the tokens that a repeated prompt of this length, or its continuation, skips."""
    return (length - 1) // BLOCK * BLOCK


def in_common(*prompts):
    """Return the number of tokens in the prompts' common prefix."""
    same = (len(set(tokens)) == 1 for tokens in zip(*prompts, strict=False))
    return sum(takewhile(bool, same))


def joined(stream):
    """Return the text of a stream, and its usage."""
    chunks = list(stream)
    return "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].usage


@contextlib.contextmanager
def counted(server, folder):
    """Counts the tokens of each forward of a model.

    It patches PyTorch: a replaced method of the model would make calls bypass the cache.
    """
    counts, original = [], torch.nn.functional.embedding
    weight = server.timed(folder).model.get_input_embeddings().weight

    def counting(ids, table, *args, **kwargs):
        if table is weight:
            counts.append(ids.numel())
        return original(ids, table, *args, **kwargs)

    with mock.patch.object(torch.nn.functional, "embedding", counting):
        yield counts


# Equal answers, and less work.


def test_the_slots_policy_receives_whether_a_chat_goes_on(each, monkeypatch):
    running, folder = each
    received, on_request = [], AdaptiveSlotPolicy.on_request

    def watched(self, facts):
        received.append((facts.will_continue, facts.source))
        return on_request(self, facts)

    running.chat(folder, "Get ready.")
    monkeypatch.setattr(AdaptiveSlotPolicy, "on_request", watched)
    first = [{"role": "user", "content": "A question."}]
    running.chat(folder, first)
    answer = {"role": "assistant", "content": "An answer."}
    running.chat(folder, [*first, answer, {"role": "user", "content": "Another."}])
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    running.chat(folder, first, tools=[tool])
    assert received == [(hint, "transformers server") for hint in (False, True, True)]


def ask_chat(server, model, text, stream):
    """Return the text of an answer, and the number of cached prompt tokens."""
    answer = server.chat(model, text, stream=stream)
    answer_text, usage = joined(answer) if stream else (text_of(answer), answer.usage)
    assert usage.completion_tokens == NEW
    return answer_text, usage.prompt_tokens_details.cached_tokens


def ask_prompt(server, model, text, stream):
    create = server.client.completions.create
    answer = create(model=model, prompt=text, stream=stream, max_tokens=NEW, temperature=0)
    chunks = list(answer) if stream else [answer]
    return "".join(chunk.choices[0].text for chunk in chunks), hit(chunks[-1])


def ask_response(server, model, text, stream):
    answer = server.client.responses.create(
        model=model, input=text, max_output_tokens=NEW, temperature=0, stream=stream
    )
    answer = list(answer)[-1].response if stream else answer
    return answer.output_text, answer.usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [ask_chat, ask_prompt, ask_response])
def test_each_endpoint_hits_streamed_or_not(server, folders, references, words, ask, stream):
    question = words(200)
    ids = prompt_ids(question)
    if ask is ask_prompt:
        ids = make_tokenizer(CHATML)(question, return_tensors="pt")["input_ids"]
    expected = generated(references["main"], ids)
    answers = [ask(server, folders["main"], question, stream) for _ in range(2)]
    assert answers == [(expected, 0), (expected, reused(ids.shape[1]))]


def test_eight_clients_at_once(each, server, folders, references, words):
    """Clients share one system prompt; each has two turns, and half of them are streamed."""
    (running, folder), system = each, {"role": "system", "content": words(400)}
    chats = [[system, {"role": "user", "content": words(30 + n)}] for n in range(8)]

    def talk(number):
        chat, turns = list(chats[number]), []
        with openai.OpenAI(base_url=running.client.base_url, api_key="none") as client:
            for _ in range(2):
                create = client.chat.completions.create
                options = {"model": folder, "messages": chat, "max_tokens": NEW, "temperature": 0}
                if number % 2:
                    text, usage = joined(create(**options, stream=True))
                else:
                    answer = create(**options)
                    text, usage = text_of(answer), answer.usage
                turns.append((prompt_ids(chat), text, usage.prompt_tokens_details.cached_tokens))
                chat += [{"role": "assistant", "content": text}]
                chat += [{"role": "user", "content": "Go on."}]
        return turns

    others = [folders["other"], folders["llama"]]  # several models at once
    expected = {name: text_of(server.chat(name, "Hello")) for name in others}
    running.chat(folder, words(9))  # makes its cache
    before = running.served(folder).cache.stats()
    with ThreadPoolExecutor(8) as pool:
        answers = {name: pool.submit(server.chat, name, "Hello") for name in others}
        turns = list(pool.map(talk, range(8)))
    assert {name: text_of(answer.result()) for name, answer in answers.items()} == expected
    for ids, text, _ in (turn for chat in turns for turn in chat):
        assert text == generated(references["main"], ids)
    shared = in_common(*(chat[0][0][0].tolist() for chat in turns))
    assert shared > 400
    assert sorted(chat[0][2] for chat in turns) == [0] + [shared // BLOCK * BLOCK] * 7
    # The last token of an answer went through no forward.
    assert [c[1][2] for c in turns] == [reused(c[0][0].shape[1] + NEW) for c in turns]
    after = running.served(folder).cache.stats()
    num_cached = sum(turn[2] for chat in turns for turn in chat)
    assert after.skipped_tokens - before.skipped_tokens == num_cached
    running.check(folder)
    requests = f'mamba_cache_requests_total{{cache="{folder}@main"}}'
    assert f"{requests} {float(after.requests)}\n" in running.get("/metrics")
    if folder == folders["batched"]:
        counts = running.served(folder).cache.batch_stats()
        assert counts.decoded_tokens > counts.decode_steps  # several at once


def test_a_client_that_goes_away_while_it_streams(each, references, words):
    (running, folder), question = each, words(300)
    expected, ids = generated(references["main"], prompt_ids(question)), prompt_ids(question)
    with counted(running, folder) as counts:
        stream = running.chat(folder, question, stream=True, max_tokens=5000)
        for _, chunk in zip(range(4), stream, strict=False):
            assert chunk.usage is None
        stream.close()
        answer = running.chat(folder, question)  # one by one: waits until the other has ended
        batcher = running.served(folder).cache._batcher
        while batcher is not None and batcher.num_unfinished:
            threading.Event().wait(0.01)
    assert len(counts) < 5000
    assert text_of(answer) == expected
    assert hit(answer) == reused(ids.shape[1])
    running.check(folder)


def test_seeds_draw_the_same_as_without_a_cache(server, folders, references, words):
    """Making the cache at the first request draws no random numbers."""
    main, question = folders["main"], words(100)
    server.post("/reset", {})
    torch.manual_seed(5)
    expected = generated(references["main"], prompt_ids(question), do_sample=True)
    config = json.dumps({"do_sample": True, "max_new_tokens": NEW, "suppress_tokens": [96, 97]})
    options = {"generation_config": config}
    for number in range(2):
        answer = server.chat(main, question, seed=5, temperature=1, extra_body=options)
        assert text_of(answer) == expected
        assert hit(answer) == number * reused(prompt_ids(question).shape[1])


# Requests that may share prefixes.


def test_users_and_headers_share_nothing(each, words):
    (server, main), question = each, words(100)
    length = reused(prompt_ids(question).shape[1])
    kinds = [
        {},
        {"user": "alice"},
        {"user": "bob"},
        {"user": ""},
        {"extra_headers": {"X-Cache-Salt": "alice"}},
        {"extra_headers": {"X-Cache-Salt": "alice"}, "user": "alice"},
        {"extra_headers": {"X-Cache-Salt": "bob"}, "user": "alice"},
        {"extra_body": {"user": ["alice"]}},
    ]
    assert [hit(server.chat(main, question, **kind)) for kind in kinds] == [0] * len(kinds)
    assert [hit(server.chat(main, question, **kind)) for kind in kinds] == [length] * len(kinds)
    stream = {"stream": True, "user": "carol"}
    assert joined(server.chat(main, question, **stream))[1].prompt_tokens_details.cached_tokens == 0


def test_digests_of_a_server_are_keyed(server, folders):
    """Each model's digests use the default algorithm, which is not forgeable, and a secret."""
    stores = [server.served(folders[name]).prepare()._store for name in ("main", "other")]
    assert [store.hasher.algorithm for store in stores] == ["blake2b"] * 2
    assert len({store.config.hash_secret for store in stores}) == 2


# Templates that show earlier turns differently.


@pytest.mark.parametrize(("name", "template"), [("stripping", STRIPPING), ("opening", OPENING)])
def test_stripped_reasoning_hits_up_to_where_it_is_missing(
    server, folders, references, words, name, template
):
    chat, earlier = [{"role": "user", "content": words(150)}], None
    for _ in range(4):
        ids = prompt_ids(chat, template)[0].tolist()
        answer = server.chat(folders[name], chat)
        assert text_of(answer) == generated(references[name], torch.tensor([ids]))
        if earlier is None:
            assert hit(answer) == 0
        else:
            shared = in_common(earlier, ids)
            assert hit(answer) == shared // BLOCK * BLOCK
            assert (shared == len(earlier)) == (name == "stripping")
        earlier = ids
        thought = f"<think>\n{words(40)}</think>{words(20)}"
        chat += [
            {"role": "assistant", "content": thought},
            {"role": "user", "content": words(30)},
        ]


def ask_with_tools(server, folder, words):
    tools = [{"type": "function", "function": {"name": words(90)}} for _ in range(2)]
    options = {"tools": tools, "extra_body": {"chat_template_kwargs": {"greeting": words(70)}}}
    return [hit(server.chat(folder, words(40), **options)) for _ in range(2)]


def ask_with_instructions(server, folder, words):
    options = {"instructions": words(90), "max_output_tokens": 2, "model": folder}
    options["tools"] = [{"type": "function", "name": words(90), "parameters": {}, "strict": True}]
    create = partial(server.client.responses.create, **options, stream=False)
    answers = [create(input=words(40)) for _ in range(2)]
    return [one.usage.input_tokens_details.cached_tokens for one in answers]


@pytest.mark.parametrize(("ask", "least"), [(ask_with_tools, 240), (ask_with_instructions, 170)])
def test_what_the_template_puts_before_a_question_is_shared(server, folders, words, ask, least):
    first, second = ask(server, folders["main"], words)
    assert first == 0
    assert second > least


# The same behaviour as the plain server.

CHATS, PROMPTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED = {"model": "MAIN", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
MALFORMED = [
    (CHATS, b"{no json"),
    (CHATS, {**ASKED, "unknown": 1}),
    (CHATS, {"model": "MAIN"}),
    (CHATS, {**ASKED, "messages": "Hello"}),
    (CHATS, {**ASKED, "messages": [{"role": "user"}]}),
    (CHATS, {**ASKED, "chat_template_kwargs": 3}),
    (CHATS, {**ASKED, "generation_config": '{"num_beams": 2}', "stream": True}),
    (CHATS, {**ASKED, "model": "/nowhere"}),
    (PROMPTS, {"model": "MAIN", "prompt": [1, 2]}),
    (PROMPTS, {"model": "MAIN", "prompt": "", "max_tokens": 2, "stream": True}),
    (RESPONSES, {"model": "MAIN", "input": [{"role": "user"}, {"type": "odd"}]}),
    ("/load_model", {}),
    ("/nowhere", {}),
]


def fill(body, folders):
    if isinstance(body, dict) and body.get("model") == "MAIN":
        return {**body, "model": folders["main"]}
    return body


def without_ids(answer):
    """Return an answer without its per-request fields."""
    status, body = answer
    text = re.sub(rb'"(id|created)":("[^"]*"|\d+),?', b"", body)
    return status, re.sub(rb',?"prompt_tokens_details":\{[^}]*\}', b"", text)


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_malformed_requests(server, plain_answers, folders, number):
    path, body = MALFORMED[number]
    answer = server.post(path, fill(body, folders))
    assert without_ids(answer) == without_ids(plain_answers[number])
    if "MAIN" in str(body):
        assert hit(server.chat(folders["main"], "Still there?")) is not None
        server.check(folders["main"])


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_prompt_is_refused_before_it_is_batched(batching, folders, stream):
    body = {"model": folders["batched"], "prompt": "", "max_tokens": 2, "stream": stream}
    status, answer = batching.post(PROMPTS, body)
    assert (status, b"at least one token" in answer) == (400, True), answer


# Models that cannot be cached, and requests that a cache does not serve.


def warnings_in(caplog):
    found = (r for r in caplog.records if r.name.startswith("mamba_cache"))
    return [record.getMessage() for record in found if record.levelno >= logging.WARNING]


def test_a_model_that_cannot_be_cached_is_served_with_one_warning(
    server, folders, references, words, caplog
):
    question = words(100)
    expected = generated(references["llama"], prompt_ids(question))
    for _ in range(2):
        answer = server.chat(folders["llama"], question)
        assert text_of(answer) == expected
        assert answer.usage.prompt_tokens_details is None
    text, usage = joined(server.chat(folders["llama"], question, stream=True))
    assert (text, usage.prompt_tokens_details) == (expected, None)
    [warning] = warnings_in(caplog)
    assert re.search(
        r"^LlamaForCausalLM \(.*llama\) is served without a prefix cache: .*linear", warning
    )
    assert "llama" not in server.get("/metrics")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_cache_does_not_serve_goes_past_it(
    server, folders, references, words, caplog, stream
):
    main, question = folders["main"], words(100)
    server.served(main)._said.clear()
    expected = generated(references["main"], prompt_ids(question))
    config = {"do_sample": False, "use_cache": False, "suppress_tokens": [96, 97]}
    options = {"extra_body": {"generation_config": json.dumps(config)}, "stream": stream}
    for _ in range(2):
        answer = server.chat(main, question, temperature=None, **options)
        text, usage = joined(answer) if stream else (text_of(answer), answer.usage)
        assert text == expected
        assert usage.prompt_tokens_details is None
    [warning] = warnings_in(caplog)
    assert re.search(r"answers such requests without its prefix cache: use_cache must be", warning)
    assert hit(server.chat(main, question)) == 0


def put_heads(models, weight):
    with torch.no_grad():
        for model in models:
            model.lm_head.weight.copy_(weight)


@pytest.mark.parametrize("stream", [False, True])
def test_weights_that_change_are_noticed_and_forgotten(
    server, folders, references, words, caplog, stream
):
    other, question = folders["other"], words(100)
    before = generated(references["other"], prompt_ids(question))
    assert text_of(server.chat(other, question)) == before
    server.served(other)._said.clear()
    pair = [server.timed(other).model, references["other"]]
    kept = pair[0].lm_head.weight.detach().clone()
    try:
        put_heads(pair, kept.flip(0))
        changed = generated(references["other"], prompt_ids(question))
        assert changed != before
        answers = [server.chat(other, question, stream=stream) for _ in range(3)]
        answers = [joined(one) if stream else (text_of(one), one.usage) for one in answers]
        assert [text for text, _ in answers] == [changed] * 3
        hits = [usage.prompt_tokens_details.cached_tokens for _, usage in answers]
        assert hits == [0] + [reused(prompt_ids(question).shape[1])] * 2
        [warning] = warnings_in(caplog)
        assert re.search("begins its prefix cache anew: the model's weights .*lm_head", warning)
    finally:
        put_heads(pair, kept)
        server.served(other).cache.reset()


def test_a_model_that_is_cast_is_served_without_its_cache(
    server, folders, references, words, caplog
):
    question, folder = words(100), folders["stripping"]
    server.chat(folder, question)
    pair = [server.timed(folder).model, references["stripping"]]
    try:
        for model in pair:
            model.bfloat16()
        expected = generated(references["stripping"], prompt_ids(question))
        assert [text_of(server.chat(folder, question)) for _ in range(2)] == [expected] * 2
    finally:
        references["stripping"].float()
        server.timed(folder).delete_model()
    [warning] = warnings_in(caplog)
    assert re.search("is served without a prefix cache: .*bfloat16 now", warning)


def test_a_model_that_is_cast_while_it_is_batched_is_served_without_its_cache(
    batching, folders, references, words, caplog
):
    """The thread of its batches ended, and every later request failed because of that."""
    question, folder = words(100), folders["opening"]
    batching.chat(folder, question)
    pair = [batching.timed(folder).model, references["opening"]]
    try:
        for model in pair:
            model.bfloat16()
        expected = generated(references["opening"], prompt_ids(question, OPENING))
        status, text = batching.post(CHATS, body_of(CHATS, folder, question))
        assert (status, "bfloat16 now" in json.loads(text)["detail"]) == (500, True)
        assert [text_of(batching.chat(folder, question)) for _ in range(2)] == [expected] * 2
        assert '"ok"' in batching.get("/health")
    finally:
        references["opening"].float()
        batching.timed(folder).delete_model()
    [warning] = warnings_in(caplog)
    assert re.search("is served without a prefix cache: .*bfloat16 now", warning)


def test_what_breaks_a_stream_is_its_error(server, folders, words, monkeypatch):
    """The same error as without a cache; no retry once a token was streamed."""
    main, question = folders["main"], words(100)
    model, calls = server.timed(main).model, []
    original = model.forward

    @functools.wraps(original)
    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise InvalidArgumentError("broken on purpose")
        return original(*args, **kwargs)

    server.chat(main, words(20))
    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(openai.APIError):
        joined(server.chat(main, question, stream=True))
    monkeypatch.undo()
    assert len(calls) == 3
    server.check(main)


# Requests that cannot be served; other requests go on.

FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "eos_token_id", "pad_token_id", "num_return_sequences", "stop_strings",
    "max_new_tokens", "min_new_tokens",
)  # fmt: skip
VALUES = ("x", -1, 1.5, True, [], ["x"], {}, {"x": "y"}, [[None]])


def body_of(path, folder, text="Hello", length=2, **fields):
    """Return the body of a request to an endpoint, not streamed."""
    body = {"model": folder, "stream": False, **fields}
    if path == CHATS:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": length, **body}
    if path == PROMPTS:
        return {"prompt": text, "max_tokens": length, **body}
    return {"input": text, "max_output_tokens": length, **body}


def test_one_field_configurations_fail_alone(batching, folders):
    """216 values of wrong types, beside eight clients whose answers stay the same."""
    server, folder = batching, folders["batched"]
    texts = [f"An innocent question, number {n}: {'y' * n}?" for n in range(8)]
    expected = [text_of(server.chat(folder, text)) for text in texts]
    configs = [{field: value} for field in FIELDS for value in VALUES]
    assert len(configs) == 216
    is_over, rounds = threading.Event(), itertools.count()

    def innocent(number):
        found = set()
        while not is_over.is_set():
            found.add(text_of(server.chat(folder, texts[number])))
            next(rounds)
        return found

    def guilty(config):
        config = {"max_new_tokens": 2, "do_sample": True, **config}
        body = body_of(CHATS, folder, generation_config=json.dumps(config))
        del body["max_tokens"]
        return server.post(CHATS, body)

    with ThreadPoolExecutor(8) as clients, ThreadPoolExecutor(4) as attackers:
        running = [clients.submit(innocent, n) for n in range(8)]
        try:
            answers = list(attackers.map(guilty, configs))
        finally:
            is_over.set()
        assert [one.result() for one in running] == [{text} for text in expected]
    assert next(rounds) >= 8
    statuses = [status for status, _ in answers]
    wrong = [(config, answer) for config, answer in zip(configs, answers, strict=True)
             if answer[0] not in (200, 400)]  # fmt: skip
    assert wrong == []
    assert statuses.count(400) > 100
    for status, text in answers:
        assert status == 200 or json.loads(text)["detail"]
    assert '"ok"' in server.get("/health")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHATS, PROMPTS, RESPONSES])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"length": 0}, "max_new_tokens"),
        ({"length": -1}, "max_new_tokens"),
        ({"length": "many"}, "many"),
        ({"generation_config": '{"top_k": "x", "do_sample": true}'}, "top_k"),
        ({"generation_config": {"top_k": 3}}, "JSON"),
        ({"temperature": -1.0, "generation_config": '{"do_sample": true}'}, "temperature"),
        ({"generation_config": '{"sequence_bias": [[[99999], 1.0]]}'}, "99999"),
        ({"generation_config": '{"forced_eos_token_id": 99999}'}, "99999"),
        ({"generation_config": '{"cache_implementation": "odd"}'}, "odd"),
    ],
)
def test_an_unservable_request_gets_the_reason(each, path, stream, fields, reason):
    running, folder = each
    answer = running.post(path, body_of(path, folder, **fields, stream=stream))
    assert (answer[0], reason in json.loads(answer[1])["detail"]) == (400, True), answer
    status, _ = running.post(path, body_of(path, folder))
    assert status == 200


@pytest.mark.parametrize("path", [CHATS, PROMPTS, RESPONSES])
def test_the_server_does_not_warn_that_it_ignores_the_user(server, folders, path, monkeypatch):
    """The user is the salt; the server warns about other ignored fields."""
    messages = []
    monkeypatch.setattr(utils.logger, "warning_once", messages.append)
    for more in ({}, {"truncation": "auto"} if path == RESPONSES else {"logprobs": None}):
        body = body_of(path, folders["main"], user="alice", **more)
        assert server.post(path, body)[0] == 200
    assert [message for message in messages if "user" in message] == []
    assert len(messages) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHATS, PROMPTS, RESPONSES])
def test_a_request_that_a_batch_cannot_serve_gets_the_reason(batching, folders, path, stream):
    """Prompts longer than the longest sequence, and options that need a call of their own."""
    for fields, reason in (
        ({"text": "x" * 200_000}, "max_sequence_length"),
        ({"generation_config": '{"num_beams": 2}'}, "beam_search"),
        ({"generation_config": '{"max_time": 3.0}'}, "max_time"),
    ):
        body = body_of(path, folders["batched"], **fields, stream=stream)
        status, text = batching.post(path, body)
        assert (status, reason in json.loads(text)["detail"]) == (400, True), text


def test_a_streamed_request_that_fails_later_ends_with_the_reason(batching, folders, monkeypatch):
    """A processor that raises in the middle of an answer."""
    config = json.dumps({"max_new_tokens": 9, "forced_eos_token_id": 3, "do_sample": False})
    body = body_of(CHATS, folders["batched"], generation_config=config)
    del body["max_tokens"]

    def fails(self, ids, scores):
        if ids.shape[1] > 20:
            raise RuntimeError("broken on purpose")
        return scores

    monkeypatch.setattr(ForcedEOSTokenLogitsProcessor, "__call__", fails)
    status, text = batching.post(CHATS, {**body, "stream": True})
    assert status == 200
    assert b'data: {"error": "broken on purpose"}' in text
    status, text = batching.post(CHATS, body)
    assert (status, json.loads(text)["detail"]) == (400, "broken on purpose")


def test_a_step_that_fails_twice_ends_its_requests(batching, folders, monkeypatch):
    def fails(self, step):
        raise RuntimeError("out of order")

    body = body_of(CHATS, folders["batched"], "Will it run?")
    with monkeypatch.context() as broken:
        broken.setattr(Batcher, "_compute_decodes", fails)
        status, text = batching.post(CHATS, body)
    assert status == 500
    assert "out of order" in json.loads(text)["detail"]
    status, _ = batching.post(CHATS, body)
    assert status == 200
    assert '"ok"' in batching.get("/health")


# Models that come and go.


def test_an_unloaded_model_gives_its_cache_back(each, folders, references, words):
    """The thread of its batches kept model and cache alive beside the next ones."""
    (running, folder), question = each, words(100)
    expected = generated(references["main"], prompt_ids(question))
    assert text_of(running.chat(folder, question)) == expected
    model = weakref.ref(running.timed(folder).model)
    store = weakref.ref(running.served(folder).cache._store)
    is_batched = folder == folders["batched"]
    manager = running.serve._generation_state.get_manager(f"{folder}@main", use_cb=is_batched)
    # The answering thread releases the model just after its answer.
    end = partial(manager._cb._thread.join, 30) if is_batched else manager.submit(int).result
    running.timed(folder).timeout_seconds = 1
    running.timed(folder)._timeout_reached()
    end()
    gc.collect()
    assert (model(), store()) == (None, None)
    assert folder not in running.get("/metrics")
    answers = [running.chat(folder, question) for _ in range(2)]  # the model is loaded again
    assert [text_of(one) for one in answers] == [expected] * 2
    assert [hit(one) for one in answers] == [0, reused(prompt_ids(question).shape[1])]


def test_a_model_that_is_unloaded_while_it_answers(server, folders, references, words):
    other, question = folders["other"], words(100)
    expected = generated(references["other"], prompt_ids(question), max_new_tokens=60)
    stream = server.chat(other, question, stream=True, max_tokens=60)
    chunks = [next(stream), next(stream)]
    server.timed(other).delete_model()
    chunks += list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert hit(chunks[-1]) == 0
    answer = server.chat(other, question, max_tokens=60)
    assert (text_of(answer), hit(answer)) == (expected, 0)


def test_a_model_that_is_named_has_its_cache_before_the_first_request(server, folders):
    named = Server(force_model=folders["main"])
    try:
        requests = f'mamba_cache_requests_total{{cache="{folders["main"]}@main"}} 0.0'
        assert requests in named.get("/metrics")
        assert hit(named.chat(folders["main"], "Hello")) == 0
    finally:
        named.close()


def test_models_without_states_are_batched_by_transformers_itself(server, folders, caplog):
    batches = Server(continuous_batching=True, force_model=folders["llama"])
    try:
        assert batches.chat(folders["llama"], "Hello").choices[0].message.content
        manager = batches.serve._generation_state._cb_manager._cb
        assert type(manager).__module__.startswith("transformers.")
        assert batches.served(folders["llama"]).cache is None
    finally:
        batches.close()


def test_a_model_that_cannot_be_batched_is_served_request_by_request(batching, folders, caplog):
    for _ in range(2):
        answer = batching.chat(folders["windows"], "What is kept of a window? " * 8)
    assert hit(answer) > 0
    messages = [message for message in warnings_in(caplog) if "request by request" in message]
    assert len(messages) == 1
    assert "sliding window" in messages[0]


# Installation.


def found():
    return {path: installing._find(path) for path in installing._REPLACEMENTS}


@pytest.fixture
def uninstalled(monkeypatch):
    """Uninstall everything for one test, and restore the installation afterwards."""
    kept = list(installing._originals)
    substitutes = [(owner, name, vars(owner)[name]) for owner, name, _ in kept]
    models = list(installing._installed)
    serve.uninstall()
    yield
    serve.uninstall()
    for owner, name, substitute in substitutes:
        setattr(owner, name, substitute)
    installing._originals[:] = kept
    installing._installed[:] = models


def test_uninstalling_leaves_nothing(uninstalled):
    before = {path: vars(owner)[name] for path, (owner, name) in found().items()}
    assert not any("mamba_cache" in getattr(x, "__module__", "") for x in before.values())
    with serve.installed(**SETTINGS):
        with pytest.raises(StepOrderError, match="installed already"):
            serve.install(**SETTINGS)
        now = {path: vars(owner)[name] for path, (owner, name) in found().items()}
        assert all(now[path] is not before[path] for path in before)
    assert {path: vars(owner)[name] for path, (owner, name) in found().items()} == before
    serve.uninstall()  # does nothing


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mamba_cache_gb": -1}, "mamba_cache_gb must be a number in"),
        ({"disk_cache_path": "cache"}, "disk_cache_path needs a host tier"),
        ({"store": "valkey://127.0.0.1:1", "host_cache_gb": 1}, "store needs hash_secret"),
        ({"store": "valky://a", "host_cache_gb": 1, "hash_secret": b"a"}, "a store must be one of"),
        ({"weights_check": "some"}, "weights_check must be one of"),
        ({"slot_policy": "oldest"}, "slot_policy must be one of"),
        ({"placement": "ends"}, "placement must be None or"),
        ({"variant": ""}, "variant must be a str"),
        ({"clock": 5}, "clock must return seconds when it is called, got 5"),
        ({"events_mode": "all"}, "events_mode must be one of"),
        ({"block_size": 32}, r"no settings \['block_size'\]"),
        ({"events_replay_endpoint": "tcp://127.0.0.1:*"}, "goes with events_endpoint"),
    ],
)
def test_settings_that_no_model_could_have(uninstalled, setting, message):
    with pytest.raises(InvalidArgumentError, match=message):
        serve.install(**{**SETTINGS, **setting})
    assert not installing._originals


def test_a_server_keeps_its_prefixes_over_a_restart(
    uninstalled, folders, words, tmp_path, monkeypatch
):
    # The package's clock jumps in tests; the disk is waited for all the same.
    monkeypatch.setattr(prefix_tiers, "_DEADLINE_SECONDS", None)
    monkeypatch.setattr(tiering.Tiering, "_read_times", lambda self: None)
    question, hits = words(100), []
    for _ in range(2):
        with serve.installed(**SETTINGS, host_cache_gb=0.01, disk_cache_path=tmp_path):
            running = Server()
            hits.append(hit(running.chat(folders["main"], question)))
            running.timed(folders["main"]).delete_model()
            running.close()
    assert hits == [0, reused(prompt_ids(question).shape[1])]


@pytest.mark.engine
def test_servers_share_a_store_and_answer_without_it(
    uninstalled, folders, words, monkeypatch
) -> None:
    monkeypatch.setattr(prefix_tiers, "_DEADLINE_SECONDS", None)
    monkeypatch.setattr(tiering.Tiering, "_read_times", lambda self: None)
    for module in (lower, prefetch):
        monkeypatch.setattr(module, "time", ManualClock())
    question, hits, texts = words(100), [], []
    with valkey_server() as store:
        shared = {"store": f"valkey://127.0.0.1:{store.port}", "hash_secret": b"of both"}
        for is_alive in (True, True, False):
            if not is_alive:
                store.kill()
            with serve.installed(**SETTINGS, host_cache_gb=0.01, **shared):
                running = Server()
                answer = running.chat(folders["main"], question)
                hits.append(hit(answer))
                texts.append(answer.choices[0].message.content)
                running.timed(folders["main"]).delete_model()
                running.close()
    assert hits == [0, reused(prompt_ids(question).shape[1]), 0]
    assert texts[0] == texts[1] == texts[2]


def test_a_server_of_another_make_is_refused_whole(uninstalled, monkeypatch):
    monkeypatch.delattr(chat_completion, "CompletionUsage")
    with pytest.raises(UnsupportedVersionError, match=r"no .*chat_completion\.CompletionUsage"):
        serve.install(**SETTINGS)
    assert not installing._originals
    for one in (utils.GenerateManager, model_manager.TimedModel):
        assert not any("mamba_cache" in getattr(x, "__module__", "") for x in vars(one).values())


@pytest.mark.parametrize("package", ["fastapi", "openai", "prometheus_client"])
def test_without_the_extra_its_name_is_said(uninstalled, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs {package}: pip install -e '\.\[serve\]'"):
        serve.install(**SETTINGS)


# The guide.


def test_the_guides_lines_run(server, folders, words, uninstalled, capsys):
    ask, run = python_blocks("how-to/serve.md")
    running = []
    names = {
        "MODEL": folders["main"], "messages": [{"role": "user", "content": words(60)}],
        "Serve": lambda **options: running.append(Server(**options)),
    }  # fmt: skip
    run = run.replace("from transformers.cli.serve import Serve\n", "")
    run = re.sub(r"_gb=\d", "_gb=0.02", run).replace("0.02)", "0.02, block_size_tokens=16)")
    exec(compile(run, "how-to/serve.md", "exec"), names)
    try:
        assert "localhost:8000" in ask
        code = ask.replace("http://localhost:8000", running[0].url)
        for _ in range(2):
            exec(compile(code, "how-to/serve.md", "exec"), names)
            names["client"].close()
    finally:
        running[0].close()
    [first, second] = re.findall(r"^(\d+) (\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert (first[1], second[1]) == ("0", str(reused(int(first[0]))))


# The command.


# It writes a line on stderr when the cache begins to run a batch.
COMMAND = """
import sys

from mamba_cache.cli.app import run
from mamba_cache.integrations.transformers.batching.batcher import Batcher

warm_up = Batcher.warm_up

def announced(self, max_tokens):
    limits = self._scheduler.max_chunk_tokens, self._scheduler.max_requests
    sys.stderr.write(f"<{self.context.max_requests} rows, {limits}, {self._is_eager}>\\n")
    warm_up(self, max_tokens)

Batcher.warm_up = announced
run(sys.argv[1:])
"""

BATCHES = (
    "--max-requests", "3", "--continuous-batching", "--cb-max-batch-tokens", "32",
    "--no-cb-use-cuda-graph",
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "batches"),
    [((), set()), (BATCHES, {"<3 rows, (32, 3), use_cuda_graph is False>"})],
    ids=["one by one", "continuous batching"],
)
def test_the_command_serves(folders, references, words, options, batches, tmp_path):
    """The library's own options for batches count as well."""
    command = [sys.executable, "-c", COMMAND, "serve", folders["main"], *options]
    command += ["--mamba-cache-gb", "0.02", "--kv-cache-gb", "0.02", "--block-size-tokens", "16"]
    command += ["--port", "0", "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    if not batches:
        command += ["--host-cache-gb", "0.01", "--disk-cache-path", str(tmp_path / "disk")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # as the reference computes
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if address := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            pytest.fail("".join(lines))
        drain = threading.Thread(target=lambda: lines.extend(process.stderr))
        drain.start()
        question = words(100)
        ids = prompt_ids(question)
        expected = generated(references["main"], ids)
        running = SimpleNamespace(
            client=openai.OpenAI(base_url=f"{address[1]}/v1", api_key="none", max_retries=0)
        )
        with running.client:
            answers = [Server.chat(running, folders["main"], question) for _ in range(2)]
        assert [text_of(one) for one in answers] == [expected] * 2
        assert [hit(one) for one in answers] == [0, reused(ids.shape[1])]
        process.send_signal(signal.SIGINT)
        drain.join()
        # `transformers serve` exits in the same way. Background jobs of a shell ignore SIGINT, and
        # their children too: the server still stops, but is not interrupted afterwards.
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert process.wait() == (0 if is_ignored else 130)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert bool(list(tmp_path.glob("disk/mc1-*/*-s-*"))) is not bool(batches)
    assert {*re.findall(r"<\d+ rows.*?>", "".join(lines))} == batches
