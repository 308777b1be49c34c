"""Single faults, by name; ``tests/property/test_faults.py`` strikes everywhere."""

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
    run_step,
    uncached,
)
from fingerprints import fingerprint
from injectors import OutOfMemory

from mamba_cache import DeviceTokens, Request
from mamba_cache.context import RequestStatus
from mamba_cache.errors import InvariantError, PoisonedError, StepOrderError

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
OTHER = [(5 * i + 1) % 13 for i in range(2 * BLOCK + 3)]
ENDING = PROMPT[: 2 * BLOCK - 1]


def fail_on(call, error=OSError):
    """A function that raises on its ``call``-th call, and calls the original before."""

    def wrap(function):
        calls = 0

        def run(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                raise error("broken")
            return function(*args, **kwargs)

        return run

    return wrap


def patch(monkeypatch, owner, name, wrap):
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


@pytest.fixture
def context():
    """Two requests for the next step: a later chunk of one prompt, and a new one."""
    context = make_context()
    add(context, "later", PROMPT, chunk_tokens=BLOCK)
    run_step(context)
    context.schedule_prefill("later", chunk_tokens=BLOCK)
    add(context, "new", OTHER)
    return context


def go_on(context):
    """Brings both requests to their answers, which are those of uncached runs."""
    for name, prompt in (("later", PROMPT), ("new", OTHER)):
        if context.status(name) is RequestStatus.PREEMPTED:
            context.resume_request(name)
        while context.status(name) is not RequestStatus.DECODING:
            if context.status(name) is RequestStatus.PREFILLING:
                context.schedule_prefill(name)
            run_step(context)
        tokens = context.finish(name)
        assert tokens == uncached(prompt, len(tokens))[0]
        assert_same_run(generate(context, prompt, 2), prompt)
    context.check_invariants()
    assert context.stats().used_blocks == context.stats().reserved_slots == 0


def test_a_step_that_breaks_off_after_its_restores_is_taken_back(context, monkeypatch):
    """It was neither in flight nor forgotten, and the next one began over its chunks."""
    with monkeypatch.context() as patches:
        patches.setattr("mamba_cache.context.context.Step", fail_on(1)(lambda *_, **__: None))
        with pytest.raises(OSError, match="broken"):
            context.begin_step()
    context.check_invariants()
    assert {context.status(name) for name in ("later", "new")} == {RequestStatus.PREEMPTED}
    go_on(context)


def test_a_step_whose_taking_back_breaks_off_is_noticed(monkeypatch):
    context = make_context()
    for name in ("a", "b"):  # the next token of each ends a block
        add(context, name, ENDING)
    run_step(context)
    patch(monkeypatch, context.step_buffers, "fill", fail_on(1))
    patch(monkeypatch, context._planner, "release", fail_on(1))
    with pytest.raises(OSError, match="broken"):
        context.begin_step()
    with pytest.raises(PoisonedError, match="begin_step broke off"):
        context.status("b")


@pytest.mark.parametrize("on_device", [False, True])
def test_the_device_is_told_once_of_a_steps_tokens(monkeypatch, on_device):
    """A commit that broke off while it saved, and was called again, moved the states on twice."""
    context = make_context(make_config(num_speculative_tokens=2))
    add(context, "x", ENDING)
    run_step(context)
    step = context.begin_step()
    token = int(MODEL.forward(step.metadata, context)[0].argmax())
    new_tokens = {"x": token}
    if on_device:
        counts = torch.ones(1, dtype=torch.int32)
        new_tokens = DeviceTokens(torch.tensor([[token, 0, 0]]), counts)
    patch(monkeypatch, context.slot_allocator, "live_to_slots", fail_on(1))
    with pytest.raises(OSError, match="broken"):
        context.commit_step(new_tokens)
    with pytest.raises(StepOrderError, match="abort_step takes the step back"):
        context.commit_step(new_tokens)
    context.abort_step()
    context.resume_request("x")
    for _ in range(3):
        run_step(context)
    tokens = context.finish("x")
    assert tokens == uncached(ENDING, len(tokens))[0]


class Broken:
    """A collection that raises when it is read."""

    def __iter__(self):
        raise OSError("broken")


def test_what_a_caller_gives_may_raise_itself(context):
    before = fingerprint(context)
    with pytest.raises(OSError, match="broken"):
        add(context, "x", PROMPT, checkpoint_positions=Broken())
    with pytest.raises(OSError, match="broken"):
        context.begin_step(Broken())
    with pytest.raises(OSError, match="broken"):
        context.match(Request(request_id="x", prompt_tokens=PROMPT, multimodal_keys=Broken()))
    assert fingerprint(context) == before
    go_on(context)


def test_without_memory_nothing_is_made():
    moments = OutOfMemory(None, 0)
    with moments:
        make_context(poison=False)
    for index in range(1, moments.count + 1):
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(None, index):
            make_context(poison=False)


def test_invariants_see_a_chunk_that_is_not_due(context):
    context.request_table.find("later").chunk = None
    with pytest.raises(InvariantError, match="'later' is scheduled with chunk None"):
        context.check_invariants()


def test_invariants_see_a_request_that_has_moved_on_without_its_chunk(context):
    context.request_table.num_computed[context.request_table.find("later").row] += 1
    with pytest.raises(InvariantError, match="its chunk begins at 8"):
        context.check_invariants()


def test_invariants_see_a_pin_without_a_reader(context):
    run_step(context)
    slots = context.slot_allocator
    [lease] = slots.pin_slots([int((slots.slot_to_block >= 0).nonzero()[0])])
    with pytest.raises(InvariantError, match=r"slots \[.*\] are pinned, but \[\] are read"):
        context.check_invariants()
    slots.unpin_slots([lease])
    context.check_invariants()
