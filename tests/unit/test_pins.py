"""Pinned prompts: found under any pressure until their time is up, within a share of the room."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from clocks import ManualClock
from context_rig import BLOCK, MODEL, VOCAB, add, generate, make_config, make_context, refused
from hypothesis import given
from hypothesis import strategies as st
from injectors import strike
from slot_rig import LastUsedPolicy

from mamba_cache.cache import (
    AdaptiveSlotPolicy,
    BlockHashes,
    LruSlotPolicy,
    RefZeroSlotPolicy,
)
from mamba_cache.context import Request
from mamba_cache.errors import (
    BlockCapacityError,
    InvalidArgumentError,
    InvariantError,
    MambaSlotCapacityError,
    MissingStateError,
    PoisonedError,
    StepOrderError,
)

POLICIES = [LruSlotPolicy, RefZeroSlotPolicy, LastUsedPolicy, AdaptiveSlotPolicy]
SYSTEM = [(5 * i * i + i + 1) % VOCAB for i in range(2 * BLOCK)]

LONG = [(3 * i * i + 2 * i) % VOCAB for i in range(6 * BLOCK)]


def small_context(policy=LruSlotPolicy, **changes):
    clock = ManualClock()
    settings = {"num_kv_blocks": 24, "max_slots": 8, "max_pinned_share": 0.5} | changes
    return make_context(make_config(**settings), slot_policy=policy(), clock=clock.monotonic), clock


def request(tokens, request_id=None, **options):
    return Request(request_id=request_id, prompt_tokens=list(tokens), **options)


def cache_system(context, **options):
    """Run a prompt that continues the system prompt, with a state at the system prompt's end."""
    generate(context, [*SYSTEM, 1, 2, 3], 1, checkpoint_positions=[len(SYSTEM)], **options)


def skipped(context, tokens, **options):
    return context.match(request([*tokens, 1], "look", **options)).skip_tokens


def crowd(context, rng, count=12):
    """Run new prompts that need the room of the whole pool several times over."""
    for _ in range(count):
        generate(context, rng.integers(0, VOCAB, 4 * BLOCK).tolist(), 1)


def expired(num_requests=0):
    """Return a context with an expired pin that still holds its blocks; no call came since."""
    context, clock = small_context()
    cache_system(context)
    for number in range(num_requests):
        context.add_request(request([number + 1] * 5, number))
        step = context.begin_step()
        context.commit_step(dict.fromkeys(step.request_ids, 1))
    context.pin(request(SYSTEM), ttl_seconds=60)
    held = int(np.count_nonzero(context._pins.references))
    assert held == len(SYSTEM) // BLOCK
    clock.now += 60
    assert len(context._pins.held) == 1  # no call came since
    return context


CALLS = {
    "stats": lambda context: context.stats(),
    "pins": lambda context: context.pins,
    "match": lambda context: context.match(request([1, 2, 3])),
    "prefetch": lambda context: context.prefetch(request([1, 2, 3])),
    "poll_tiers": lambda context: context.poll_tiers(),
    "status": lambda context: context.status(0),
    "statuses": lambda context: context.statuses(),
    "output": lambda context: context.output(0),
    "add_request": lambda context: context.add_request(request([1, 2, 3], "new")),
    "begin_step": lambda context: context.begin_step(),
    "fork": lambda context: context.fork(0, ["copy"]),
    "preempt": lambda context: context.preempt(0),
    "finish": lambda context: context.finish(0),
    "reset": lambda context: context.reset(preserve_prefix_cache=True),
    "wait_for_tiers": lambda context: context.wait_for_tiers(),
    "allocator": lambda context: context.kv_block_allocator.match_prefix(BlockHashes()),
    "slots": lambda context: context.slot_allocator.get_slot(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_expired_pin_holds_nothing_from_the_next_call_on(name):
    """Any call ends the pin, reads included; the call's result no longer counts the pin."""
    context = expired(num_requests=1)
    answer = CALLS[name](context)
    assert len(context._pins.held) == 0
    assert not context._pins.references.any()
    if name == "stats":
        assert answer.used_blocks == 1  # the running request's block
    if name == "pins":
        assert answer == ()
    if name == "begin_step":
        context.abort_step()
    context.check_invariants()


def test_a_read_by_another_thread_leaves_pins_to_the_thread_that_calls():
    """Otherwise a call that the context's thread begins at that moment would be refused."""
    context = expired()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: context.pins).result() == ()
        assert other.submit(lambda: context.stats().used_blocks).result() == len(SYSTEM) // BLOCK
    assert len(context._pins.held) == 1
    assert context.stats().used_blocks == 0
    assert len(context._pins.held) == 0


def test_pins_without_an_end_and_those_that_are_not_over_cost_no_clock():
    context, clock = small_context()
    cache_system(context)
    context.pin(request(SYSTEM))
    readings = []
    context._pins._clock = lambda: readings.append(None) or clock.now
    context.match(request([1, 2, 3]))
    context.stats()
    assert readings == []
    assert len(context.pins) == 1


@given(
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_pinned_entries_stay_within_the_share(policy, lengths, seed):
    context, _ = small_context(policy, max_pinned_share=0.34)
    pins = {}
    for number, length in enumerate(lengths):
        rng = np.random.default_rng(seed + number)
        prompt = rng.integers(0, VOCAB, length * BLOCK).tolist()
        generate(context, [*prompt, 1], 1, checkpoint_positions=[len(prompt)])
        try:
            pins[context.pin(request(prompt))] = prompt
        except (BlockCapacityError, MambaSlotCapacityError):
            continue
        crowd(context, rng, 3)
        context.check_invariants()
        for prompt in pins.values():
            assert skipped(context, prompt) == len(prompt)
    assert sum(map(len, pins.values())) <= 0.34 * 24 * BLOCK
    assert 0 < len(pins) <= 0.34 * 8
    for pin in pins:
        context.unpin(pin)
    assert context.stats().used_blocks == 0
    context.check_invariants()


def test_pins_take_no_more_than_their_share():
    context, _ = small_context(num_kv_blocks=20, max_slots=4, max_pinned_share=0.5)
    prompts = [[number] * 3 * BLOCK for number in range(4)]
    for prompt in prompts:
        generate(context, [*prompt, 1], 1)
    pins = [context.pin(request(prompt)) for prompt in prompts[2:]]
    again = context.pin(request(prompts[3]))  # pinned entries take no more of the share
    generate(context, [*prompts[0], 1], 1)
    message = r"1 .* required, but only 0 .* available: for pins; unpin another prompt"
    with refused(context, MambaSlotCapacityError, message):
        context.pin(request(prompts[0]))
    for pin in (pins[1], again):
        context.unpin(pin)
    context.pin(request(prompts[0]))
    generate(context, [*LONG, 1], 1)
    with pytest.raises(BlockCapacityError, match=r"6 .* only 4 are available: for pins"):
        context.pin(request(LONG))
    context.check_invariants()


def test_states_inside_a_pinned_prompt_may_go(rng):
    """Only entries needed for a hit on the pinned prompt are kept."""
    context, _ = small_context()
    cache_system(context)
    generate(context, [*SYSTEM[:BLOCK], 9, 9], 1, checkpoint_positions=[BLOCK])
    assert skipped(context, SYSTEM[:BLOCK]) == BLOCK
    context.pin(request(SYSTEM))
    crowd(context, rng)
    assert skipped(context, SYSTEM[:BLOCK]) == 0
    assert skipped(context, SYSTEM) == len(SYSTEM)


def test_a_pin_is_of_one_salt(rng):
    context, _ = small_context()
    with pytest.raises(MissingStateError, match="nothing of the prompt is cached: run it first"):
        context.pin(request(SYSTEM))
    cache_system(context, cache_salt="a")
    with pytest.raises(MissingStateError):
        context.pin(request(SYSTEM))
    context.pin(request(SYSTEM, cache_salt="a"))
    crowd(context, rng)
    assert skipped(context, SYSTEM) == 0
    assert skipped(context, SYSTEM, cache_salt="a") == len(SYSTEM)


def test_invalidating_a_state_by_name_ends_its_pin():
    context, _ = small_context()
    cache_system(context)
    pin = context.pin(request(SYSTEM))
    block = context.kv_block_allocator.match_prefix(context.prepare(request(SYSTEM)).hashes)[-1]
    context.slot_allocator.invalidate_block(block)
    assert context.pins == ()
    context.check_invariants()
    add(context, "any", [3] * 5)
    assert context.stats().used_blocks == 1
    context.unpin(pin)  # the pin has ended already
    context.check_invariants()


def test_resets_end_pins_unless_they_preserve_the_prefixes():
    context, _ = small_context()
    cache_system(context)
    pin = context.pin(request(SYSTEM))
    with pytest.raises(StepOrderError, match="1 pins hold KV blocks: unpin them first"):
        context.kv_block_allocator.reset()
    context.reset(preserve_prefix_cache=True)
    assert context.pins == (pin,)
    context.reset()
    assert context.pins == ()
    context.check_invariants()
    context.unpin(pin)


def test_misuse_is_refused():
    context, _ = small_context()
    cache_system(context)
    for ttl in (-1, "5", True, float("nan")):
        with pytest.raises(InvalidArgumentError, match="ttl_seconds must be a number"):
            context.pin(request(SYSTEM), ttl_seconds=ttl)
    with pytest.raises(InvalidArgumentError, match="pin"):
        context.unpin("pin")


def test_nothing_is_pinned_while_a_step_is_in_flight():
    context, _ = small_context()
    cache_system(context)
    add(context, "running", [3] * 5)
    step = context.begin_step()
    with pytest.raises(StepOrderError, match="a step is in flight"):
        context.pin(request(SYSTEM))
    MODEL.forward(step.metadata, context)
    context.commit_step([1])
    context.pin(request(SYSTEM))


def test_a_pin_that_breaks_off_holds_nothing(monkeypatch):
    context, _ = small_context()
    cache_system(context)
    monkeypatch.setattr(context.kv_block_allocator, "hold", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        context.pin(request(SYSTEM))
    context.check_invariants()
    assert context.pins == ()


def test_references_of_no_pin_are_found():
    context, _ = small_context()
    cache_system(context)
    context.pin(request(SYSTEM))
    [pin] = context.pins
    del context._pins.held[pin]
    with pytest.raises(InvariantError, match="references of pins are not those of their blocks"):
        context._pins.check_invariants()


def test_an_expired_pin_breaks_no_invariant():
    """Regression: a pin expired between two reads of the check, which found an unpinned slot."""
    expired().check_invariants()


def test_ending_a_pin_is_a_change_that_may_not_break_off(monkeypatch):
    context, _ = small_context()
    cache_system(context)
    pin = context.pin(request(SYSTEM))
    strike(monkeypatch, context._pins, "_look_ahead", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        context.unpin(pin)
    with pytest.raises(PoisonedError):
        context.pin(request(SYSTEM))
