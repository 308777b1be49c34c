"""Pinned prompts of a ``PrefixCache``: found under any pressure, by ``generate`` and by batches."""

import pytest
import torch
from batch_rig import answer, answers, batch, subject, tokens
from clocks import ManualClock
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers_rig import BLOCK, budgets

from mamba_cache.errors import (
    BlockCapacityError,
    MambaSlotCapacityError,
    MissingStateError,
    SequenceLengthError,
)


def small(one, *, slots=6, blocks=24, share=0.5, **settings):
    """A cache that a few prompts fill, and the clock of its pins."""
    clock = ManualClock()
    sizes = budgets(one.cache(), slots=slots, blocks=blocks)
    made = one.cache(**sizes, max_pinned_share=share, clock=clock.monotonic, **settings)
    return made, clock


def found(cache, prompt, *, is_batch, **options):
    """Return the tokens that a continuation of this prompt skips."""
    before = cache.stats().skipped_tokens
    answer(cache, [*prompt, 5], is_batch=is_batch, count=1, **options)
    return cache.stats().skipped_tokens - before


def crowd(cache, generator, *, is_batch, count=6):
    """Fresh prompts that need all room several times over."""
    for _ in range(count):
        answer(cache, tokens(generator, 4 * BLOCK + 1), is_batch=is_batch)


@pytest.mark.parametrize("call", ["stats", "pins", "prefill", "unpin"])
def test_an_expired_pin_holds_nothing_from_the_next_call_on(nemotron, generator, call):
    """Any call counts, reads included."""
    cache, clock = small(nemotron)
    prompts = [tokens(generator, 2 * BLOCK + 1) for _ in range(2)]
    for prompt in prompts:
        cache.prefill(prompt)
    other = cache.pin(prompts[0])
    cache.pin(prompts[1], ttl_seconds=60)
    clock.now += 60
    assert len(cache._store.pins.held) == 2  # no call since
    if call == "stats":
        cache.stats()
    elif call == "pins":
        assert cache.pins == (other,)
    else:
        (cache.prefill if call == "prefill" else cache.unpin)(
            prompts[0] if call == "prefill" else other
        )
    assert len(cache._store.pins.held) == (call != "unpin")
    cache.check_invariants()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("answer"), st.booleans(), st.integers(0, 3), st.integers(0, BLOCK)),
        st.tuples(st.just("pin"), st.integers(0, 3), st.integers(1, 3 * BLOCK)),
        st.tuples(st.just("unpin"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(1, 40)),
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.parametrize("name", ["nemotron_h", "mamba2", "qwen3_next"])
@examples(8)
@given(steps=STEPS, slots=st.integers(2, 8), seed=st.integers(0, 2**16))
def test_whatever_is_pinned_stays_and_each_answer_is_the_models_own(name, steps, slots, seed):
    one, generator = subject(name), torch.Generator().manual_seed(seed)
    cache, clock = small(one, slots=slots)
    texts = [tokens(generator, 3 * BLOCK) for _ in range(4)]
    pinned = {}
    for step in steps:
        if step[0] == "answer":
            _, is_batch, which, own = step
            prompt = texts[which] + tokens(generator, own)
            assert answer(cache, prompt, is_batch=is_batch) == one.answer(prompt, 3)
        elif step[0] == "pin":
            _, which, length = step
            try:
                pin = cache.pin(texts[which][:length], ttl_seconds=50)
            except (MissingStateError, BlockCapacityError, MambaSlotCapacityError):
                continue
            pinned[pin] = texts[which][: pin.num_tokens]
        elif step[0] == "unpin" and pinned:
            pin = [*pinned][step[1] % len(pinned)]
            cache.unpin(pin)
            del pinned[pin]
        elif step[0] == "wait":
            clock.now += step[1]
        cache.check_invariants()
        pinned = {pin: prompt for pin, prompt in pinned.items() if pin in cache.pins}
        assert {*cache.pins} == {*pinned}
    for prompt in pinned.values():
        for is_batch in (False, True):
            # Of some models a batch computes two tokens at least.
            assert found(cache, [*prompt, 4], is_batch=is_batch) >= len(prompt)
    for pin in pinned:
        cache.unpin(pin)
    cache.check_invariants()
    assert cache.stats().used_blocks == 0


def test_pins_have_their_share_and_name_what_they_want(nemotron, generator):
    cache, _ = small(nemotron, slots=2)
    prompts = [tokens(generator, BLOCK) for _ in range(2)]
    for prompt in prompts:
        cache.prefill(prompt)
    pin = cache.pin(torch.tensor([prompts[0]]))
    with pytest.raises(MambaSlotCapacityError, match="for pins; unpin another prompt"):
        cache.pin(prompts[1])
    with pytest.raises(MissingStateError, match="nothing of the prompt is cached: run it first"):
        cache.pin(tokens(generator, 5))
    with pytest.raises(MissingStateError):
        cache.pin(prompts[0], cache_salt="other")
    cache.unpin(pin)
    cache.unpin(pin)  # the pin has ended
    cache.check_invariants()


def test_a_reset_ends_pins_and_so_does_closing(nemotron, generator):
    for is_batch in (False, True):
        cache, _ = small(nemotron)
        answer(cache, [5, 6], is_batch=is_batch)
        for end in (cache.reset, cache.close):
            prompt = tokens(generator, BLOCK)
            cache.prefill(prompt)
            pin = cache.pin(prompt)
            end()
            assert cache.pins == ()
            cache.unpin(pin)
            cache.check_invariants()


def test_a_request_that_pins_leave_no_room_for_is_refused(nemotron, generator):
    """It ran until no request was left to preempt, and failed an assertion then."""
    cache, _ = small(nemotron, blocks=8)
    prompt = tokens(generator, 4 * BLOCK)
    answer(cache, prompt, is_batch=True)
    pin = cache.pin(prompt)
    with pytest.raises(SequenceLengthError, match="there is room for 32 beside 4 pinned KV"):
        batch(cache, [tokens(generator, 4 * BLOCK + 1)])
    cache.check_invariants()
    [output] = batch(cache, [tokens(generator, 3 * BLOCK)], max_new_tokens=3 * BLOCK)
    assert output.error.endswith("cannot go on: the longest sequence is 32 tokens")
    longer = [*prompt, 5]  # the pinned prefix is its own
    [own] = answers(batch(cache, [longer], max_new_tokens=3 * BLOCK))
    assert own == nemotron.answer(longer, 3 * BLOCK)
    cache.unpin(pin)
    one = tokens(generator, 6 * BLOCK)
    assert answers(batch(cache, [one])) == [nemotron.answer(one, 6)]


def test_what_lies_in_host_memory_is_brought_and_pinned(nemotron, generator):
    cache, _ = small(nemotron, host_cache_gb=0.01)
    prompt = tokens(generator, 2 * BLOCK + 3)
    cache.prefill(prompt)
    crowd(cache, generator, is_batch=False)
    assert cache._store.slots.num_cached_slots == 6
    pin = cache.pin(prompt)
    assert pin.num_tokens == 2 * BLOCK
    crowd(cache, generator, is_batch=False)
    before = cache.tier_stats()[0].restored
    assert found(cache, prompt, is_batch=True) == 2 * BLOCK
    assert cache.tier_stats()[0].restored == before
