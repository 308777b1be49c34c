"""Restores beside earlier steps: never before what they read and overwrite is done."""

import pytest
import torch
from context_rig import BLOCK, MODEL_CONFIG, make_config
from gpu_rig import BUSY_CYCLES, assert_same_bits, waiting_raises

from mamba_cache.context import CapturedExtractions, DynamicInferenceContext, Request

pytestmark = pytest.mark.gpu

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


@pytest.fixture
def context():
    return DynamicInferenceContext(
        make_config(restore_on_side_stream=True),
        MODEL_CONFIG.state_spec(torch.float64),
        MODEL_CONFIG.kv_spec(torch.float64),
        device="cuda",
    )


def add(context, name, prompt):
    return context.add_request(Request(request_id=name, prompt_tokens=prompt))


def begin_late(context, *, busy=True):
    """A step whose forward, on the device, comes long after the host has gone on."""
    step = context.begin_step()
    lengths = step.metadata.num_chunks, step.metadata.num_prefill_tokens
    context.count_extractions(CapturedExtractions({0: lengths, 1: lengths}))  # nobody reads them
    if busy:
        torch.cuda._sleep(BUSY_CYCLES)
    return step


def write_live(context, row, value):
    for tensor in context.live_states.tensors.values():
        tensor[:, row] = value


def live(context, row):
    return [tensor[:, row].clone() for tensor in context.live_states.tensors.values()]


def drain():
    """The host reads what the device has done; until then nothing waited."""
    torch.cuda.synchronize()


def test_a_restore_waits_for_the_step_that_saves_its_state(context):
    """Without the wait it would read the slot while the step before is still to fill it."""
    with waiting_raises():
        add(context, "writer", PROMPT)
        step = begin_late(context)
        row = step.requests[0].row
        write_live(context, row, 7.5)  # what the layers do
        context.commit_step({"writer": 1})
        assert add(context, "reader", [*PROMPT, 1]).skip_tokens == 2 * BLOCK
        reader = next(r for r in context.begin_step().requests if r.request_id == "reader")
        restored = live(context, reader.row)
    drain()
    for tensor in restored:
        assert_same_bits(tensor, torch.full_like(tensor, 7.5))


def test_a_restore_waits_for_the_step_that_used_its_row(context):
    """Without the wait the step before would write its state over the restored one."""
    with waiting_raises():
        add(context, "saver", PROMPT)
        row = begin_late(context, busy=False).requests[0].row
        write_live(context, row, 7.5)
        context.commit_step({"saver": 1})
        context.finish("saver")
        add(context, "user", [2, 7])  # of the same row, which is cleared for it
        step = begin_late(context)
        assert step.requests[0].row == row
        write_live(context, row, -1.0)
        context.commit_step({"user": 1})
        context.finish("user")
        assert add(context, "reader", [*PROMPT, 1]).skip_tokens == 2 * BLOCK
        assert context.begin_step().requests[0].row == row
        restored = live(context, row)
    drain()
    for tensor in restored:
        assert_same_bits(tensor, torch.full_like(tensor, 7.5))


def test_the_forward_waits_for_the_restore(context):
    with waiting_raises():
        add(context, "saver", PROMPT)
        row = begin_late(context, busy=False).requests[0].row
        write_live(context, row, 7.5)
        context.commit_step({"saver": 1})
        with torch.cuda.stream(context._runner._side_stream._streams._stream):
            torch.cuda._sleep(BUSY_CYCLES)
        add(context, "reader", [*PROMPT, 1])
        reader = next(r for r in context.begin_step().requests if r.request_id == "reader")
        restored = live(context, reader.row)
    drain()
    for tensor in restored:
        assert_same_bits(tensor, torch.full_like(tensor, 7.5))


def test_a_restore_runs_beside_a_later_step(context):
    """It is done while the current stream is still busy with a step that it need not wait for."""
    with waiting_raises():
        add(context, "saver", PROMPT)
        write_live(context, begin_late(context, busy=False).requests[0].row, 7.5)
        context.commit_step({"saver": 1})
    drain()
    context.begin_step()
    torch.cuda._sleep(BUSY_CYCLES)
    context.commit_step({"saver": 2})
    busy_until = torch.cuda.Event()
    busy_until.record()
    add(context, "reader", [*PROMPT, 1])
    context.begin_step()
    streams = context._runner._side_stream._streams
    streams._restored.synchronize()
    assert not busy_until.query()
