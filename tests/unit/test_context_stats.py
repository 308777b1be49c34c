"""What a context counts, read while it runs."""

import sys
import threading
from collections import Counter

import pytest
import torch
from context_rig import MODEL_CONFIG, generate, make_config, make_context

from mamba_cache.context import MissReason
from mamba_cache.context.stats import collect_stats


@pytest.fixture
def many_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_regression_reasons_may_come_up_while_another_thread_reads(many_switches):
    """A dict that grows under an iteration raises; a scrape of metrics met that."""
    context = make_context()
    counters = Counter()
    running = threading.Event()

    def count_and_reset():
        while not running.is_set():
            for reason in MissReason:
                counters[reason] += 1
            counters.clear()

    writer = threading.Thread(target=count_and_reset)
    writer.start()
    try:
        for _ in range(3000):
            stats = collect_stats(counters, context.kv_block_allocator, context.slot_allocator, 1)
            assert set(stats.misses.values()) <= {1}
    finally:
        running.set()
        writer.join()


@pytest.mark.parametrize("slot_quantization", [None, "int8"])
def test_bytes_per_slot_are_those_of_the_tensors(slot_quantization):
    config = make_config(slot_quantization=slot_quantization, max_slots=7)
    context = make_context(config, poison=False)
    slots = context.slot_allocator
    tensors = [slots.conv_states, slots.ssm_states, slots.ssm_scales]
    held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert context.stats().bytes_per_slot * 7 == held


def test_bytes_per_slot_are_known_without_slots():
    context = make_context(make_config(max_slots=0), poison=False)
    assert context.stats().bytes_per_slot == MODEL_CONFIG.state_spec(torch.float64).bytes_per_slot


def test_a_summary_says_the_hit_rate_and_what_is_not_zero():
    context = make_context()
    assert context.stats().hit_rate == 0
    for _ in range(4):
        generate(context, [5] * 40, 1)
    stats = context.stats()
    assert (stats.requests, stats.hits, stats.hit_rate) == (4, 3, 0.75)
    assert repr(stats).startswith("CacheStats(hit_rate=0.75, requests=4, hits=3, misses={")
    assert "=0," not in repr(stats)
