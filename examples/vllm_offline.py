"""vLLM with this package's copies of Mamba states, and vLLM without prefix caching, asked the same.

The model of a folder (``vllm_offline.py FOLDER``) answers questions behind one long prompt of token
ids. Without a folder it is a small hybrid with random weights: what it says means nothing, but with
the cache and without it must say the same. On the command line the switch is a variable:
``MAMBA_CACHE_VLLM=1 vllm serve MODEL --enable-prefix-caching``.

Needs vLLM: pip install -e '.[vllm]'; on a CPU tests/engines/vllm.sh makes an environment for it.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from importlib import import_module
from typing import Any

from mamba_cache.integrations import vllm as states

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
try:
    import torch
    import transformers
    import vllm
except ImportError as error:
    sys.exit(f"This example needs vLLM: {error}. pip install -e '.[vllm]'; docs/how-to/vllm.md")

SHARED_TOKENS, OWN_TOKENS, QUESTIONS, NEW_TOKENS = 700, 40, 3, 8


def save_model(folder: str) -> None:
    """Save a small model of Granite 4's kind."""
    torch.manual_seed(0)
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, shared_intermediate_size=64,
        num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=4,
        mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=64,
        max_position_embeddings=2048, position_embedding_type="nope", tie_word_embeddings=False,
    )  # fmt: skip
    transformers.GraniteMoeHybridForCausalLM(config).float().save_pretrained(folder)


def ask(folder: str, prompts: list[list[int]], *, cached: bool) -> list[tuple[list[int], int]]:
    """Return to each prompt the answer, and how many of its tokens were cached."""
    options: dict[str, Any] = {"enable_prefix_caching": cached, "max_model_len": 2048}
    if not torch.cuda.is_available():
        options |= {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
    engine = vllm.LLM(folder, skip_tokenizer_init=True, enforce_eager=True, **options)
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    answers = []
    for prompt in prompts:
        [output] = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        answers.append((list(output.outputs[0].token_ids), output.num_cached_tokens or 0))
    engine.llm_engine.engine_core.shutdown()
    return answers


def main(folder: str | None = None) -> int:
    """Ask with the cache and without, and compare; return the exit status."""
    draw = random.Random(0)
    shared, *own = (
        [draw.randrange(2, 512) for _ in range(number)]
        for number in (SHARED_TOKENS, *[OWN_TOKENS] * QUESTIONS)
    )
    prompts = [shared + one for one in own]
    if not torch.cuda.is_available():
        # vLLM 0.32 looks there for a state inside a prefill at a wrong index: docs/how-to/vllm.md.
        mixer = import_module("vllm.model_executor.layers.mamba.mamba_mixer2").MambaMixer2
        if "get_kv_cache_spec" in vars(mixer):
            del mixer.get_kv_cache_spec
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            save_model(made)
        without = ask(folder or made, prompts, cached=False)
        with states.installed():
            with_cache = ask(folder or made, prompts, cached=True)
    cached = sum(number for _, number in with_cache)
    needed = sum(map(len, prompts))
    same = [tokens for tokens, _ in with_cache] == [tokens for tokens, _ in without]
    print(f"\nPrompt tokens computed: {needed - cached:,} with the cache, {needed:,} without.")
    print(f"Copied by this package: {states.stats()}")
    print(f"Answers with and without the cache {'agree' if same else 'DO NOT AGREE'}.")
    return 0 if same and cached else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
