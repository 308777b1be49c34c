"""What a context counts, read while it runs."""

import sys
import threading

import pytest
from context_rig import BLOCK, add, generate, make_config, make_context, run_step

from mamba_cache.cache import EveryNthBlock
from mamba_cache.context import MissReason

COUNTED = (
    "requests", "hits", "kv_matched_blocks", "state_matched_blocks", "skipped_tokens",
    "computed_tokens", "saved_states", "unwritten_states", "aborted_steps", "preemptions",
    "self_resets", "forks",
)  # fmt: skip
PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]


@pytest.fixture
def many_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_regression_reasons_may_come_up_while_another_thread_reads(many_switches):
    """A dict that grows during an iteration raises; a scrape of metrics ran into this."""
    memory = make_context()._memory
    counters = memory.counters
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
            assert set(memory.stats().misses.values()) <= {1}
    finally:
        running.set()
        writer.join()


@pytest.mark.parametrize("settings", [{}, {"slot_quantization": "int8"}, {"max_slots": 0}])
def test_bytes_per_slot_are_those_of_the_tensors(settings):
    context = make_context(make_config(**{"max_slots": 7, **settings}), poison=False)
    slots = context.slot_allocator
    tensors = [slots.conv_states, slots.ssm_states, slots.ssm_scales]
    held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert context.stats().bytes_per_slot * slots.max_slots == held
    assert context.stats().bytes_per_slot > 0


def test_statistics_are_the_counters_and_the_totals_of_the_allocators():
    context = make_context()
    numbers = {name: number for number, name in enumerate(COUNTED, start=1)}
    kv_blocks, slots = context.kv_block_allocator, context.slot_allocator
    kv_blocks.evicted_blocks_total = 111
    slots.skipped_checkpoints_total, slots.evicted_slots_total = 113, 114
    slots.reserve_slots([3])
    context._memory.counters.update(numbers)
    stats = context.stats()
    assert {name: getattr(stats, name) for name in numbers} == numbers
    assert stats.evicted_blocks == 111
    assert (stats.skipped_checkpoints, stats.evicted_slots) == (113, 114)
    assert (stats.free_slots, stats.reserved_slots, stats.cached_slots) == (99, 1, 0)
    assert stats.free_blocks == kv_blocks.num_free_blocks == 200


def test_counters_of_several_requests_add_up():
    context = make_context(placement=EveryNthBlock(1))
    assert context.stats().hit_rate == 0
    for first in (1, 2):
        generate(context, [first, *PROMPT], 1)
        generate(context, [first, *PROMPT], 1)
    stats = context.stats()
    assert (stats.requests, stats.hits, stats.misses) == (4, 2, {"no_kv_match": 2})
    assert (stats.kv_matched_blocks, stats.state_matched_blocks) == (6, 6)
    assert stats.skipped_tokens == 2 * 3 * BLOCK
    assert stats.computed_tokens == 4 * (len(PROMPT) + 1) - stats.skipped_tokens
    assert (stats.saved_states, stats.hit_rate) == (6, 0.5)
    assert repr(stats).startswith("CacheStats(hit_rate=0.5, requests=4, hits=2, misses={")
    assert "=0," not in repr(stats)
    for name in ("a", "b"):
        add(context, name, PROMPT)
        context.begin_step()
        context.abort_step()
    for name in ("c", "d"):
        add(context, name, PROMPT)
        context.preempt(name)
    assert (context.stats().aborted_steps, context.stats().preemptions) == (2, 2)


def test_a_state_that_two_requests_save_counts_once():
    context = make_context(make_config(slot_policy="lru"))
    for name, prompt in (("a", PROMPT), ("b", PROMPT), ("c", [5, *PROMPT])):
        add(context, name, prompt)
    run_step(context)
    assert context.stats().saved_states == 2
