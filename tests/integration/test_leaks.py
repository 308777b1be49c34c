"""20,000 requests leave nothing in memory but cached entries."""

import gc
import sys
from pathlib import Path

import numpy as np
import torch

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.reference.no_model import NoModel, count_as_computed

BLOCK = 16
WARM_UP, REQUESTS = 8_000, 20_000  # the policy first fills its own tables
PAGE = 4096


def serve(context, rng, number):
    """Serve one request: a prompt with one of few beginnings, sometimes aborted or preempted."""
    stem = np.full(3 * BLOCK, rng.integers(20), np.int32)
    prompt = np.concatenate([stem, rng.integers(100, 10_000, 20, dtype=np.int32)])
    context.add_request(Request(request_id=number, prompt_tokens=prompt, cache_salt=number % 3))
    metadata = context.begin_step().metadata
    if number % 17 == 0:
        context.abort_step()
        context.finish(number)  # preempted by it, and not resumed
        return
    count_as_computed(context, metadata)
    context.commit_step({number: 1})
    if number % 11 == 0:
        context.preempt(number)
        context.finish(number)
        return
    for token in range(number % 2):
        count_as_computed(context, context.begin_step().metadata)
        context.commit_step({number: token})
    context.finish(number)


def measure():
    """Return the number of allocated objects, of GC-tracked objects, and resident bytes."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE
    return sys.getallocatedblocks(), len(gc.get_objects()), resident


def test_twenty_thousand_requests_leave_nothing_behind(rng):
    context = DynamicInferenceContext(
        CacheConfig(
            block_size_tokens=BLOCK,
            ssm_chunk_size=BLOCK,
            max_requests=2,
            max_tokens=8 * BLOCK,
            max_sequence_length=8 * BLOCK,
            num_kv_blocks=200,
            max_slots=30,
        ),
        NoModel().state_spec(torch.float32),
    )
    for number in range(WARM_UP):
        serve(context, rng, number)
    before = measure()
    for number in range(WARM_UP, REQUESTS):
        serve(context, rng, number)
    after = measure()
    context.check_invariants()
    stats = context.stats()
    assert stats.evicted_blocks > 10_000
    assert stats.evicted_slots > 1_000
    blocks, objects, resident = (now - then for now, then in zip(after, before, strict=True))
    assert blocks < 300  # a dict and an object at each hundredth request are 360
    assert objects < 100
    assert resident < 16 * 2**20
