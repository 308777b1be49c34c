"""Contexts that are interrupted in the middle of a call, and what is expected of them then."""

import os
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import cycle
from pathlib import Path

import numpy as np
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

import mamba_cache
from mamba_cache.context import RequestStatus
from mamba_cache.errors import PoisonedError, StepOrderError, UnknownRequestError
from mamba_cache.slots import ConsumedSlotPolicy, MegatronPlacement

PACKAGE = str(Path(mamba_cache.__file__).parent) + os.sep
SHARED = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
OTHER = [(5 * i + 1) % 13 for i in range(2 * BLOCK + 3)]
BRANCH = [*SHARED[: 2 * BLOCK], 7, 7, *SHARED[:BLOCK]]
UNCACHED = UncachedRuns()


class Injector:
    """Raises its error at one moment of a call, and counts the moments."""

    error: type[BaseException] = KeyboardInterrupt

    def __init__(self, context, index):
        self.context, self.index = context, index
        self.count = 0
        self.where = ""

    def pass_moment(self, where):
        """Raises if this is the moment."""
        self.count += 1
        if self.count == self.index:
            self.where = where
            raise self.error("injected")


class Interrupt(Injector):
    """A moment is before each instruction that the package executes."""

    def __enter__(self):
        self._previous = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._previous)

    def _trace(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            file = code.co_filename.removeprefix(PACKAGE)
            self.pass_moment(f"{file}:{frame.f_lineno}, {code.co_name}+{frame.f_lasti}")
        return self._trace


class _Patching(Injector):
    """A moment is each call of certain functions."""

    def functions(self):
        """Yields (owner, name of one of its functions)."""
        raise NotImplementedError

    def __enter__(self):
        self._patches = []
        for owner, name in self.functions():
            found = vars(owner).get(name)
            self._patches.append((owner, name, found))
            setattr(owner, name, self._watched(name, getattr(owner, name)))
        return self

    def __exit__(self, *_):
        for owner, name, found in self._patches:
            if found is None:
                delattr(owner, name)
            else:
                setattr(owner, name, found)

    def _watched(self, name, function):
        def run(*args, **kwargs):
            self.pass_moment(name)
            return function(*args, **kwargs)

        return run


class OutOfMemory(_Patching):
    """A moment is each call of a function that makes an array or a tensor."""

    error = torch.OutOfMemoryError

    def functions(self):
        for name in (
            "arange", "array", "asarray", "ascontiguousarray", "concatenate", "cumsum", "empty",
            "flatnonzero", "frombuffer", "fromiter", "full", "repeat", "zeros",
        ):  # fmt: skip
            yield np, name
        for name in ("empty", "full", "tensor", "zeros"):
            yield torch, name


class Broken(_Patching):
    """A moment is each launch, and each call of what an embedder can bring along."""

    error = OSError

    def functions(self):
        slots = self.context.slot_allocator
        for name in ("restore_slots", "copy_live_to_slots"):
            yield slots, name
        yield self.context.step_buffers, "fill"
        for name in ("choose", "on_stored", "on_consumed"):
            yield slots.policy, name
        yield self.context._planner._placement, "positions"
        yield self.context.kv_block_allocator, "on_blocks_deregistered"


INJECTORS = {
    "an interrupt before an instruction": Interrupt,
    "no memory for an array or tensor": OutOfMemory,
    "an exception in a launch or callback": Broken,
}


class Policy(ConsumedSlotPolicy):
    """A policy whose methods can be replaced: it has no ``__slots__``."""


class Placement:
    """Megatron's, as an object whose method can be replaced."""

    def positions(self, facts):
        return MegatronPlacement().positions(facts)


def make_busy():
    """Small pools with something in every state: cached, decoding, between chunks, preempted."""
    config = make_config(num_kv_blocks=13, max_slots=4, max_tokens=64)
    context = make_context(config, placement=Placement(), slot_policy=Policy())
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
    """Begins the step of all; returns the tokens that end it."""
    step = context.begin_step()
    logits = MODEL.forward(step.metadata, context)
    pairs = zip(step.requests, logits, strict=True)
    return {r.request_id: int(row.argmax()) for r, row in pairs if r.samples}


@dataclass
class Call:
    """A call to break off, given what the calls before it returned."""

    run: Callable
    before: Callable = lambda context: None


def add_sharing(context):
    add(context, "new", [*SHARED, 1, 2], checkpoint_positions=[BLOCK])


def schedule_all(context):
    add_sharing(context)
    context.schedule_prefill("prefilling", chunk_tokens=BLOCK)


CALLS = {
    "add_request": Call(lambda context, _: add_sharing(context)),
    "resume_request": Call(lambda context, _: context.resume_request("preempted")),
    "schedule_prefill": Call(lambda context, _: context.schedule_prefill("prefilling")),
    "begin_step": Call(lambda context, _: context.begin_step(), before=schedule_all),
    "commit_step": Call(
        lambda context, tokens: context.commit_step(tokens),
        before=lambda context: (schedule_all(context), begin(context))[1],
    ),
    "abort_step": Call(
        lambda context, _: context.abort_step(),
        before=lambda context: (schedule_all(context), begin(context))[1],
    ),
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
    OTHER = "requests preempted"
    POISONED = "poisoned"


class Survey:
    """Injects an error into a call again and again, and proves what comes of it.

    It is compared with the states that have been driven to the end before, so that only new ones
    are.
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
        """Raises the injector's error at one moment of the call; all must be well afterwards."""
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
        context = make_busy()
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
            self.proved[state] = Outcome.OTHER
        return self.proved[state]


def check_healing(context):
    """A poisoned context refuses everything but reset, which makes it what a new one is."""
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
    """Brings every request on, whatever its state; all answers are those of uncached runs."""
    prompts = {
        "new": [*SHARED, 1, 2],
        "preempted": OTHER,
        "prefilling": BRANCH,
        "decoding": OTHER[: 2 * BLOCK - 1],
    }
    with suppress(StepOrderError):  # there may be none in flight
        context.abort_step()
    for request_id, prompt in prompts.items():
        for _ in range(6):
            try:
                status = context.status(request_id)
            except UnknownRequestError:
                break  # it was not added yet, or was finished
            if status is RequestStatus.PREEMPTED:
                context.resume_request(request_id)
            elif status is RequestStatus.PREFILLING:
                context.schedule_prefill(request_id)
            run_step(context)
        else:
            check_tokens(prompt, context.finish(request_id))
        context.check_invariants()
    for prompt in prompts.values():
        check_tokens(prompt, generate(context, prompt, 2)[0])
    context.check_invariants()
    assert context.stats().used_blocks == context.stats().reserved_slots == 0


def check_tokens(prompt, tokens):
    wanted = [int(UNCACHED.logits(tuple(prompt), i).argmax()) for i in range(len(tokens))]
    assert tokens == wanted, f"{tokens} where an uncached run gives {wanted}"


_SKIPPED = ("_check", "_guard", "transfers", "_transfers", "_hasher", "_maker", "_host_buffers")


def frozen(thing, seen=None):
    """All that an object of the package remembers, as one value that compares with ``==``."""
    seen = {} if seen is None else seen
    if thing is None or isinstance(thing, (int, float, str, bytes, Enum, type)):
        return thing
    if id(thing) in seen:
        return ("seen", seen[id(thing)])
    seen[id(thing)] = len(seen)
    if isinstance(thing, torch.Tensor):
        return _bits(thing.detach().cpu())
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if isinstance(thing, memoryview):
        return thing.tobytes()
    if isinstance(thing, (dict, OrderedDict, Counter)):
        return tuple((frozen(k, seen), frozen(v, seen)) for k, v in thing.items())
    if isinstance(thing, (list, tuple, deque)):
        return tuple(frozen(item, seen) for item in thing)
    if isinstance(thing, (set, frozenset)):
        return tuple(sorted(map(repr, thing)))
    if isinstance(thing, cycle) or not type(thing).__module__.startswith(("mamba_cache", __name__)):
        return type(thing).__name__
    names = [*getattr(thing, "__dict__", ())]
    for kind in type(thing).__mro__:
        names += getattr(kind, "__slots__", ())
    return tuple(
        (name, frozen(getattr(thing, name, None), seen)) for name in names if name not in _SKIPPED
    )


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
