"""transformers' own server with continuous batching, of hybrid models by their caches."""

import gc
import logging
import os
import re
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

openai = pytest.importorskip("openai", reason="needs the extra serve")
for package in ("accelerate", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="needs the extra serve")
pytest.importorskip("transformers", reason="needs the extra transformers")

from serve_rig import (  # noqa: E402
    NEW,
    SETTINGS,
    SPECIAL,
    TOKENS,
    Server,
    save,
)
from sources import ROOT  # noqa: E402
from transformers_rig import make_model  # noqa: E402

from mamba_cache.context import DynamicInferenceContext  # noqa: E402
from mamba_cache.integrations.transformers import serve  # noqa: E402
from mamba_cache.integrations.transformers.serve import installing  # noqa: E402

STEM = "What all of them begin with, which is computed once. " * 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    families = {"main": "nemotron_h", "windows": "inkling"}
    return {
        name: save(root / name, make_model(family, vocab_size=TOKENS, **SPECIAL))
        for name, family in families.items()
    }


@pytest.fixture(scope="module")
def found(monkeypatch_module):
    """The models that the server has loaded, as this package knows them."""
    served, make = [], installing.ServedModels

    def remember(*arguments):
        served.append(make(*arguments))
        return served[-1]

    monkeypatch_module.setattr(installing, "ServedModels", remember)
    return served


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def server(folders, found):
    with serve.installed(**SETTINGS, max_requests=4):
        running = Server(continuous_batching=True)
        yield running
        running.close()


@pytest.fixture(scope="module")
def plain(folders):
    """What the server says to a chat without caches, one request after the other."""
    known = {}

    def answer(running, text):
        if text not in known:
            timed = running.timed(folders["main"])
            tokenizer, model = timed.processor, timed.model
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True,
                return_tensors="pt", return_dict=True,
            )  # fmt: skip
            output = model.generate(**ids, max_new_tokens=NEW, do_sample=False)
            known[text] = tokenizer.decode(
                output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
            )
        return known[text]

    return answer


def test_concurrent_clients_are_answered_as_alone(server, folders, found, plain):
    """Eight at once, streamed and not; the second time from the cache."""
    texts = [f"{STEM}Question {n}: {'x' * 3 * n}?" for n in range(8)]

    def ask(number):
        if number % 2:
            stream = server.chat(folders["main"], texts[number], stream=True)
            parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
            assert len([part for part in parts if part]) > 1
            return "".join(parts), None
        answer = server.chat(folders["main"], texts[number])
        return answer.choices[0].message.content, answer.usage

    server.timed(folders["main"])
    for turn in range(2):
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(ask, range(8)))
        assert [text for text, _ in answers] == [plain(server, text) for text in texts]
        cached = [usage.prompt_tokens_details.cached_tokens for _, usage in answers if usage]
        assert turn == 0 or min(cached) >= len(STEM) // 16 * 16
    cache = found[-1].find(server.timed(folders["main"]).model).cache
    counts = cache.batch_stats()
    assert counts.decoded_tokens > counts.decode_steps  # several at once
    cache.check_invariants()


def test_the_slots_policy_is_told_whether_a_chat_goes_on(server, folders, monkeypatch):
    told, prepare = [], DynamicInferenceContext.prepare

    def watched(self, request):
        told.append((request.will_continue, request.source))
        return prepare(self, request)

    server.chat(folders["main"], "Get ready.")
    monkeypatch.setattr(DynamicInferenceContext, "prepare", watched)
    first = [{"role": "user", "content": "A question."}]
    server.chat(folders["main"], first)
    answer = {"role": "assistant", "content": "An answer."}
    server.chat(folders["main"], [*first, answer, {"role": "user", "content": "Another."}])
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    server.chat(folders["main"], first, tools=[tool])
    assert [hint for hint, _ in told] == [False, True, True]
    assert {source for _, source in told} == {"transformers server"}


def test_users_share_nothing(server, folders):
    text = f"{STEM}Of one user alone."
    server.chat(folders["main"], text, user="one")
    again = server.chat(folders["main"], text, user="one")
    other = server.chat(folders["main"], text, user="other")
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert again.choices[0].message.content == other.choices[0].message.content


def test_a_client_that_goes_away_ends_its_request(server, folders, found):
    stream = server.chat(folders["main"], "Tell me all.", stream=True, max_tokens=5000)
    next(iter(stream))
    stream.close()
    assert server.chat(folders["main"], "Still there?").choices[0].message.content
    batcher = found[-1].find(server.timed(folders["main"]).model).cache._batcher
    decoded = -1
    while batcher.num_unfinished:  # it ends with a step, long before its last token
        assert batcher.counts["decoded_tokens"] != decoded or decoded < 5000
        decoded = batcher.counts["decoded_tokens"]
    assert decoded < 5000


def test_an_unloaded_model_gives_its_cache_back(server, folders, found):
    """The thread that runs its batches kept both, beside those that were loaded next."""
    main, state = folders["main"], server.serve._generation_state
    expected = server.chat(main, "Anybody there?").choices[0].message.content
    model = weakref.ref(server.timed(main).model)
    store = weakref.ref(found[-1].find(model()).cache._store)
    thread = state.get_manager(f"{main}@main", use_cb=True)._cb._thread
    server.timed(main).delete_model()
    thread.join(30)
    gc.collect()
    assert (model(), store()) == (None, None)
    again = server.chat(main, "Anybody there?")
    assert again.choices[0].message.content == expected
    assert found[-1].find(server.timed(main).model).cache.batch_stats().steps


def test_a_model_that_cannot_be_batched_is_served_request_by_request(server, folders, caplog):
    with caplog.at_level(logging.WARNING, logger="mamba_cache"):
        for _ in range(2):
            answer = server.chat(folders["windows"], f"{STEM}Then?")
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    told = [record.message for record in caplog.records if "request by request" in record.message]
    assert len(told) == 1
    assert "sliding window" in told[0]


# The command, with a line on stderr when the cache begins to run a batch.
COMMAND = """
import sys

from mamba_cache.cli.app import run
from mamba_cache.integrations.transformers.batching.batcher import Batcher

warm_up = Batcher.warm_up

def told(self, most):
    limits = self._scheduler.max_chunk_tokens, self._scheduler.max_requests
    sys.stderr.write(f"<{self.context.max_requests} rows, {limits}, {self._is_eager}>\\n")
    warm_up(self, most)

Batcher.warm_up = told
run(sys.argv[1:])
"""


def test_the_commands_options_reach_the_batches(folders):
    """Of the library's own options those that say something of a batch count as well."""
    command = [sys.executable, "-c", COMMAND, "serve", folders["main"]]
    command += ["--mamba-cache-gb", "0.02", "--kv-cache-gb", "0.02", "--block-size-tokens", "16"]
    command += ["--max-requests", "3", "--continuous-batching", "--cb-max-batch-tokens", "32"]
    command += ["--no-cb-use-cuda-graph", "--port", "0", "--host", "127.0.0.1", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [*command, "--dtype", "float32"], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        address = next(
            found[1]
            for line in process.stderr
            if (found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line))
        )
        told = []
        drain = threading.Thread(target=lambda: told.extend(process.stderr))
        drain.start()
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
            ThreadPoolExecutor(4) as clients,
        ):
            running = SimpleNamespace(client=client)
            ask = partial(Server.chat, running, folders["main"])
            answers = [*clients.map(ask, [f"{STEM}Question {n}?" for n in range(4)])]
        assert all(answer.choices[0].message.content for answer in answers)
        process.terminate()
        drain.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    batches = {*re.findall(r"<\d+ rows.*?>", "".join(told))}
    assert batches == {"<3 rows, (32, 3), use_cuda_graph is False>"}
