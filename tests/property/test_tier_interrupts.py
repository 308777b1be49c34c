"""A context with a host tier, interrupted at any moment of its calls: never wrong, nothing held."""

from contextlib import suppress

import pytest
from context_rig import MODEL, UncachedRuns, add, generate, run_step
from injectors import LineInterrupt
from tier_rig import STATE, LateTransfers, cached_rows, flip, install, make_tiered

from mamba_cache.context import Request, RequestStatus
from mamba_cache.errors import PoisonedError, StepOrderError, UnknownRequestError

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(30)]
OTHERS = [[(5 * i + k) % 13 for i in range(30)] for k in range(1, 4)]
UNCACHED = UncachedRuns()
STRIDE = 53
"""Moments from one that is struck to the next; another phase for each call."""


def make_full():
    context = make_tiered(num_kv_blocks=9, max_slots=2)
    for prompt in (PROMPT, *OTHERS):
        generate(context, prompt, 1)
    return context


def make_loading():
    context = make_full()
    assert add(context, "a", PROMPT).loads_state
    return context


def make_begun(*, damages=False):
    context = make_loading()
    if damages:
        for row in cached_rows(context, STATE):
            flip(context, STATE, row, 5)
    step = context.begin_step()
    MODEL.forward(step.metadata, context)
    return context


def make_late():
    """Spills are under way, of which some will not count."""
    context = make_tiered(num_kv_blocks=9, max_slots=2)
    late = install(context, LateTransfers)
    for prompt in (PROMPT, OTHERS[0]):
        generate(context, prompt, 1)
    late.run(9)
    return context


def token_of(prompt):
    return int(UNCACHED.logits(tuple(prompt), 0).argmax())


CALLS = {
    "add_request": (make_full, lambda context: add(context, "a", PROMPT)),
    "begin_step": (make_loading, lambda context: context.begin_step()),
    "commit_step": (make_begun, lambda context: context.commit_step({"a": token_of(PROMPT)})),
    "commit_step, damaged": (
        lambda: make_begun(damages=True),
        lambda context: context.commit_step({"a": token_of(PROMPT)}),
    ),
    "abort_step": (make_begun, lambda context: context.abort_step()),
    "preempt": (make_loading, lambda context: context.preempt("a")),
    "wait_for_tiers": (make_late, lambda context: context.wait_for_tiers()),
    "reset": (make_begun, lambda context: context.reset()),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line(name):
    make, call = CALLS[name]
    context = make()
    with LineInterrupt(context, 0) as counting:
        call(context)
    number = 1 + len(name) % STRIDE
    num_struck = 0
    while number <= counting.count:
        context = make()
        struck = LineInterrupt(context, number)
        with suppress(KeyboardInterrupt), struck:
            call(context)
        assert struck.where
        try:
            check_goes_on(context)
        except Exception as failure:
            raise AssertionError(f"line {number}: {struck.where}") from failure
        num_struck += 1
        number += STRIDE
    assert num_struck


def check_goes_on(context):
    try:
        context.match(context.prepare(_probe()))
    except PoisonedError:
        context.reset()
    context.check_invariants()
    with suppress(StepOrderError):
        context.abort_step()
    with suppress(UnknownRequestError):
        while context.status("a") is not RequestStatus.DECODING:
            if context.status("a") is RequestStatus.PREEMPTED:
                context.resume_request("a")
            elif context.status("a") is RequestStatus.PREFILLING:
                context.schedule_prefill("a")
            run_step(context)
        assert context.finish("a") in ([], [token_of(PROMPT)])
    for prompt in (PROMPT, *OTHERS, PROMPT):
        assert generate(context, prompt, 1)[0] == [token_of(prompt)]
    context.wait_for_tiers()
    context.check_invariants()
    assert not any(context.host_tier.leases.values())


def _probe():

    return Request(request_id="probe", prompt_tokens=PROMPT)
