"""What the server says to a request that cannot be served, and that other requests go on."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai", reason="needs the extra serve")
for package in ("accelerate", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="needs the extra serve")
pytest.importorskip("transformers", reason="needs the extra transformers")

from serve_rig import SETTINGS, SPECIAL, TOKENS, Server, save  # noqa: E402
from transformers.cli.serving import utils  # noqa: E402
from transformers_rig import make_model  # noqa: E402

from mamba_cache.integrations.transformers import serve  # noqa: E402
from mamba_cache.integrations.transformers.batching.batcher import Batcher  # noqa: E402

CHAT, PROMPT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"

FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "eos_token_id", "pad_token_id", "num_return_sequences", "stop_strings",
    "max_new_tokens", "min_new_tokens",
)  # fmt: skip
VALUES = ("x", -1, 1.5, True, [], ["x"], {}, {"x": "y"}, [[None]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = make_model("nemotron_h", vocab_size=TOKENS, **SPECIAL)
    return save(tmp_path_factory.mktemp("model"), model)


@pytest.fixture(scope="module")
def caches():
    with serve.installed(**SETTINGS, max_requests=8):
        yield


@pytest.fixture(scope="module")
def server(caches, folder):
    """A server that batches."""
    running = Server(continuous_batching=True, force_model=folder)
    yield running
    running.close()


@pytest.fixture(scope="module")
def single(caches, folder):
    """A server that runs one request after the other."""
    running = Server(force_model=folder)
    yield running
    running.close()


@pytest.fixture(params=["server", "single"])
def each_server(request):
    return request.getfixturevalue(request.param)


def body_of(path, folder, text="Hello", length=2, **fields):
    """A request of an endpoint, not streamed."""
    body = {"model": folder, "stream": False, **fields}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": length, **body}
    if path == PROMPT:
        return {"prompt": text, "max_tokens": length, **body}
    return {"input": text, "max_output_tokens": length, **body}


def test_one_field_configurations_fail_alone(server, folder):
    """216 of wrong types, beside eight clients whose answers stay as they were."""
    texts = [f"An innocent question, number {n}: {'y' * n}?" for n in range(8)]
    expected = [server.chat(folder, text).choices[0].message.content for text in texts]
    configs = [{field: value} for field in FIELDS for value in VALUES]
    assert len(configs) == 216
    is_over, rounds = threading.Event(), itertools.count()

    def innocent(number):
        said = set()
        while not is_over.is_set():
            said.add(server.chat(folder, texts[number]).choices[0].message.content)
            next(rounds)
        return said

    def guilty(config):
        config = {"max_new_tokens": 2, "do_sample": True, **config}
        body = body_of(CHAT, folder, generation_config=json.dumps(config))
        del body["max_tokens"]
        return server.post(CHAT, body)

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
@pytest.mark.parametrize("path", [CHAT, PROMPT, RESPONSE])
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
def test_an_unservable_request_is_told_why(each_server, folder, path, stream, fields, reason):
    answer = each_server.post(path, body_of(path, folder, **fields, stream=stream))
    assert (answer[0], reason in json.loads(answer[1])["detail"]) == (400, True), answer
    status, _ = each_server.post(path, body_of(path, folder))
    assert status == 200


@pytest.mark.parametrize("path", [CHAT, PROMPT, RESPONSE])
def test_the_server_does_not_say_that_it_ignores_the_user(single, folder, path, monkeypatch):
    """The user is the salt; of other fields it says so."""
    said = []
    monkeypatch.setattr(utils.logger, "warning_once", said.append)
    for more in ({}, {"truncation": "auto"} if path == RESPONSE else {"logprobs": None}):
        assert single.post(path, body_of(path, folder, user="alice", **more))[0] == 200
    assert [message for message in said if "user" in message] == []
    assert len(said) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, PROMPT, RESPONSE])
def test_what_a_batch_cannot_serve_is_told_why(server, folder, path, stream):
    """Prompts longer than the longest sequence, and options that need a call of their own."""
    for fields, reason in (
        ({"text": "x" * 200_000}, "max_sequence_length"),
        ({"generation_config": '{"num_beams": 2}'}, "beam_search"),
        ({"generation_config": '{"max_time": 3.0}'}, "max_time"),
    ):
        status, text = server.post(path, body_of(path, folder, **fields, stream=stream))
        assert (status, reason in json.loads(text)["detail"]) == (400, True), text


def test_a_streamed_request_that_fails_later_ends_with_the_reason(server, folder, monkeypatch):
    """A processor that raises in the middle of an answer."""
    config = json.dumps({"max_new_tokens": 9, "forced_eos_token_id": 3, "do_sample": False})
    body = body_of(CHAT, folder, generation_config=config)
    del body["max_tokens"]
    from transformers.generation import logits_process  # noqa: PLC0415

    def fails(self, ids, scores):
        if ids.shape[1] > 20:
            raise RuntimeError("broken on purpose")
        return scores

    monkeypatch.setattr(logits_process.ForcedEOSTokenLogitsProcessor, "__call__", fails)
    status, text = server.post(CHAT, {**body, "stream": True})
    assert status == 200
    assert b'data: {"error": "broken on purpose"}' in text
    status, text = server.post(CHAT, body)
    assert (status, json.loads(text)["detail"]) == (400, "broken on purpose")


def test_a_step_that_fails_once_is_run_again(server, folder, monkeypatch):
    """A fault of the model in the middle of four answers, two of them streamed."""
    texts = [f"Who sees nothing of it, number {n}?" for n in range(4)]
    expected = [server.chat(folder, text).choices[0].message.content for text in texts]
    compute, calls = Batcher._compute_decodes, []

    def fails(self, step):
        calls.append(len(step.decode_rows))
        if len(calls) == 6:
            raise RuntimeError("out of order")
        return compute(self, step)

    def ask(number):
        if number % 2:
            stream = server.chat(folder, texts[number], stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return server.chat(folder, texts[number]).choices[0].message.content

    monkeypatch.setattr(Batcher, "_compute_decodes", fails)
    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, range(4))) == expected
    assert max(calls[3:6]) > 0  # answers had begun


def test_a_step_that_fails_twice_ends_its_requests(server, folder, monkeypatch):
    def fails(self, step):
        raise RuntimeError("out of order")

    with monkeypatch.context() as broken:
        broken.setattr(Batcher, "_compute_decodes", fails)
        status, text = server.post(CHAT, body_of(CHAT, folder, "Will it run?"))
    assert status == 500
    assert "out of order" in json.loads(text)["detail"]
    status, _ = server.post(CHAT, body_of(CHAT, folder, "Will it run?"))
    assert status == 200
    assert '"ok"' in server.get("/health")
