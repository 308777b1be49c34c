"""Calls that broke context, slots, blocks or states, found by a hostile search."""

import numpy as np
import pytest
import torch
from context_rig import (
    BLOCK,
    VOCAB,
    add,
    generate,
    make_config,
    make_context,
    run_step,
    saved_prefix_lengths,
)
from slot_rig import save

from mamba_cache._checks import as_ints, as_items, check_int
from mamba_cache.cache import (
    AdaptiveSlotPolicy,
    KVBlockAllocator,
    LruSlotPolicy,
    SlotPlan,
    SlotPool,
)
from mamba_cache.context import Request
from mamba_cache.context.verification import PrefixContent, compare_prefixes
from mamba_cache.errors import InvalidArgumentError

PROMPT = [1 + (5 * i) % (VOCAB - 1) for i in range(3 * BLOCK + 3)]
KEYS = [
    lambda: zip([0], ["cat"], strict=True), lambda: iter([(0, "cat")]), {0: "cat"}.items,
    lambda: [[0, "cat"]],
]  # fmt: skip


@pytest.mark.parametrize("keys", KEYS)
def test_keys_of_a_one_shot_iterator_distinguish_a_prompt_each_time(keys):
    """Hashed a second time, the prompt had no keys and matched the same text without an image."""
    context = make_context()
    request = Request(request_id="image", prompt_tokens=PROMPT, multimodal_keys=keys())
    context.match(request)
    context.add_request(request)
    run_step(context)
    context.finish("image")
    assert context.match(Request(request_id=0, prompt_tokens=PROMPT)).kv_matched_blocks == 0
    again = Request(request_id=0, prompt_tokens=PROMPT, multimodal_keys=[(0, "cat")])
    assert context.match(again).skip_tokens == 3 * BLOCK


@pytest.mark.parametrize("given", [iter, torch.tensor, np.array])
def test_positions_of_a_later_chunk_may_be_of_any_kind(given):
    """A one-shot iterator was empty after the check, and no state was saved."""
    context = make_context()
    add(context, 1, PROMPT, chunk_tokens=4)
    run_step(context)
    context.schedule_prefill(1, checkpoint_positions=given([BLOCK, BLOCK + 3]))
    run_step(context)
    assert saved_prefix_lengths(context, PROMPT) == [1, 3]
    context.check_invariants()


def test_no_request_needs_a_draft():
    """numpy makes float arrays of empty lists, and floats were refused."""
    context = make_context(make_config(num_speculative_tokens=2))
    add(context, 1, PROMPT)
    context.begin_step(drafts=[])
    context.abort_step()
    context.resume_request(1)
    run_step(context)
    step = context.begin_step(drafts=[[]])
    assert step.requests[0].num_tokens == 1
    context.abort_step()
    context.resume_request(1)
    run_step(context)
    for wrong in ([], [[], []]):
        with pytest.raises(InvalidArgumentError, match="in the order of the requests"):
            context.begin_step(drafts=wrong)


class ArrayPolicy(LruSlotPolicy):
    """A policy that returns numpy arrays."""

    def choose(self, num_slots, slots, blocks, kv_blocks):
        order = np.argsort(np.asarray(kv_blocks.block_timestamps)[blocks], kind="stable")
        return slots[order[:num_slots]]


class AdaptiveArrayPolicy(AdaptiveSlotPolicy):
    """A policy that knows prompts and returns numpy arrays."""

    def admit(self, proposals, num_free, slots):
        accepted, victims = super().admit(proposals, num_free, slots)
        return SlotPlan(np.array(accepted), np.array(victims, dtype=np.int64))


@pytest.mark.parametrize("policy", [ArrayPolicy, AdaptiveArrayPolicy])
def test_a_policy_may_choose_in_an_array(policy):
    """The truth of the array was tested, which numpy refuses."""
    context = make_context(make_config(max_slots=2), slot_policy=policy())
    for first in range(4):
        prompt = [first, *PROMPT]
        generate(context, prompt, 1, checkpoint_positions=[BLOCK, 3 * BLOCK])
    assert context.stats().evicted_slots >= 2
    context.check_invariants()


class NoPolicy(LruSlotPolicy):
    """A policy that forgets to return its choice."""

    def choose(self, num_slots, slots, blocks, kv_blocks):
        super().choose(num_slots, slots, blocks, kv_blocks)


def test_a_policy_that_chooses_nothing_is_named():
    slots = SlotPool(1, KVBlockAllocator(4), policy=NoPolicy())
    save(slots, 0)
    with pytest.raises(InvalidArgumentError, match=r"NoPolicy chose must be ints .* got None"):
        slots.reserve_slots([1])
    assert slots.get_slot(0) == 0


def test_slots_are_no_part_of_a_graph_of_autograd():
    """A state with requires_grad made all slots part of a graph, also for later writes."""
    context = make_context()
    slots = context.slot_allocator
    [block] = context.kv_block_allocator.allocate_memory_blocks(1)
    slots.allocate_slots_batch([block])
    both = slots.conv_states, slots.ssm_states
    conv, ssm = (torch.ones_like(t[0, 0]).requires_grad_() for t in both)
    slots.store_from_tensors(block, 0, ssm * 2, conv * 2)
    assert not slots.ssm_states.requires_grad
    assert not slots.conv_states.requires_grad
    assert bool((slots.ssm_states[0, slots.get_slot(block)] == 2).all())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_prefixes_of_any_dtype_are_compared(dtype):
    """Integers have no epsilon, so a differing hit could not be reported."""

    def prefix(value):
        kv = torch.zeros(1, 2, BLOCK, 1, 2)
        kv[0, 1, 3] = value
        return PrefixContent({"ssm": torch.ones(1, 2, 2).to(dtype)}, kv.to(dtype))

    assert compare_prefixes(prefix(2), prefix(2), block_size_tokens=BLOCK) == []
    [difference] = compare_prefixes(prefix(8), prefix(2), block_size_tokens=BLOCK)
    assert (difference.block, difference.name) == (0, "values")
    assert difference.relative == pytest.approx(3)


@pytest.mark.parametrize("positions", [np.array(3), torch.tensor(3), 7])
def test_values_without_items_are_no_collection(positions):
    with pytest.raises(InvalidArgumentError, match="decode_ids must be a collection"):
        make_context().begin_step(positions)


@pytest.mark.parametrize("flag", [1, None, "no", np.ones(2)])
def test_keeping_the_cache_is_a_yes_or_a_no(flag):
    """``reset(preserve_prefix_cache="no")`` kept the cache."""
    context = make_context()
    add(context, "x", [1] * BLOCK)
    with pytest.raises(InvalidArgumentError, match="must be a bool"):
        context.reset(preserve_prefix_cache=flag)
    assert context.status("x")


class Short:
    """Every read raises an out-of-memory error."""

    def tolist(self):
        raise torch.OutOfMemoryError

    __index__ = __iter__ = tolist


@pytest.mark.parametrize(
    "read",
    [
        lambda value: check_int("x", value),
        lambda value: as_ints("x", value),
        lambda value: as_ints("x", [value]),
        lambda value: as_items("x", value, "ints"),
    ],
)
def test_shortage_of_memory_is_no_bad_argument(read):
    """PyTorch's OutOfMemoryError is a RuntimeError, as are its errors for unreadable tensors."""
    with pytest.raises(torch.OutOfMemoryError):
        read(Short())


def test_a_commit_short_of_memory_leaves_the_step_in_flight():
    context = make_context()
    add(context, "x", [1] * BLOCK)
    context.begin_step()
    with pytest.raises(torch.OutOfMemoryError):
        context.commit_step({"x": Short()})
    context.commit_step({"x": 1})
    context.check_invariants()
