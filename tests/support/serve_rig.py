"""transformers' own server on loopback, tiny models for it, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request

import pytest

openai = pytest.importorskip("openai", reason="needs the extra serve")
for package in ("accelerate", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="needs the extra serve")
pytest.importorskip("transformers", reason="needs the extra transformers")

import torch  # noqa: E402
from chats import CHATML, make_tokenizer  # noqa: E402
from transformers.cli.serve import Serve  # noqa: E402

from mamba_cache.integrations.transformers.serve import installing  # noqa: E402

BLOCK = 16
SETTINGS = {
    "mamba_cache_gb": 0.02,
    "kv_cache_gb": 0.02,
    "block_size_tokens": BLOCK,
}
NEW = 12


def save(folder, model, template=CHATML):
    tokenizer = make_tokenizer(template)
    # Special tokens have no text in an answer; without them each token is one character.
    model.generation_config.suppress_tokens = tokenizer.all_special_ids
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


TOKENS = len(make_tokenizer(CHATML))
SPECIAL = {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None}


def draw_words(generator, length):
    """Random letters."""
    codes = torch.randint(97, 123, (length,), generator=generator).tolist()
    return "".join(map(chr, codes))


class ClosingServe(Serve):
    """A server that closes its event loop; the library leaves this to the garbage collector."""

    def start_server(self):
        def run():
            with contextlib.closing(asyncio.new_event_loop()) as loop:
                loop.run_until_complete(self.server.serve())

        self._thread = threading.Thread(target=run)
        self._thread.start()


class Server:
    """A running server and its clients."""

    def __init__(self, **options):
        options = {"device": "cpu", "dtype": "float32", "host": "127.0.0.1", "port": 0, **options}
        self.serve = ClosingServe(**options, non_blocking=True)
        uvicorn = self.serve.server
        while not uvicorn.started:
            assert self.serve._thread.is_alive()
            threading.Event().wait(0.01)
        port = uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def close(self):
        self.client.close()
        self.serve.kill_server()
        self.serve._thread.join()

    def chat(self, model, messages, **options):
        options = {"max_tokens": NEW, "temperature": 0, **options}
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.client.chat.completions.create(model=model, messages=messages, **options)

    def post(self, path, body):
        """Status and body of the answer to a raw request."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def get(self, path):
        with urllib.request.urlopen(self.url + path) as answer:
            return answer.read().decode()

    def timed(self, folder):
        """The server's record of a model, which is loaded first if necessary."""
        manager, name = self.serve._model_manager, f"{folder}@main"
        manager.load_model_and_processor(name)
        return manager.loaded_models[name]

    def served(self, folder):
        """This package's record of a model."""
        return installing._installed[-1].find(self.timed(folder).model)

    def check(self, folder):
        """Check invariants of a model's cache after its requests have ended."""
        self.served(folder).cache.check_invariants()
