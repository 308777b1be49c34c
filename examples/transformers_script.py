"""Put a prefix cache around a transformers model: the shortest example, with and without it.

A small hybrid model with random weights and bytes as tokens answers a few questions about one long
text. What it says means nothing, but with the cache and without it must say the same. Replace
``make_model`` by ``AutoModelForCausalLM.from_pretrained(...)`` and ``encode`` by your tokenizer.

Needs the extra: pip install -e '.[transformers]'
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from mamba_cache.integrations.transformers import PrefixCache

TEXT = topics["assignment"][:900] + "\n\nQuestion: "
QUESTIONS = (
    "What is assigned first?",
    "May a target be a list?",
    "What is augmented assignment?",
)


def make_model() -> Any:
    """Make a small model of Granite 4's kind."""
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, shared_intermediate_size=64,
        num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"],
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=0, mamba_n_heads=4,
        mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def encode(question: str) -> torch.Tensor:
    """Return a prompt's tokens, [1, length]."""
    return torch.tensor([list((TEXT + question).encode())])


def answer(generate: Callable[..., Any], question: str) -> tuple[list[int], float]:
    """Return the tokens of an answer, and the seconds that it took."""
    ids, begun = encode(question), time.perf_counter()
    output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    return output[0, ids.shape[1] :].tolist(), time.perf_counter() - begun


def main() -> int:
    """Answer every question with the cache and without, and compare."""
    model, agree = make_model(), []
    cache = PrefixCache(model, mamba_cache_gb=0.1, kv_cache_gb=0.1, block_size_tokens=128)
    print("question                        tokens  skipped  with the cache  without")
    for question in QUESTIONS:
        before = cache.stats().skipped_tokens
        cached, seconds = answer(cache.generate, question)
        skipped = cache.stats().skipped_tokens - before
        plain, plain_seconds = answer(model.generate, question)
        agree.append(cached == plain)
        times = f"{seconds * 1e3:11.0f} ms {plain_seconds * 1e3:5.0f} ms"
        print(f"{question:30} {encode(question).shape[1]:7,} {skipped:8,} {times}")
    print(f"\nAnswers with and without the cache {'agree' if all(agree) else 'DO NOT AGREE'}.")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
