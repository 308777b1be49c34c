"""A tiny hybrid model over a real context, and uncached runs of the same model."""

from contextlib import contextmanager

import pytest
import torch
from fingerprints import fingerprint

from mamba_cache.config import CacheConfig
from mamba_cache.context import DeviceTokens, DynamicInferenceContext, Request
from mamba_cache.reference import HybridModel, HybridModelConfig

BLOCK, CHUNK, VOCAB = 8, 4, 13
MODEL_CONFIG = HybridModelConfig(
    layer_pattern="M*M",
    hidden_size=16,
    num_attention_heads=2,
    num_kv_heads=1,
    attention_head_dim=4,
    mamba_num_heads=2,
    mamba_head_dim=4,
    ssm_state_size=4,
    num_groups=1,
    ssm_chunk_size=CHUNK,
    mlp_size=16,
    vocab_size=VOCAB,
)
MODEL = HybridModel(MODEL_CONFIG, dtype=torch.float64, seed=7)


def make_config(**changes):
    settings = {
        "block_size_tokens": BLOCK,
        "ssm_chunk_size": CHUNK,
        "max_requests": 4,
        "max_tokens": 256,
        "max_sequence_length": 128,
        "num_kv_blocks": 200,
        "max_slots": 100,
        "vocab_size": VOCAB,
    }
    return CacheConfig(**(settings | changes))


def make_context(config=None, *, model=MODEL, poison=True, **options):
    """A context whose unwritten memory is NaN."""
    config = config or make_config()
    specs = model.config.state_spec(torch.float64), model.config.kv_spec(torch.float64)
    context = DynamicInferenceContext(config, *specs, **options)
    if poison:
        pools = context.live_states, context.slot_allocator.states
        states = [tensor for pool in pools for tensor in pool.tensors.values()]
        for tensor in (context.kv_cache, *states):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    return context


def run_step(context, decode_ids=None, *, model=MODEL):
    """Run a greedy step; return {request id: (logits, token)} of requests that sampled."""
    step = context.begin_step(decode_ids)
    logits = model.forward(step.metadata, context)
    sampled = {
        request.request_id: (row, int(row.argmax()))
        for request, row in zip(step.requests, logits, strict=True)
        if request.samples
    }
    context.commit_step({request_id: token for request_id, (_, token) in sampled.items()})
    return sampled


def generate(context, prompt, num_tokens, *, request_id="only", model=MODEL, **options):
    """Run one request alone; return its tokens, the logits of each, and its admission."""
    admission = context.add_request(Request(request_id=request_id, prompt_tokens=prompt, **options))
    tokens, logits = [], []
    while len(tokens) < num_tokens:
        row, token = run_step(context, model=model)[request_id]
        tokens.append(token)
        logits.append(row)
    context.finish(request_id)
    return tokens, logits, admission


def add(context, request_id, prompt, **options):
    return context.add_request(Request(request_id=request_id, prompt_tokens=prompt), **options)


def saved_prefix_lengths(context, prompt):
    """Boundaries of ``prompt`` with a findable state, in blocks."""
    hashes = context.prepare(Request(request_id="probe", prompt_tokens=prompt)).hashes
    kv_blocks, slots = context.kv_block_allocator, context.slot_allocator
    blocks = [kv_blocks.find_block(digest) for digest in hashes.digests]
    return [i + 1 for i, b in enumerate(blocks) if b is not None and slots.has_state(b)]


def uncached(prompt, num_tokens):
    """Tokens and logits of a run without a cache."""
    context = make_context(make_config(enable_prefix_caching=False))
    return generate(context, prompt, num_tokens)[:2]


def assert_same_run(run, prompt):
    tokens, logits = run[0], run[1]
    wanted_tokens, wanted_logits = uncached(prompt, len(tokens))
    assert tokens == wanted_tokens
    for row, wanted in zip(logits, wanted_logits, strict=True):
        torch.testing.assert_close(row, wanted, rtol=0, atol=1e-9)


def on_device(*requests, num_drafts=2):
    """Tokens of requests in batch order, like a sampler's output."""
    tokens = torch.full((len(requests), 1 + num_drafts), -7)
    for row, new in zip(tokens, requests, strict=True):
        row[: len(new)] = torch.tensor(new)
    return DeviceTokens(tokens, torch.tensor([len(new) for new in requests], dtype=torch.int32))


@contextmanager
def refused(context, error, match=None):
    """Check that a call raises and leaves the context unchanged."""
    before = _seen(context)
    with pytest.raises(error, match=match) as caught:
        yield caught
    context.check_invariants()
    assert _seen(context) == before


def _seen(context):
    free_rows = list(context.request_table._free_rows)
    return fingerprint(context), context.stats(), context.statuses(), free_rows


def prepared(context, prompt):
    return context.prepare(Request(request_id="probe", prompt_tokens=prompt))


class UncachedRuns:
    """Greedy decoding without a cache, computed once for each prompt."""

    def __init__(self, num_tokens=12, *, model=MODEL):
        config = make_config(enable_prefix_caching=False, max_requests=1)
        self._num_tokens, self._model = num_tokens, model
        self._context = make_context(config, model=model)
        self._runs = {}

    def logits(self, prompt, index):
        """Logits of the ``index``-th generated token."""
        run = self._runs.get(prompt)
        if run is None or len(run) <= index:
            wanted = max(index + 1, self._num_tokens)
            _, run, _ = generate(self._context, list(prompt), wanted, model=self._model)
            self._runs[prompt] = run
        return run[index]
