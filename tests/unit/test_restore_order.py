"""Restores beside earlier steps wait for the last step that used their slots or rows."""

from contextlib import contextmanager

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

from mamba_cache.context import DynamicInferenceContext
from mamba_cache.context.restore_order import STEPS_REMEMBERED, RestoreOrder, SideStream


class Recorder:
    """Streams that write down what they were asked to do."""

    def __init__(self):
        self.steps = 0
        self.recorded = {}
        self.waits = []

    def record(self, index):
        self.steps += 1
        self.recorded[index] = self.steps

    @contextmanager
    def after(self, index):
        self.waits.append(self.recorded[index])
        yield


@pytest.fixture
def streams():
    return Recorder()


@pytest.fixture
def context(monkeypatch, streams):
    """A context whose restores go to a stream that is the current one, and is written down."""

    def side_stream(context):
        return SideStream(context.slot_allocator, context.config, streams)

    with monkeypatch.context() as patch:
        patch.setattr(DynamicInferenceContext, "_side_stream", side_stream)
        return make_context()


def test_without_a_gpu_nothing_is_beside():
    context = make_context(make_config(restore_on_side_stream=True))
    prompt = [3] * 2 * BLOCK + [1]
    for skipped in (0, 2 * BLOCK):
        run = generate(context, prompt, 3)
        assert run[2].skip_tokens == skipped
        assert_same_run(run[:2], prompt)


def test_slots_and_rows_have_their_own_last_steps():
    order = RestoreOrder(4, 3)
    order.end_step(rows=[0, 1], slots=[2])
    order.end_step(rows=[1], slots=[3])
    assert order.newest([2], [2]) == 1
    assert order.newest([-2], [0]) == 1
    assert order.newest([-2, 2], [2, 1]) == 2
    assert order.newest([-2], [2]) == 0
    order.end_all()
    assert order.newest([0], [2]) == order.newest([], [2]) == 3


def test_slot_zero_has_its_last_step_and_nothing_has_none():
    order = RestoreOrder(2, 2)
    order.end_step(rows=[], slots=[0])
    assert order.newest([0], []) == 1
    assert order.newest([], []) == 0


def test_a_step_may_end_before_anything_was_restored(context):
    recorder = Recorder()
    SideStream(context.slot_allocator, context.config, recorder).end_step()
    assert recorder.steps == 1


def test_all_may_be_scrubbed_and_reset_before_anything_was_restored(context):
    context.scrub()
    context.reset()
    add(context, "only", [3] * 5)
    run_step(context)
    context.check_invariants()


def test_a_restore_waits_for_its_own_steps_and_for_no_later_one(context, streams):
    prompt = list(range(2, 13)) * 2
    add(context, "first", prompt)
    run_step(context)
    saved_at = streams.steps
    for _ in range(3):
        run_step(context)
    # Its row was never used; the step that saved its state is four steps back.
    assert add(context, "hit", [*prompt, 1]).skip_tokens == 2 * BLOCK
    wanted = uncached([*prompt, 1], 1)[1][0]
    logits, _ = run_step(context)["hit"]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-9)
    assert streams.waits[-1] == saved_at < streams.steps - 3


def test_a_row_is_restored_after_the_step_that_used_it_last(context, streams):
    for step in range(3):
        add(context, step, [3 + step] * 5)
        run_step(context)
        context.finish(step)
        assert streams.waits[-1] == streams.steps - 1


@pytest.mark.parametrize("ends", ["parent", "fork"])
def test_a_row_is_restored_after_the_fork_that_used_it_last(context, streams, ends):
    """The copy reads one row and writes the other."""
    add(context, "parent", [3] * 5)
    run_step(context)
    context.fork("parent", ["fork"])
    forked_at = streams.steps
    context.finish(ends)
    add(context, "next", [4] * 5)
    run_step(context)
    assert streams.waits[-1] == forked_at == streams.steps - 1


def test_a_fork_after_the_embedder_has_moved_states_counts_for_all(context, streams):
    add(context, "parent", [3] * 5)
    run_step(context)
    context.slot_allocator.restore_slots([-2], [3])
    context.fork("parent", ["fork"])
    moved_at = streams.steps
    context.finish("parent")
    for row in range(3):
        add(context, row, [4 + row] * 5)
    run_step(context)
    assert streams.waits[-1] == moved_at


def test_an_aborted_step_counts(context, streams):
    add(context, "aborted", [3] * 5)
    context.begin_step()
    context.abort_step()
    context.resume_request("aborted")
    before = streams.steps
    context.begin_step()
    assert streams.waits[-1] == before


@pytest.mark.parametrize("what", ["store", "reset", "scrub"])
def test_what_is_written_beside_the_steps_is_waited_for(context, streams, what):
    add(context, "before", [4] * 9)
    run_step(context)
    before = streams.steps
    if what == "store":
        context.slot_allocator.copy_live_to_slots([0], [5])
    elif what == "scrub":
        context.scrub()
    else:
        context.reset()
    add(context, "after", [3] * 5)
    context.begin_step()
    assert streams.waits[-1] == streams.steps > before


def test_what_was_copied_before_the_first_step_is_waited_for(context, streams):
    context.slot_allocator.copy_live_to_slots([0], [5])
    add(context, "first", [3] * 5)
    context.begin_step()
    assert streams.waits == [streams.steps] == [1]


@pytest.mark.parametrize("aborts", [False, True])
def test_what_an_embedder_copies_during_a_step_is_waited_for(context, streams, aborts):
    add(context, "before", [4] * 9)
    MODEL.forward(context.begin_step().metadata, context)
    context.slot_allocator.copy_live_to_slots([1], [5])
    if aborts:
        context.abort_step()
        context.finish("before")
        add(context, "row 0", [5] * 9)
    else:
        context.commit_step({"before": 1})
    for _ in range(2):
        run_step(context)
    copied_at = streams.steps - 2
    add(context, "row 1", [3] * 5)
    context.begin_step()
    assert streams.waits[-1] == copied_at


def test_a_copy_is_waited_for_although_a_step_without_restores_followed(context, streams):
    add(context, "before", [4] * 9)
    run_step(context)
    context.slot_allocator.copy_live_to_slots([1], [5])
    run_step(context)
    copied_at = streams.steps
    run_step(context)
    add(context, "row 1", [3] * 5)
    context.begin_step()
    assert streams.waits[-1] == copied_at


def test_steps_that_are_forgotten_count_as_the_oldest_remembered(context, streams):
    prompt = list(range(1, 9)) * 2
    add(context, "first", prompt)
    run_step(context)
    for _ in range(2 * STEPS_REMEMBERED):
        run_step(context)
    add(context, "hit", [*prompt, 1])
    context.begin_step()
    assert streams.waits[-1] == streams.steps - STEPS_REMEMBERED + 1


def test_a_step_without_restores_waits_for_nothing(context, streams):
    add(context, "only", [3] * 5)
    run_step(context)
    waits = len(streams.waits)
    run_step(context)
    assert len(streams.waits) == waits
