"""``generate`` and ``generate_batch`` of one cache: each goes on from what the other has cached."""

import gc
import weakref
from functools import partial
from itertools import product

import pytest
import torch
from batch_rig import answer, answers, batch, tokens
from transformers_rig import BLOCK, budgets, skipped

alone = partial(answer, is_batch=False, count=6)


def test_the_first_batch_forgets_nothing_and_has_the_whole_budget(nemotron, generator):
    cache = nemotron.cache(**budgets(nemotron.cache(), slots=10, blocks=30))
    kv_blocks, slots = cache.kv_block_allocator, cache.slot_allocator
    prompts = [tokens(generator, 2 * BLOCK + n) for n in range(3)]
    for prompt in prompts:
        alone(cache, prompt)
    held = slots.num_cached_slots, kv_blocks.num_cached_blocks
    cache.prepare_batches()
    assert (slots.num_cached_slots, kv_blocks.num_cached_blocks) == held
    context = cache._batcher.context
    assert (context.kv_block_allocator, context.slot_allocator) == (kv_blocks, slots)
    assert (cache.kv_block_allocator, cache.slot_allocator) == (kv_blocks, slots)
    assert (slots.max_slots, kv_blocks.pool_size) == (10, 30 + 1)
    stats = cache.stats()
    assert (stats.requests, stats.free_slots + stats.cached_slots) == (3, 10)
    for prompt in prompts:
        whole = (len(prompt) - 1) // BLOCK * BLOCK
        assert skipped(cache, lambda prompt=prompt: alone(cache, prompt)) == whole


def test_a_cache_that_has_batched_gives_its_memory_back_at_once(nemotron):
    cache = nemotron.cache()
    cache.generate_batch([[5, 6]], max_new_tokens=1)
    tensors = [cache._store.tensors.slots, *cache._store.tensors.blocks]
    tensors += cache._batcher.context.live_states.tensors.values()
    held = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    gone = weakref.ref(cache._batcher)
    del tensors
    gc.disable()
    try:
        cache.close()
        assert gone() is None
    finally:
        gc.enable()
    assert [storage() for storage in held] == [None] * len(held)


@pytest.mark.parametrize(("made", "used"), [*product([False, True], repeat=2)])
def test_it_may_be_made_and_used_in_and_out_of_inference_mode(nemotron, generator, made, used):
    prompts = [tokens(generator, 2 * BLOCK + n) for n in (3, 5)]
    wanted = [nemotron.answer(prompt, 6) for prompt in prompts]
    with torch.inference_mode(made):
        cache = nemotron.cache()
    for mode in (used, not used):
        with torch.inference_mode(mode):
            assert alone(cache, prompts[0]) == wanted[0]
            assert answers(batch(cache, prompts)) == wanted
    assert cache.stats().hits >= 4
    with torch.inference_mode(used):
        cache.reset()
        assert alone(cache, prompts[1]) == wanted[1]


def test_what_batches_computed_lies_in_host_memory_too(nemotron, generator):
    room = budgets(nemotron.cache(), slots=8, blocks=28)
    with nemotron.cache(**room, host_cache_gb=0.01) as cache:
        prompts = [tokens(generator, 4 * BLOCK + 3) for _ in range(8)]
        answered = answers(batch(cache, prompts[:4], max_new_tokens=BLOCK))
        answered += answers(batch(cache, prompts[4:], max_new_tokens=BLOCK))
        assert cache.tier_stats()[0].stored > 8 * 4
        for prompt, answer in zip(prompts, answered, strict=True):
            longer = prompt + answer + [5]
            assert skipped(cache, lambda longer=longer: batch(cache, [longer])) == 5 * BLOCK
            assert alone(cache, longer) == nemotron.answer(longer, 6)
        assert cache.tier_stats()[0].restored > 0
