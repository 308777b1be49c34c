"""Contexts whose calls are interrupted by an exception, and checks of their state afterwards."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import pytest
import torch
from context_rig import (
    BLOCK,
    MODEL,
    UncachedRuns,
    add,
    generate,
    make_config,
    make_context,
    run_step,
)
from fingerprints import frozen
from slot_rig import LastUsedPolicy

import mamba_cache
from mamba_cache.cache import MegatronPlacement
from mamba_cache.context import RequestStatus
from mamba_cache.errors import PoisonedError, StepOrderError, UnknownRequestError
from mamba_cache.reference import verify_greedy_on_device

SHARED = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
OTHER = [(5 * i + 1) % 13 for i in range(2 * BLOCK + 3)]
BRANCH = [*SHARED[: 2 * BLOCK], 7, 7, *SHARED[:BLOCK]]
FORKS = ("fork", "other fork")
UNCACHED = UncachedRuns()
NUM_DRAFTS = 2


class Placement:
    """Megatron's placement, as an object whose method can be replaced."""

    def positions(self, facts):
        return MegatronPlacement().positions(facts)


def make_busy(**changes):
    """A context with small pools: cached prefixes, and decoding, prefilling, preempted requests."""
    config = make_config(num_kv_blocks=13, max_slots=4, max_tokens=64, **changes)
    context = make_context(config, placement=Placement(), slot_policy=LastUsedPolicy())
    for filler in range(3):
        generate(context, [filler] * (2 * BLOCK + 1), 1)
    generate(context, SHARED, 1)
    add(context, "preempted", OTHER)
    run_step(context)
    context.preempt("preempted")
    add(context, "prefilling", BRANCH, chunk_tokens=2 * BLOCK + 1)
    run_step(context)
    add(context, "decoding", OTHER[: 2 * BLOCK - 1])
    run_step(context)
    return context


def begin(context):
    """Begin and compute a step of all requests; return the tokens to commit."""
    step = context.begin_step()
    logits = MODEL.forward(step.metadata, context)
    pairs = zip(step.requests, logits, strict=True)
    return {r.request_id: int(row.argmax()) for r, row in pairs if r.samples}


def begin_with_drafts(context):
    """Begin and compute a step whose drafts are verified on the device only."""
    drafts = torch.full((4, NUM_DRAFTS), OTHER[2 * BLOCK - 1])
    step = context.begin_step(drafts=drafts)
    logits = MODEL.forward(step.metadata, context)
    return verify_greedy_on_device(logits, step.metadata, drafts)


def commit_on_device(context):
    schedule_all(context)
    context.commit_step(begin_with_drafts(context))


@dataclass
class Call:
    """A call to interrupt, with the result of the calls before it."""

    run: Callable
    before: Callable = lambda context: None
    num_drafts: int = 0


def add_sharing(context):
    add(context, "new", [*SHARED, 1, 2], checkpoint_positions=[BLOCK])


def schedule_all(context):
    add_sharing(context)
    context.schedule_prefill("prefilling", chunk_tokens=BLOCK)


def begin_all(context):
    schedule_all(context)
    return begin(context)


def fork(context):
    """Fork a request whose last token completes a block; one fork has another last token."""
    [token] = context.output("decoding")
    context.fork("decoding", FORKS, last_tokens=[token, (token + 1) % 13])


CALLS = {
    "add_request": Call(lambda context, _: add_sharing(context)),
    "resume_request": Call(lambda context, _: context.resume_request("preempted")),
    "schedule_prefill": Call(lambda context, _: context.schedule_prefill("prefilling")),
    "begin_step": Call(lambda context, _: context.begin_step(), before=schedule_all),
    "commit_step": Call(
        lambda context, tokens: context.commit_step(tokens),
        before=begin_all,
    ),
    "abort_step": Call(
        lambda context, _: context.abort_step(),
        before=begin_all,
    ),
    "commit_step, with drafts possible": Call(
        lambda context, tokens: context.commit_step(tokens),
        before=begin_all,
        num_drafts=NUM_DRAFTS,
    ),
    "commit_step, on the device": Call(
        lambda context, sampled: context.commit_step(sampled),
        before=lambda context: (schedule_all(context), begin_with_drafts(context))[1],
        num_drafts=NUM_DRAFTS,
    ),
    "collect_step": Call(
        lambda context, _: context.collect_step(), before=commit_on_device, num_drafts=NUM_DRAFTS
    ),
    "fork": Call(lambda context, _: fork(context)),
    "fork, with drafts possible": Call(lambda context, _: fork(context), num_drafts=NUM_DRAFTS),
    "preempt": Call(lambda context, _: context.preempt("decoding")),
    "finish": Call(lambda context, _: context.finish("decoding")),
    "match": Call(lambda context, _: context.match(context.prepare(probe()))),
    "reset": Call(lambda context, _: context.reset(), before=begin),
    "reset_requests": Call(
        lambda context, _: context.reset(preserve_prefix_cache=True), before=begin
    ),
}


def probe():
    return mamba_cache.Request(request_id="probe", prompt_tokens=SHARED)


class Outcome(Enum):
    UNCHANGED = "as if not called"
    DONE = "as if ended"
    TAKEN_BACK = "taken back"
    POISONED = "poisoned"


class Survey:
    """Injects an error at each moment of a call, and checks the state afterwards.

    Only a new state is driven to the end; an equal state was checked before.
    """

    def __init__(self, call, injector):
        self.call, self.injector = call, injector
        self.outcomes = Counter()
        context, given = self._prepare()
        self.proved = {frozen(context): Outcome.UNCHANGED}
        with injector(context, 0) as counting:
            call.run(context, given)
        self.num_moments = counting.count
        self.proved.setdefault(frozen(context), Outcome.DONE)

    def inject(self, index):
        """Raise the injector's error at one moment of the call; check the state afterwards."""
        context, given = self._prepare()
        injected = self.injector(context, index)
        try:
            with injected:
                self.call.run(context, given)
        except self.injector.error:
            pass
        assert injected.where, f"there is no moment {index}"
        try:
            outcome = self._judge(context)
        except Exception as failure:
            raise AssertionError(f"moment {index}: {injected.where}") from failure
        self.outcomes[outcome] += 1
        return outcome

    def _prepare(self):
        context = make_busy(num_speculative_tokens=self.call.num_drafts)
        return context, self.call.before(context)

    def _judge(self, context):
        try:
            context.match(probe())
        except PoisonedError:
            check_healing(context)
            return Outcome.POISONED
        context.check_invariants()
        state = frozen(context)
        if state not in self.proved:
            drive_to_the_end(context)
            self.proved[state] = Outcome.TAKEN_BACK
        return self.proved[state]


def check_healing(context):
    """A poisoned context refuses all calls except reset, which restores a new context's state."""
    for call in (
        context.begin_step,
        lambda: context.commit_step({}),
        context.abort_step,
        lambda: context.finish("decoding"),
        lambda: context.status("decoding"),
        lambda: context.reset(preserve_prefix_cache=True),
    ):
        with pytest.raises(PoisonedError, match=r"reset\(\) makes everything new"):
            call()
    context.reset()
    context.check_invariants()
    check_tokens(SHARED, generate(context, SHARED, 2)[0])
    assert context.stats().used_blocks == context.stats().reserved_slots == 0


def drive_to_the_end(context):
    """Run every request to its end from any state; answers must equal uncached runs."""
    prompts = {
        **dict.fromkeys(FORKS, OTHER[: 2 * BLOCK - 1]),  # first: they hold rows that others need
        "new": [*SHARED, 1, 2],
        "preempted": OTHER,
        "prefilling": BRANCH,
        "decoding": OTHER[: 2 * BLOCK - 1],
    }
    with suppress(StepOrderError):  # no step may be in flight
        context.abort_step()
    with suppress(StepOrderError):  # no step may be uncollected
        context.collect_step()
    for request_id, prompt in prompts.items():
        for _ in range(6):
            try:
                status = context.status(request_id)
            except UnknownRequestError:
                break  # not added yet, or finished
            if status is RequestStatus.PREEMPTED:
                context.resume_request(request_id)
            elif status is RequestStatus.PREFILLING:
                context.schedule_prefill(request_id)
            run_step(context)
        else:
            tokens = context.finish(request_id)
            given = 1 if request_id in FORKS else 0
            check_tokens([*prompt, *tokens[:given]], tokens[given:])
        context.check_invariants()
    for prompt in prompts.values():
        check_tokens(prompt, generate(context, prompt, 2)[0])
    context.check_invariants()
    assert context.stats().used_blocks == context.stats().reserved_slots == 0


def check_tokens(prompt, tokens):
    expected = [int(UNCACHED.logits(tuple(prompt), i).argmax()) for i in range(len(tokens))]
    assert tokens == expected, f"{tokens}, but an uncached run gives {expected}"
