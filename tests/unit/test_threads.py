"""One thread at a time uses a context; any thread may read its statistics."""

import threading

import pytest
from context_rig import BLOCK, add, make_context, run_step

from mamba_cache import DynamicInferenceContext, Request
from mamba_cache.errors import ConcurrentUseError

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]

CALLS = {
    "match": lambda context: context.match(context.prepare(_request("y"))),
    "add_request": lambda context: context.add_request(_request("y")),
    "begin_step": DynamicInferenceContext.begin_step,
    "commit_step": lambda context: context.commit_step({}),
    "abort_step": DynamicInferenceContext.abort_step,
    "preempt": lambda context: context.preempt("x"),
    "finish": lambda context: context.finish("x"),
    "status": lambda context: context.status("x"),
    "reset_requests": lambda context: context.reset(preserve_prefix_cache=True),
    "reset_everything": DynamicInferenceContext.reset,
}


def _request(name):
    return Request(request_id=name, prompt_tokens=PROMPT)


class Halting:
    """A placement in whose call the context's thread stands still until it is let go."""

    def __init__(self):
        self.entered, self.go_on = threading.Event(), threading.Event()

    def positions(self, facts):
        self.entered.set()
        self.go_on.wait()
        return ()


@pytest.fixture
def halted():
    """A context in the middle of another thread's ``add_request``, and what lets that end."""
    placement = Halting()
    context = make_context(placement=placement)

    def enter():
        try:
            add(context, "x", PROMPT)
        finally:
            placement.entered.set()  # should it fail before: nobody waits for it then

    def go_on():
        placement.go_on.set()
        thread.join()

    thread = threading.Thread(target=enter)
    thread.start()
    placement.entered.wait()
    yield context, go_on
    go_on()


def test_calls_while_another_thread_is_in_one_are_refused_and_do_not_disturb_it(halted):
    context, go_on = halted
    for name, call in CALLS.items():
        with pytest.raises(ConcurrentUseError, match=f"{name} was called by another thread"):
            call(context)
    # Statistics and preparation are for any thread.
    assert context.stats().requests == 0
    assert len(context.prepare(_request("y")).hashes) == 3
    go_on()
    assert [request.request_id for request in context.begin_step().requests] == ["x"]
    context.check_invariants()


def test_a_context_may_move_to_another_thread_between_calls():
    context = make_context()
    add(context, "x", PROMPT)
    tokens = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: tokens.append(run_step(context)["x"][1]))
        thread.start()
        thread.join()
    assert context.finish("x") == tokens
    context.check_invariants()


def test_a_callback_does_not_call_the_context():
    class Meddling:
        def positions(self, facts):
            context.finish("x")

    context = make_context(placement=Meddling())
    with pytest.raises(ConcurrentUseError, match="finish was called from within it while add_req"):
        add(context, "x", PROMPT)
    context.check_invariants()
    assert context.stats().used_blocks == context.stats().reserved_slots == 0
    with pytest.raises(ConcurrentUseError):  # and the context is not poisoned by it
        add(context, "x", PROMPT)
