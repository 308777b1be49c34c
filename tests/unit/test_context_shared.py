"""A context over blocks and slots that it shares."""

import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL_CONFIG,
    assert_same_run,
    generate,
    make_config,
    make_context,
)
from slot_rig import Listening

from mamba_cache.cache.placement import check_placement
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.context.memory import CacheMemory
from mamba_cache.errors import PoisonedError
from mamba_cache.events import Admitted, Stored

STATES, KV = MODEL_CONFIG.state_spec(torch.float64), MODEL_CONFIG.kv_spec(torch.float64)
PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]


def make_store(blocks=20, slots=10, policy=None):
    """Return the memory that an owner allocates before there is a context."""
    config = make_config(num_kv_blocks=blocks, max_slots=slots, max_pinned_share=0.5)
    return CacheMemory(
        config,
        STATES,
        KV,
        device=torch.device("cpu"),
        policy=policy,
        placement=check_placement(None),
        clock=lambda: 0.0,
        is_owners=True,
    )


def embed(store, **changes):
    config = make_config(**{"num_kv_blocks": 20, "max_slots": 10, **changes})
    return DynamicInferenceContext(config, STATES, KV, shared=store)


def test_contexts_that_come_and_go_find_earlier_entries():
    store, answers = make_store(), []
    for _ in range(2):
        context = embed(store)
        assert context.slot_allocator is store.slots
        assert context.kv_block_allocator is store.slots.kv_blocks
        assert context.kv_cache is store.kv_cache
        answers.append(generate(context, PROMPT, 4)[0])
        context.check_invariants()
    assert answers == [generate(make_context(), PROMPT, 4)[0]] * 2
    assert (store.counters["requests"], store.counters["hits"]) == (2, 1)
    assert store.counters["skipped_tokens"] == 3 * BLOCK
    context.reset()
    assert context.stats().cached_blocks == context.stats().requests == 0
    assert store.counters["requests"] == 0


def test_a_reset_renews_a_context_whose_memory_has_a_separate_guard(monkeypatch):
    context = embed(make_store())
    monkeypatch.setattr(context._tiering, "end_step", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        generate(context, PROMPT, 1)
    monkeypatch.undo()
    with pytest.raises(PoisonedError, match="commit_step broke off"):
        context.begin_step()
    context.reset()
    assert_same_run(generate(context, PROMPT, 4), PROMPT)


def test_slots_of_blocks_that_requests_refer_to_may_go():
    """Slots made without a context are read immediately, so no reference protects them."""
    slots = make_store(slots=2).slots
    slots.allocate_slots_batch([3, 4])
    slots.kv_blocks.block_ref_counts[:] = 1
    assert slots._evictable(()).tolist() == [0, 1]


@pytest.mark.parametrize("tells", [True, False, None])
def test_observers_get_the_facts_of_a_request(tells):
    context, told = make_context(), []
    context.listeners.add(told.append, Stored)
    request = {"lora_id": "a", "tells_tokens": tells}
    generate(context, PROMPT, 1, **request)
    [event] = [event for event in told if event.kind == "block"]
    assert (event.tokens is not None) == (tells is not False)
    assert event.extra_keys == ((("a",),) * len(event.block_ids) if tells is None else None)


def test_extra_keys_stand_beside_the_block_that_they_are_of():
    context, told, admitted = make_context(), [], []
    context.listeners.add(told.append, Stored)
    context.listeners.add(admitted.append, Admitted)
    prompt, keys = [1] * 3 * BLOCK, [(0, "cat"), (2 * BLOCK + 3, "dog")]
    generate(context, prompt, 1, cache_salt="a", multimodal_keys=keys)
    generate(context, [*prompt, 2, *prompt], 1, cache_salt="a", multimodal_keys=keys)
    first, second = [event.extra_keys for event in told if event.kind == "block"]
    assert first == ((("cat", 0), "a"), None, (("dog", 3),))
    assert second == (None, None, None)
    assert [event.cache_salt for event in admitted] == ["a", "a"]


@pytest.mark.parametrize("refuses", [True, False])
def test_the_owners_policy_is_shown_prompts_and_states(refuses):
    policy = Listening()
    store = make_store(policy=policy)
    store.index.refuses_states = refuses
    context = embed(store)
    answer = generate(context, PROMPT, BLOCK + 2, will_continue=True, source="x")[0]
    assert answer == generate(make_context(), PROMPT, BLOCK + 2)[0]
    context.check_invariants()
    [facts] = policy.requests
    count = len(PROMPT)
    assert (facts.block_size_tokens, facts.num_usable_blocks) == (BLOCK, (count - 1) // BLOCK)
    assert (len(facts.hash_ids), facts.num_matched_blocks) == (count // BLOCK, 0)
    assert (facts.will_continue, facts.source) == (True, "x")
    depths = [proposal.num_blocks for proposal in policy.proposed]
    assert depths[-1] == 4
    assert set(depths) <= {1, 2, 3, 4}
    assert {proposal.is_asked for proposal in policy.proposed} == {not refuses}
    # The policy files the state saved while decoding under its block's hash id, as the next turn.
    told = [*PROMPT, *answer]
    request = context.prepare(Request(request_id="next", prompt_tokens=told))
    node = policy._tree._by_hash[request.chain.hashes[3]]
    assert policy._tree.num_kept_at[node]
    generate(context, [*told, 1], 1)
    assert policy._tree._last_use_at[node] == policy._tree._clock


def test_pins_are_the_owners():
    store = make_store()
    contexts = [embed(store)]
    generate(contexts[0], PROMPT, 1)
    pin = contexts[0].pin(Request(request_id=1, prompt_tokens=PROMPT))
    contexts.append(embed(store))
    assert [context.pins for context in contexts] == [(pin,), (pin,)]
    contexts[1].check_invariants()
    contexts[1].unpin(pin)
    assert contexts[1].stats().used_blocks == 0
    contexts[0].check_invariants()
