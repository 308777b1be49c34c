"""A script with transformers: a model with a prefix cache around it and without.

The model of a folder (``transformers_script.py FOLDER``) answers questions about one long text.
Without a folder the model is a small hybrid with random weights and bytes as tokens: its answers
mean nothing, but must be the same with the cache and without.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch

from mamba_cache.integrations.transformers import PrefixCache

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding
    from transformers import GraniteMoeHybridConfig as SmallConfig
except ImportError as error:
    sys.exit(f"This example needs transformers: {error}. pip install -e '.[transformers]'")

TEXT = topics["assignment"][:900] + "\n\nQuestion: "
QUESTIONS = (
    "What is assigned first?",
    "May a target be a list?",
    "What is augmented assignment?",
)


def make_model() -> Any:
    """Create a small model of Granite 4's architecture."""
    torch.manual_seed(0)
    config = SmallConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, shared_intermediate_size=64,
        num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"],
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=0, mamba_n_heads=4,
        mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def read_bytes(text: str, **_: Any) -> BatchEncoding:
    """Return a text's bytes as tokens, as a tokenizer does."""
    ids = torch.tensor([list(text.encode())])
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def answer(generate: Callable[..., Any], inputs: Any, **more: Any) -> tuple[list[int], float]:
    """Return the tokens of an answer, and the time in seconds."""
    begun = time.perf_counter()
    output = generate(**inputs, max_new_tokens=8, do_sample=False, **more)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - begun


def main(folder: str | None = None) -> int:
    """Answer every question with the cache and without; compare; return the exit status."""
    model, tokenizer, block = make_model(), read_bytes, 128
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        tokenizer, block = AutoTokenizer.from_pretrained(folder), 256
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    if model.device.type == "cpu":
        torch.set_num_threads(1)  # small tensors: more threads mostly wait for each other
    gb = 0.1 if folder is None else 4
    cache = PrefixCache(model, mamba_cache_gb=gb, kv_cache_gb=gb, block_size_tokens=block)
    shared = tokenizer(TEXT, return_tensors="pt")["input_ids"].shape[1]
    agree, computed, needed = [], 0, 0
    answer(model.generate, tokenizer("warm up", return_tensors="pt").to(model.device))
    print("question                        tokens  skipped  with the cache  without")
    for question in QUESTIONS:
        inputs = tokenizer(TEXT + question, return_tensors="pt").to(model.device)
        before, length = cache.stats().skipped_tokens, inputs["input_ids"].shape[1]
        # The shared length is known here; else the cache finds it at the second question.
        cached, seconds = answer(cache.generate, inputs, checkpoints=[shared])
        skipped = cache.stats().skipped_tokens - before
        plain, plain_seconds = answer(model.generate, inputs)
        agree.append(cached == plain)
        computed, needed = computed + length - skipped, needed + length
        times = f"{seconds * 1e3:11.0f} ms {plain_seconds * 1e3:5.0f} ms"
        print(f"{question:30} {length:7,} {skipped:8,} {times}")
    print(f"\nPrompt tokens computed: {computed:,} with the cache, {needed:,} without.")
    print(f"Answers with and without the cache {'agree' if all(agree) else 'DO NOT AGREE'}.")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
