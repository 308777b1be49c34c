"""Few requests are done one by one and many as arrays: both ways give the same, step by step."""

import dataclasses

import numpy as np
import pytest
import torch
from context_rig import BLOCK, MODEL, VOCAB, make_config, make_context
from fingerprints import fingerprint

from mamba_cache.cache import EveryNthBlock
from mamba_cache.context import Request


def seen(step):
    """All that a step's metadata say."""
    fields = {f.name: getattr(step.metadata, f.name) for f in dataclasses.fields(step.metadata)}
    return {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in fields.items()}


def steps_of_many(seed, num_requests, num_drafts, *, saves):
    """What is seen of requests that decode, cross blocks and save states there, step by step."""
    rng = np.random.default_rng(seed)
    config = make_config(
        max_requests=num_requests,
        max_tokens=64 * num_requests,
        num_kv_blocks=20 * num_requests,
        num_speculative_tokens=num_drafts,
        save_decode_states=saves,
    )
    context = make_context(config, placement=EveryNthBlock(1), poison=False)
    for name in range(num_requests):
        tokens = rng.integers(0, VOCAB, int(rng.integers(BLOCK - 3, BLOCK + 4)))
        positions = [2 * BLOCK] if rng.random() < 0.5 else []  # some save states by themselves
        context.add_request(
            Request(request_id=name, prompt_tokens=tokens, checkpoint_positions=positions)
        )
    found = []
    for number in range(3 * BLOCK):
        drafts = None
        if number and num_drafts:
            drafts = rng.integers(0, VOCAB, (num_requests, num_drafts))
            drafts[rng.random(num_requests) < 0.3, -1] = -1
        step = context.begin_step(drafts=drafts)
        found.append(seen(step))
        MODEL.forward(step.metadata, context)
        tokens = rng.integers(0, VOCAB, (num_requests, 1 + num_drafts))
        if drafts is None:
            context.commit_step(tokens[:, 0])
        else:
            counts = rng.integers(0, 2 + (drafts >= 0).sum(axis=1))
            kept = np.arange(num_drafts) < counts[:, None] - 1
            tokens[:, :-1] = np.where(kept, drafts, 0)
            context.commit_step(tokens, counts)
        context.check_invariants()
        found.append((fingerprint(context), context.stats()))
    return found


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_requests_get_their_blocks_and_checkpoints(monkeypatch, num_drafts, saves):
    found = []
    for few in (0, 1_000, 2):
        monkeypatch.setattr("mamba_cache.context.request_table._FEW", few)
        found.append(steps_of_many(3, 6, num_drafts, saves=saves))
    assert found[0] == found[1] == found[2]
