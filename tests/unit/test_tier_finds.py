"""Faults found by the state machine of all tiers, one test each."""

import pytest
from context_rig import (
    BLOCK,
    add,
    generate,
    make_config,
    make_context,
    run_step,
    uncached,
)
from fingerprints import fingerprint
from slot_rig import Listening
from tier_rig import always, make_tiered

from mamba_cache.cache import EveryNthBlock
from mamba_cache.errors import TokenCapacityError

LONG = [(3 * i * i + 2 * i) % 13 for i in range(30)]
PROMPT = [(7 * i * i + 3 * i) % 13 for i in range(2 * BLOCK + 1)]
OTHERS = [[(5 * i + k) % 13 for i in range(4 * BLOCK - 2)] for k in range(1, 4)]


def test_a_request_that_has_grown_resumes_by_a_load_under_a_policy_that_knows_prompts():
    """The policy knew the original prompt; the loaded state lies beyond its end."""
    context = make_tiered(save_decode_states=True, slot_policy="adaptive")
    add(context, "grown", PROMPT)
    tokens = []
    while len(tokens) < 2 * BLOCK:
        tokens.append(run_step(context)["grown"][1])
    context.preempt("grown")
    context.wait_for_tiers()
    for other in OTHERS:
        generate(context, other, 1)
    admission = context.resume_request("grown")
    assert admission.loads_state
    assert admission.skip_tokens > len(PROMPT)
    run_step(context)
    assert context.finish("grown")[:-1] == tokens


def test_an_admission_that_is_refused_where_a_load_finds_no_slot_evicts_nothing():
    """With the load the request would fit the step; without it, it does not."""
    context = make_tiered(max_tokens=40)
    generate(context, LONG, 1)
    for other in OTHERS:
        generate(context, other, 1)
    add(context, "another", [1] * 20)
    slots = context.slot_allocator
    for slot, block in enumerate(slots.slot_to_block):
        if block >= 0:
            slots.pin(slot)
    before = fingerprint(context)
    with pytest.raises(TokenCapacityError):
        add(context, "again", LONG)
    assert fingerprint(context) == before
    assert not any(context.host_tier.leases.values())


def test_two_requests_of_a_step_that_could_load_one_state_are_both_right():
    """The first request loads the state for a block on the GPU, with a slot reserved then."""
    context = make_tiered(num_kv_blocks=60)
    generate(context, LONG, 1)
    for other in OTHERS:
        generate(context, other, 1)
    one, two = add(context, "one", LONG), add(context, "two", LONG)
    assert (one.loads_state, one.loaded_blocks) == (True, 0)
    assert (two.loads_state, two.skip_tokens) == (False, 0)
    tokens = {request_id: token for request_id, (_, token) in run_step(context).items()}
    assert set(tokens.values()) == {uncached(LONG, 1)[0][0]}
    context.check_invariants()


def test_a_state_that_host_memory_lacks_is_requested():
    policy = Listening()
    config = make_config(num_host_blocks=40, num_host_states=20)
    options = {"slot_policy": policy, "placement": EveryNthBlock(1), "load_planner": always()}
    context = make_context(config, **options)
    generate(context, LONG, 1)
    context.wait_for_tiers()
    context.slot_allocator.reset()
    policy.proposed.clear()
    generate(context, LONG[: 2 * BLOCK] + [5] * (BLOCK + 1), 1)
    assert [(each.num_blocks, each.is_asked) for each in policy.proposed] == [(3, True)]
