"""A model small enough for many runs of the engine, and ways to run it."""

import torch

from mamba_cache.config import CacheConfig
from mamba_cache.reference import (
    Engine,
    HybridModel,
    HybridModelConfig,
    NgramDrafter,
    SamplingParams,
)

BLOCK = 8
MODEL = HybridModel(
    HybridModelConfig(
        layer_pattern="M*M",
        hidden_size=12,
        num_attention_heads=2,
        num_kv_heads=1,
        attention_head_dim=6,
        mamba_num_heads=2,
        mamba_head_dim=5,
        ssm_state_size=3,
        num_groups=1,
        ssm_chunk_size=4,
    ),
    dtype=torch.float64,
)


class ModelFailure(Exception):
    """Raised by a failing model."""


class FailingModel:
    """A model that raises in steps with these numbers, after overwriting their live states."""

    def __init__(self, *failing_steps):
        self.config, self.dtype, self.device = MODEL.config, MODEL.dtype, MODEL.device
        self.failing_steps = set(failing_steps)
        self.num_steps = 0

    def forward(self, metadata, caches):
        self.num_steps += 1
        logits = MODEL.forward(metadata, caches)
        if self.num_steps in self.failing_steps:
            rows = metadata.state_rows[: metadata.num_requests]
            written = metadata.decode_state_rows[: metadata.num_decodes]
            rows = torch.cat([rows, written.flatten()]).long()
            caches.live_states["ssm"][:, rows] = torch.nan
            raise ModelFailure
        return logits


def cache_config(**changes):
    settings = {
        "block_size_tokens": BLOCK,
        "ssm_chunk_size": 4,
        "max_requests": 8,
        "max_tokens": 64,
        "max_sequence_length": 256,
        "num_kv_blocks": 128,
        "max_slots": 64,
        "vocab_size": 256,
    }
    return CacheConfig(**(settings | changes))


def make_engine(model=MODEL, *, max_wait_steps=64, drafter=NgramDrafter, **changes):
    return Engine(model, cache_config(**changes), max_wait_steps=max_wait_steps, drafter=drafter)


def alone(prompt, sampling):
    """The output of a request that runs alone, without a cache, with its prompt in one chunk."""
    engine = make_engine(max_tokens=256, enable_prefix_caching=False)
    return engine.generate([prompt], sampling)[0].tokens


def step_checked(engine):
    """Run a step, then check invariants; exceptions of a failing model are ignored."""
    try:
        return engine.step()
    finally:
        engine.context.check_invariants()


def run_checked(engine):
    """Step to completion, ignoring failures of the model; return completions by request."""
    done = {}
    for _ in range(5000):
        if not engine.num_requests:
            assert engine.context.stats().used_blocks == 0
            assert engine.context.stats().reserved_slots == 0
            return done
        try:
            events = step_checked(engine)
        except ModelFailure:
            continue
        done |= {event.request_id: event.completion for event in events if event.completion}
    raise AssertionError("the engine does not come to an end")


def run_together(engine, prompts, sampling):
    """Submit and run all prompts, and compare each with a run of the prompt alone."""
    for name, prompt in enumerate(prompts):
        engine.submit(prompt, sampling, request_id=name)
    done = run_checked(engine)
    for name, prompt in enumerate(prompts):
        assert done[name].tokens == alone(prompt, sampling), name
    return [done[name] for name in range(len(prompts))]


def draw_prompt(rng, length):
    return rng.integers(256, size=length).tolist()


def greedy(max_new_tokens):
    return SamplingParams(max_new_tokens=max_new_tokens)
