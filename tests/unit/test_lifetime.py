"""Objects freed with their last reference, without the garbage collector; partial resets."""

import gc
import weakref

import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    refused,
    run_step,
)
from fingerprints import fingerprint
from object_graph import tensors_of

from mamba_cache.errors import BlockCapacityError, StepOrderError
from mamba_cache.reference import Engine, SamplingParams

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def watch(owner, *, but=()):
    """Return weak references to all tensors that ``owner`` keeps alive, except those of ``but``."""
    shared = {id(tensor) for other in but for tensor in tensors_of(other)}
    tensors = [t for t in tensors_of(owner) if id(t) not in shared and t.numel()]
    large = [t for t in tensors if isinstance(t, torch.Tensor)]
    assert len(large) > 10, "the test needs tensors"
    return [weakref.ref(tensor) for tensor in large]


def assert_gone(references):
    assert [type(r()).__name__ for r in references if r() is not None] == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_speculative_tokens": 2}, {"slot_quantization": "int8"}, {"max_requests": 1}],
    ids=str,
)
def test_a_dropped_context_keeps_no_memory(settings):
    """Regression: a cycle of slots, blocks and guard kept the memory until a collection."""
    context = make_context(make_config(**settings), poison=False)
    add(context, "a", PROMPT)
    for _ in range(3):
        step = context.begin_step()
        MODEL.forward(step.metadata, context)
        context.commit_step({"a": 1})
    context.begin_step()
    context.abort_step()
    context.check_invariants()
    with pytest.raises(StepOrderError):
        context.commit_step({})
    references = [*watch(context), weakref.ref(context), weakref.ref(context.slot_allocator)]
    del context, step
    assert_gone(references)


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_engine_keeps_no_memory():
    engine = Engine(MODEL, make_config(num_speculative_tokens=2))
    engine.generate([PROMPT, PROMPT], SamplingParams(max_new_tokens=4))
    engine.submit(PROMPT)
    engine.step()
    references = [*watch(engine, but=[MODEL]), weakref.ref(engine.context)]
    del engine
    assert_gone(references)


def test_slots_and_blocks_may_outlive_their_context():
    """Slots or blocks alone can still be read and reset."""
    context = make_context()
    generate(context, PROMPT, 1)
    slots, kv_blocks = context.slot_allocator, context.kv_block_allocator
    del context
    gc.collect()
    assert slots.num_cached_slots == 1
    kv_blocks.reset()
    assert slots.num_cached_slots == 0
    slots.reset()
    slots.check_invariants()
    del slots
    gc.collect()
    kv_blocks.reset()
    kv_blocks.check_invariants()


def test_blocks_are_not_reset_under_requests():
    """Regression: the blocks of a running request were allocated to the next one."""
    context = make_context()
    generate(context, PROMPT, 1)
    add(context, "a", PROMPT[::-1])
    with pytest.raises(StepOrderError, match=r"\['a'\] have reserved slots.*reset the context"):
        context.slot_allocator.reset()
    for _ in ("scheduled", "decoding", "in a step"):
        with refused(context, StepOrderError, r"\['a'\] hold KV blocks.*reset the context"):
            context.kv_block_allocator.reset()
        if context.batch_dimensions.decode_req_count:
            break
        run_step(context)
        context.begin_step()
        context.abort_step()
        context.resume_request("a")
        run_step(context)
        context.begin_step()
    context.reset(preserve_prefix_cache=True)
    context.kv_block_allocator.reset()
    context.check_invariants()
    assert context.stats().cached_slots == context.stats().cached_blocks == 0
    assert_same_run(generate(context, PROMPT, 2), PROMPT)


def test_a_lack_of_blocks_names_the_request_and_the_remedy():
    context = make_context(make_config(num_kv_blocks=6))
    add(context, "first", PROMPT)
    run_step(context)
    with pytest.raises(BlockCapacityError) as short:
        add(context, "second", PROMPT[::-1])
    assert (short.value.required, short.value.available) == (4, 2)
    for words in ("'second'", "26 tokens", "finish or preempt", "num_kv_blocks"):
        assert words in str(short.value)
    add(context, "third", [2] * (2 * BLOCK), chunk_tokens=2 * BLOCK)
    run_step(context)
    with pytest.raises(BlockCapacityError) as short:
        run_step(context)
    assert (short.value.required, short.value.available) == (1, 0)
    assert "'third'" in str(short.value)
    assert "'first'" not in str(short.value)
    context.check_invariants()
    context.preempt("first")
    run_step(context)


def test_reset_gives_the_context_that_was_made():
    """Regression: rows kept their order of release."""
    config = make_config(hash_secret=b"fixed")
    context, fresh = make_context(config), make_context(config)
    for name in ("a", "b", "c"):
        add(context, name, [1] * 20)
    run_step(context)
    context.finish("b")
    add(context, "d", [2] * 20)
    context.begin_step()
    context.reset()
    context.check_invariants()
    assert fingerprint(context) == fingerprint(fresh)
    assert context.stats() == fresh.stats()
    rows = []
    for one in (context, fresh):
        for name in ("a", "b"):
            add(one, name, [1] * 20)
        rows.append([piece.row for piece in one.begin_step().requests])
    assert rows[0] == rows[1]


def test_reset_that_keeps_the_cache_ends_a_step_in_flight():
    context = make_context()
    generate(context, PROMPT, 1)
    add(context, "x", [7] * 20)
    context.begin_step()
    context.reset(preserve_prefix_cache=True)
    context.check_invariants()
    assert context.stats().aborted_steps == 1
    assert context.stats().used_blocks == context.stats().reserved_slots == 0
    assert generate(context, PROMPT, 1)[2].skip_tokens == 3 * BLOCK
