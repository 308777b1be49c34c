"""An engine over a disk or a store, and a program that runs one: ``restart_rig.py WHERE SEED ...``.

WHERE is a path or the URL of a store. The program prints one JSON object: the answer and the
skipped tokens of each prompt. With a store it runs until its standard input ends, because memory
that it gave to the store is lost at its end.
"""

import json
import sys
from dataclasses import asdict
from unittest.mock import patch

import numpy as np
import torch
from engine_rig import MODEL, cache_config

from mamba_cache.reference import Engine, SamplingParams
from mamba_cache.tiers import LoadPlanner, ModelIdentity, Rates

NUM_TOKENS = 6
PROMPT_TOKENS = 163  # 20 blocks of 8 tokens, and 3 tokens


def prompts(seed, count=6):
    """Prompts without common prefixes."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, MODEL.config.vocab_size, (count, PROMPT_TOKENS)).tolist()


def slow_prefill():
    """A planner that assumes very slow computing, so that every entry is loaded."""
    return LoadPlanner(Rates(tokens_per_second=1e-3), learns=False)


def make_engine(path, *, weights="w", model=MODEL, prefetch_seconds=1e9, **changes):
    """An engine that waits for prefetches: the package's clock jumps in tests."""
    settings = {
        "num_kv_blocks": 400,
        "max_slots": 60,
        "max_tokens": 400,
        "max_sequence_length": 256,
        "num_host_blocks": 300,
        "num_host_states": 60,
        "hash_secret": b"of this test",
    }
    if "://" in str(path):
        settings |= {"store": path, "write_on_use": 1}
    else:
        settings |= {
            "disk_cache_path": str(path), "disk_cache_gb": 0.02, "write_on_use": 1
        }  # fmt: skip
    identity = ModelIdentity(name="model", weights=weights)
    config = cache_config(**(settings | changes))
    with patch("mamba_cache.reference.engine._PREFETCH_SECONDS", prefetch_seconds):
        return Engine(model, config, identity=identity, load_planner=slow_prefill())


def run(engine, seed, **options):
    """Answers and skipped tokens of the prompts of a seed."""
    completions = engine.generate(
        prompts(seed, **options), SamplingParams(max_new_tokens=NUM_TOKENS)
    )
    tokens = [list(each.tokens) for each in completions]
    return tokens, [each.skipped_tokens for each in completions]


def uncached(seed):
    """Answers to the prompts of a seed without a cache."""
    settings = {"num_kv_blocks": 400, "max_sequence_length": 256, "max_tokens": 400}
    return run(Engine(MODEL, cache_config(enable_prefix_caching=False, **settings)), seed)[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    engine = make_engine(sys.argv[1])
    engine.context.wait_for_tiers()
    results = [run(engine, int(seed)) for seed in sys.argv[2:]]
    engine.context.wait_for_tiers()
    print(json.dumps(results), flush=True)
    if engine.context.store_tier is not None:
        sys.stdin.read()
        print(json.dumps(asdict(engine.context.store_tier.stats())))
    engine.context.close()
