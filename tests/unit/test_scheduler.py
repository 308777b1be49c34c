"""The scheduler: shared prefixes, waiting, room for requests and chunks, forks, faults."""

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from engine_rig import BLOCK, MODEL, draw_prompt, greedy, make_engine, step_checked

from mamba_cache.context import Admission, Request, RequestStatus
from mamba_cache.context.scheduler import QueuedRequest, Scheduler, common_blocks
from mamba_cache.errors import BlockCapacityError, UnknownRequestError
from mamba_cache.integrations.transformers.batching.answers import BatchRequest


@pytest.fixture
def scheduler():
    """Return the scheduler of an engine."""
    return make_engine(max_wait_steps=1)._scheduler


@pytest.fixture
def make(scheduler):
    """Return a function that queues a request."""
    numbers = count()

    def queue(prompt):
        prepared = scheduler._context.prepare(
            Request(request_id=next(numbers), prompt_tokens=prompt)
        )
        request = QueuedRequest(prepared=prepared, reusable_blocks=(len(prompt) - 1) // BLOCK)
        scheduler.add(request)
        return request

    return queue


@pytest.mark.parametrize("common", range(0, 50, 7))
def test_common_blocks_are_those_of_the_common_prefix(make, rng, common):
    root = draw_prompt(rng, 50)
    one = make(root)
    other = make([*root[:common], (root[common] + 1) % 256, *draw_prompt(rng, 9)])
    assert common_blocks(one, other) == common_blocks(other, one) == common // BLOCK
    same, longer = make(root[: 3 * BLOCK]), make([*root[: 3 * BLOCK], 1])
    assert common_blocks(same, same) == 2  # the block of the last token is computed anyway
    assert common_blocks(longer, same) == 3


def test_branch_positions_lie_ahead_and_are_reported_once(scheduler, make, rng):
    root = draw_prompt(rng, 6 * BLOCK)
    request = make(root)
    for number in (0, 1, 3, 3, 6):
        make([*root[: number * BLOCK], 0, 1])
    found = scheduler._branches_off(request, BLOCK)
    assert found == [3 * BLOCK, 6 * BLOCK]
    request.branch_positions.update(found[:1])
    assert scheduler._branches_off(request, BLOCK) == [6 * BLOCK]


@pytest.mark.parametrize(
    ("skip_blocks", "computed", "promised", "scheduled", "expected"),
    [
        (0, 0, True, True, True),
        (0, 3 * BLOCK - 1, True, True, True),
        (0, 3 * BLOCK, True, True, False),  # already computed: its states can be matched now
        (2, 0, True, True, True),
        (3, 0, True, True, False),  # nothing to gain
        (0, 0, False, True, False),  # no state will be saved there
        (0, 0, True, False, False),  # no state will be saved in this step
    ],
)
def test_waiting_is_for_a_state_that_will_be_saved_farther_on(
    scheduler, make, rng, monkeypatch, skip_blocks, computed, promised, scheduled, expected
):
    root = draw_prompt(rng, 3 * BLOCK)
    request, other = make([*root, 1, 2]), make([*root, 3, 4])
    other.branch_positions = {3 * BLOCK} if promised else {2 * BLOCK}
    table = SimpleNamespace(
        num_computed=np.array([computed]), find=lambda _: SimpleNamespace(row=0)
    )
    status = RequestStatus.SCHEDULED if scheduled else RequestStatus.DECODING
    context = SimpleNamespace(request_table=table, statuses=lambda: {other.key: status})
    monkeypatch.setattr(scheduler, "_context", context)
    for each in (request, other):
        scheduler.add(each)
    assert scheduler._waits(request, skip_blocks * BLOCK) is expected


def test_the_cached_tokens_at_a_requests_first_run_are_reported(rng):
    engine = make_engine()
    request = engine._scheduler.find(engine.submit(draw_prompt(rng, 20), greedy(4)))
    first, resumed = (
        Admission(
            prompt_tokens=20,
            block_ids=(0,) * n,
            state_matched_blocks=n,
            skip_tokens=n * BLOCK,
            miss_reason=None,
            request_id="x",
            chunk_tokens=12,
        )
        for n in (1, 2)
    )
    request.note_admission(first)
    request.prefill_tokens = 12
    request.note_admission(resumed)
    assert request.admission == first


def shared_prompts(rng, count, *, root_blocks):
    root = draw_prompt(rng, root_blocks * BLOCK)
    return [[*root, *draw_prompt(rng, 5)] for _ in range(count)]


def num_running(engine):
    return engine.context.stats().requests


def submit_two(engine, rng, *, root_blocks=6):
    for name, prompt in zip("ab", shared_prompts(rng, 2, root_blocks=root_blocks), strict=True):
        engine.submit(prompt, greedy(3), request_id=name)


def test_waiting_ends_after_max_wait_steps(rng):
    engine = make_engine(max_tokens=2 * BLOCK + 3, max_wait_steps=2)
    submit_two(engine, rng, root_blocks=20)
    for _ in range(2):
        step_checked(engine)
        assert num_running(engine) == 1
    step_checked(engine)
    assert num_running(engine) == 2


@pytest.mark.parametrize("switch", ["max_wait_steps", "max_slots"])
def test_no_request_waits_if_waiting_is_off_or_no_state_can_be_saved(rng, switch):
    engine = make_engine(max_tokens=128, **{switch: 0})
    submit_two(engine, rng)
    step_checked(engine)
    assert num_running(engine) == 2


def test_other_requests_overtake_a_waiting_one(rng):
    engine = make_engine(max_tokens=4 * BLOCK, max_requests=2)
    submit_two(engine, rng, root_blocks=3)
    engine.submit(draw_prompt(rng, 3), greedy(1), request_id="other")
    ends = [event.request_id for event in step_checked(engine) if event.completion]
    assert ends == ["other"]
    assert num_running(engine) == 2


def test_a_state_is_saved_where_queued_prompts_branch(rng):
    engine, root = make_engine(), draw_prompt(rng, 3 * BLOCK)
    prompts = [[*root, *draw_prompt(rng, length)] for length in (2 * BLOCK, 5)]
    skipped = [each.skipped_tokens for each in engine.generate(prompts, greedy(2))]
    assert skipped == [0, 3 * BLOCK]


# The scheduler by itself, without the engine.


class Steps:
    """A scheduler and its requests; every sampling request samples token 7."""

    def __init__(self, *, max_wait_steps=0, find=None, limit=8, **changes):
        self.context = make_engine(**changes).context
        self.scheduler = Scheduler(self.context, max_wait_steps=max_wait_steps, find=find)
        self.scheduler.max_requests = limit

    def add(self, name, prompt, **fields):
        prepared = self.context.prepare(Request(request_id=name, prompt_tokens=prompt))
        request = QueuedRequest(prepared=prepared, reusable_blocks=0, **fields)
        self.scheduler.add(request)
        return request

    def run(self):
        """Run one step; return the number of computed tokens by request."""
        step = self.scheduler.begin_step()
        if step is None:
            return {}
        MODEL.forward(step.metadata, self.context)
        self.context.commit_step([7 for one in step.requests if one.samples])
        self.context.check_invariants()
        return {one.request_id: one.num_tokens for one in step.requests}


def test_limits_on_requests_and_on_tokens_of_prompts(rng):
    steps = Steps()
    steps.scheduler.max_chunk_tokens, steps.scheduler.max_requests = 3 * BLOCK, 2
    for name, length in (("a", 5), ("b", 4 * BLOCK), ("c", 5)):
        steps.add(name, draw_prompt(rng, length))
    assert steps.run() == {"a": 5, "b": 2 * BLOCK}
    assert steps.run() == {"a": 1, "b": 2 * BLOCK}
    assert steps.run() == {"a": 1, "b": 1}
    steps.scheduler.remove("a")
    assert steps.run() == {"b": 1, "c": 5}
    assert steps.scheduler.is_steady


def test_a_last_chunk_has_as_many_tokens_as_must_be_computed(rng):
    steps = Steps(max_tokens=16, min_computed_tokens=3)
    steps.add("a", draw_prompt(rng, 17))
    assert steps.run() == {"a": 14}
    assert steps.run() == {"a": 3}
    steps.scheduler.remove("a")
    steps.add("b", draw_prompt(rng, 15))
    steps.scheduler.max_chunk_tokens = 15
    assert steps.run() == {"b": 15}
    steps.scheduler.remove("b")
    steps.add("c", draw_prompt(rng, 19))
    assert steps.run() == {"c": BLOCK}


def test_chunks_end_at_the_blocks_end_that_they_reach(rng):
    steps = Steps()
    steps.scheduler.max_chunk_tokens = BLOCK - 1
    steps.add("a", draw_prompt(rng, 2 * BLOCK + 2))
    assert [steps.run()["a"] for _ in range(4)] == [BLOCK - 1, 1, BLOCK - 1, 3]


def test_all_are_preempted_after_a_fault_and_go_on(rng):
    """A prompt between two chunks is preempted too: a forward may have changed its live state."""
    steps = Steps(max_tokens=2 * BLOCK)
    steps.add("a", draw_prompt(rng, 5))
    steps.run()
    steps.add("b", draw_prompt(rng, 4 * BLOCK))
    steps.run()
    steps.scheduler.max_chunk_tokens = 0  # the next step computes no chunk of "b"
    assert steps.context.status("b") is RequestStatus.PREFILLING
    assert [one.request_id for one in steps.scheduler.begin_step().requests] == ["a"]
    steps.scheduler.preempt_all()
    assert set(steps.context.statuses().values()) == {RequestStatus.PREEMPTED}
    steps.scheduler.max_chunk_tokens = 2 * BLOCK
    assert [*steps.context.output("a")] == [7, 7]
    assert steps.run()["a"] == 7
    while not steps.scheduler.is_steady:
        assert steps.run()
    assert len(steps.context.output("a")) > 2


def test_in_lockstep_requests_decode_without_prompts(rng):
    found = []
    steps = Steps(find=lambda request: found.append(request) or 0)
    requests = [steps.add("a", draw_prompt(rng, 5))]
    steps.run()
    steps.scheduler.is_lockstep = True
    requests.append(steps.add("b", draw_prompt(rng, 5)))
    assert steps.run() == {"b": 5}
    assert steps.run() == {"a": 1, "b": 1}
    assert found == requests


def test_a_step_may_leave_out_some_that_decode(rng):
    steps = Steps()
    for name in "ab":
        steps.add(name, draw_prompt(rng, 5))
    steps.run()
    assert steps.scheduler.begin_step(leaves_out=["a", "b"]) is None
    steps.add("c", draw_prompt(rng, 5))
    step = steps.scheduler.begin_step(leaves_out=["a"])
    assert [one.request_id for one in step.requests] == ["b", "c"]


def test_requests_left_in_the_context_by_an_interrupt_are_ended(rng):
    steps = Steps()
    steps.add("a", draw_prompt(rng, 5))
    steps.run()
    steps.scheduler.reset()
    steps.scheduler.recover()
    assert steps.context.statuses() == {}
    with pytest.raises(UnknownRequestError):
        steps.scheduler.remove("a")


def test_a_request_keeps_its_place_under_a_new_id(rng):
    steps = Steps()
    _, first, _ = [steps.add(name, draw_prompt(rng, 5)) for name in "zab"]
    steps.run()
    steps.context.fork("a", ["c"])
    steps.context.finish("a")
    first.prepared = steps.context.prepare(
        Request(request_id="c", prompt_tokens=first.prepared.tokens)
    )
    steps.scheduler.rename("a", first)
    assert steps.scheduler.find("c") is first
    assert steps.run() == {"z": 1, "b": 1, "c": 1}
    steps.scheduler._make_room(first, BlockCapacityError(1, 0, "no block"))
    assert steps.context.status("b") is RequestStatus.PREEMPTED  # the younger one


def test_the_error_of_a_request_that_does_not_fit_has_its_callers_name(rng):
    """Regression: a batch's request was named by the context's number."""
    steps = Steps()
    prepared = steps.context.prepare(Request(request_id=17, prompt_tokens=draw_prompt(rng, 5)))
    request = BatchRequest(
        prepared=prepared, reusable_blocks=0, request_id="req_0", settings=None, seed=0
    )
    steps.scheduler.add(request)
    steps.scheduler._make_room(request, BlockCapacityError(1, 0, "no block"))
    assert str(request.error).endswith("request 'req_0' does not fit even alone")
    assert (request.error.required, request.error.available) == (1, 0)


def test_requests_that_wait_cost_nothing_while_all_places_are_taken(rng, monkeypatch):
    steps = Steps()
    steps.scheduler.max_requests = 1
    for name in "abc":
        steps.add(name, draw_prompt(rng, 5))
    steps.run()
    monkeypatch.setattr(steps.scheduler, "_queued", lambda: pytest.fail("they are looked at"))
    assert steps.run() == {"a": 1}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["b", "c", "d"]),
        ({"max_requests": 3}, ["b", "c"]),
        ({"limit": 3}, ["b", "c"]),
        ({"num_kv_blocks": 4}, ["b", "c"]),  # each copies the unfinished block
        ({"num_kv_blocks": 2}, []),
        ({"max_requests": 1}, []),
        ({"max_tokens": 3}, ["b", "c"]),
    ],
)
def test_as_many_forks_as_there_is_room_for(rng, changes, expected):
    steps = Steps(**changes)
    first = steps.add("a", draw_prompt(rng, BLOCK + 3))
    first.forks = [steps.add(name, first.prepared.tokens, fork_of=first) for name in "bcd"]
    left = BLOCK + 3
    while left:
        [(name, computed)] = steps.run().items()
        assert name == "a"  # its forks wait for its first token
        left -= computed
    forks = steps.scheduler.fork(first, lambda fork: ord(fork.key))
    assert [fork.key for fork in forks] == expected
    assert [[*steps.context.output(name)] for name in expected] == [[ord(n)] for n in expected]


def test_forks_of_a_request_that_failed_are_computed_by_themselves(rng):
    steps = Steps(num_kv_blocks=2)
    first = steps.add("a", draw_prompt(rng, 2 * BLOCK - 1))
    fork = steps.add("b", first.prepared.tokens, fork_of=first)
    assert steps.run() == {"a": 2 * BLOCK - 1}
    assert steps.run() == {"a": 1}
    assert steps.run() == {}
    assert steps.scheduler.failed == [first]
    assert "does not fit even alone" in str(first.error)
    assert [*steps.scheduler.output(first)] == [7, 7]
    steps.scheduler.remove("a")
    assert steps.run() == {"b": BLOCK - 1}  # the first block is matched
    assert steps.scheduler.find("b") is fork
