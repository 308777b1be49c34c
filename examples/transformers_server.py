"""Transformers' server with a prefix cache and without, with the same chat.

A chat of three turns uses the OpenAI API of the server that ``mamba-cache serve MODEL`` starts,
here in this process. The model is small: its answers mean nothing, but both must be the same.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import urllib.request
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch

from mamba_cache.integrations.transformers import serve

try:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ImportError as error:
    sys.exit(f"This example needs a server: {error}. pip install -e '.[serve]'")

SYSTEM = "You are the porter of a small hotel. You know every guest, and you are never in a hurry. "
QUESTIONS = ("Is my key here?", "And where is the garden?", "Thank you. When is breakfast?")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
HEADERS = {"Content-Type": "application/json"}


def save_model(folder: str) -> None:
    """Save a small model of Granite 4's architecture, and a tokenizer of single characters."""
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # the last two are space and newline
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"tokenizer_object": tokenizer, "chat_template": TEMPLATE}
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=len(letters), hidden_size=64, num_hidden_layers=3, num_local_experts=0,
        layer_types=["mamba", "attention", "mamba"], num_attention_heads=4, num_key_value_heads=2,
        shared_intermediate_size=64, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1,
        mamba_d_state=16, mamba_chunk_size=64, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def chat(folder: str, *, cached: bool) -> list[dict[str, Any]]:
    """Serve the model, run the chat, and return the reply of each turn."""
    settings: dict[str, Any] = {"mamba_cache_gb": 0.1, "kv_cache_gb": 0.1, "block_size_tokens": 64}
    messages, replies = [{"role": "system", "content": SYSTEM * 24}], []
    with serve.installed(**settings) if cached else nullcontext():
        cli = import_module("transformers.cli.serve")
        server = cli.Serve(force_model=folder, port=0, device="cpu", non_blocking=True)
        while not server.server.started:
            time.sleep(0.01)
        port = server.server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            body = {"model": folder, "messages": messages, "max_tokens": 6, "temperature": 0}
            request = urllib.request.Request(url, json.dumps(body).encode(), HEADERS)
            begun = time.perf_counter()
            with urllib.request.urlopen(request) as reply:
                replies.append(json.load(reply) | {"seconds": time.perf_counter() - begun})
            messages.append(replies[-1]["choices"][0]["message"])
        server.kill_server()
    return replies


def main() -> int:
    """Run the chat with both servers; compare; return the exit status."""
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # small tensors: more threads mostly wait for each other
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        with_cache, without = chat(folder, cached=True), chat(folder, cached=False)
    print("prompt  cached  with the cache  without")
    prompts = cached = 0
    for reply, plain in zip(with_cache, without, strict=True):
        length = reply["usage"]["prompt_tokens"]
        found = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        prompts, cached = prompts + length, cached + found
        times = [round(each["seconds"] * 1e3) for each in (reply, plain)]
        print(f"{length:6}  {found:6}  {times[0]:11} ms {times[1]:5} ms")
    same = all(a["choices"] == b["choices"] for a, b in zip(with_cache, without, strict=True))
    print(f"\nPrompt tokens computed: {prompts - cached:,} with the cache, {prompts:,} without.")
    print(f"Answers with and without the cache {'agree' if same else 'DO NOT AGREE'}.")
    return 0 if same and cached else 1


if __name__ == "__main__":
    sys.exit(main())
