"""Contract 17: an exception in the middle of a change makes an object unusable until its reset."""

import signal
import sys
import threading

import pytest
from context_rig import (
    BLOCK,
    MODEL,
    add,
    assert_same_run,
    generate,
    make_context,
    run_step,
    uncached,
)
from engine_rig import SamplingParams, make_engine
from injectors import strike
from kv_rig import cache, prefix
from slot_rig import LastUsedPolicy, save

from mamba_cache._guard import CallGuard, _Ending, guarded, outside, query
from mamba_cache.cache import KVBlockAllocator, Rows, SlotPool
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.errors import (
    ConcurrentUseError,
    DoubleFreeError,
    InvalidArgumentError,
    PoisonedError,
)
from mamba_cache.events import Admitted, Removed, Stored
from mamba_cache.reference import engine as engine_module

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
OTHER = [(5 * i + 1) % 13 for i in range(2 * BLOCK + 3)]
FOREIGN = [OSError, MemoryError, KeyboardInterrupt]


class Thing:
    """An object with a guard."""

    def __init__(self, **hooks):
        self.num_healed = self.num_taken_back = 0
        self.broken = None
        methods = {name: getattr(self, method) for name, method in hooks.items()}
        self._guard = CallGuard(self, **methods)

    @guarded()
    def do(self, work, *, is_changing=True):
        self._guard.is_changing = is_changing
        return work()

    @guarded(nests=True, changes=True)
    def do_inside(self, work):
        return work()

    @guarded(waits=True)
    def do_in_turn(self, work):
        return work()

    @guarded(renews=True)
    def reset(self, work=lambda: None):
        with self._guard.ending(renews=True):
            work()

    @query
    def ask(self):
        return 7

    def heal(self):
        self.num_healed += 1
        self.reset_inside()

    @guarded(nests=True, renews=True)
    def reset_inside(self):
        with self._guard.ending(renews=True):
            if self.broken:
                raise self.broken

    def take_back(self):
        self.num_taken_back += 1
        if self.broken:
            raise self.broken


def raise_(error, during=None):
    if during is not None:
        try:
            raise during
        except type(during):
            raise error  # noqa: B904 - an error of the rollback
    raise error


@pytest.mark.parametrize("error", FOREIGN)
def test_a_foreign_exception_in_a_change_poisons_until_the_reset(error):
    thing = Thing()
    with pytest.raises(error):
        thing.do(lambda: raise_(error("struck")))
    for call in (lambda: thing.do(lambda: 5), thing.ask, lambda: thing.do_inside(lambda: 5)):
        with pytest.raises(PoisonedError, match=r"do broke off with .*; reset\(\) makes"):
            call()
    thing.reset()
    assert (thing.do(lambda: 5), thing.ask()) == (5, 7)


@pytest.mark.parametrize("error", FOREIGN)
def test_an_exception_outside_of_changes_does_not_poison(error):
    thing = Thing()

    def calls_back():
        with outside:
            raise error("struck")

    for work, is_changing in ((lambda: raise_(error("struck")), False), (calls_back, True)):
        with pytest.raises(error):
            thing.do(work, is_changing=is_changing)
        assert thing.do(lambda: 5) == 5


def test_the_packages_own_errors_do_not_poison():
    def translate():
        try:
            raise TypeError
        except TypeError as error:
            raise InvalidArgumentError("no") from error

    thing = Thing()
    for work in (lambda: raise_(InvalidArgumentError("no")), translate):
        with pytest.raises(InvalidArgumentError):
            thing.do(work)
        assert thing.do(lambda: 5) == 5


def test_one_that_strikes_while_a_foreign_exception_is_handled_is_not():
    thing = Thing()
    with pytest.raises(DoubleFreeError):
        thing.do(lambda: raise_(DoubleFreeError("twice"), OSError("disk")))
    with pytest.raises(PoisonedError, match="twice"):
        thing.do(lambda: 5)


def test_a_nested_call_is_a_change_of_its_own():
    """Code after the nested call, such as a model's forward, is outside of the change again."""
    thing = Thing()

    def compute():
        assert thing.do_inside(lambda: 5) == 5
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        thing.do(compute, is_changing=False)
    assert thing.ask() == 7
    with pytest.raises(KeyboardInterrupt):
        thing.do(lambda: thing.do_inside(lambda: raise_(KeyboardInterrupt())), is_changing=False)
    with pytest.raises(PoisonedError, match="do_inside broke off"):
        thing.ask()


@pytest.mark.parametrize("error", [OSError, InvalidArgumentError])
def test_a_reset_that_breaks_off_heals_nothing(error):
    thing = Thing()
    with pytest.raises(error):
        thing.reset(lambda: raise_(error("struck")))
    with pytest.raises(PoisonedError, match="reset broke off"):
        thing.do(lambda: 5)
    thing.reset()
    assert thing.do(lambda: 5) == 5


def test_the_holds_of_a_call_are_released_and_its_own_error_is_raised():
    thing = Thing(take_back="take_back")
    with pytest.raises(KeyboardInterrupt):
        thing.do(lambda: raise_(KeyboardInterrupt()), is_changing=False)
    assert thing.num_taken_back == 1
    assert thing.do(lambda: 5) == 5
    thing.broken = DoubleFreeError("twice")
    with pytest.raises(OSError, match="disk"):
        thing.do(lambda: raise_(OSError("disk")), is_changing=False)
    with pytest.raises(PoisonedError, match="twice"):
        thing.do(lambda: 5)


def test_a_call_from_within_is_refused_and_does_no_harm():
    thing = Thing()
    with pytest.raises(ConcurrentUseError, match="do was called from within it while do was"):
        thing.do(lambda: thing.do(lambda: 5))
    assert thing.do(thing.ask) == 7
    assert thing.do(lambda: 5) == 5


def test_a_call_of_another_thread_is_refused_or_waits():
    thing, entered, go_on, seen = Thing(), threading.Event(), threading.Event(), []

    def halt():
        entered.set()
        go_on.wait()

    threads = [threading.Thread(target=thing.do, args=(halt,))]
    threads[0].start()
    entered.wait()
    assert thing._guard.is_busy
    for call in (lambda: thing.do(lambda: 5), lambda: thing.do_inside(lambda: 5), thing.ask):
        with pytest.raises(ConcurrentUseError, match="by another thread while do was running"):
            call()
    threads.append(threading.Thread(target=thing.do_in_turn, args=(lambda: seen.append(1),)))
    threads[1].start()
    assert not seen
    go_on.set()
    for thread in threads:
        thread.join()
    assert seen == [1]
    assert not thing._guard.is_busy


# Objects with a guard.


def change(slots):
    """Call methods that change blocks and slots in every way."""
    blocks = slots.kv_blocks
    cached = cache(blocks, 5, 6)
    save(slots, *cached)
    blocks.retain_memory_blocks(cached)
    blocks.release_memory_blocks(cached)
    [slot] = slots.reserve_slots([7])
    slots.commit_reserved([slot], [7])
    blocks.deregister_blocks(cached[:1])
    slots.pin(slots.slot_of(7))


@pytest.mark.parametrize("error", FOREIGN)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((KVBlockAllocator, name) for name in ("_add_chain", "_count_cached", "_forget")),
        *((SlotPool, name) for name in ("_unassign", "_put")),
        *((Rows, name) for name in ("take", "push", "hold", "release")),
        *((LastUsedPolicy, name) for name in ("on_stored",)),
    ],
)
def test_a_change_of_blocks_and_slots_that_breaks_off(monkeypatch, owner, name, error):
    slots = SlotPool(2, KVBlockAllocator(9), policy=LastUsedPolicy())
    blocks = slots.kv_blocks
    with monkeypatch.context() as patch:
        strike(patch, owner, name, error)
        with pytest.raises(error):
            change(slots)
    broken = [pool for pool in (blocks, slots) if pool._guard.poison]
    assert broken
    for pool in broken:
        ask = pool.reserve_slots if pool is slots else pool.retain_memory_blocks
        for call in (lambda ask=ask: ask([3]), lambda pool=pool: PROBES[type(pool)](pool)):
            with pytest.raises(PoisonedError, match="broke off"):
                call()
        pool.reset()
    slots.reset()
    blocks.reset()
    change(slots)
    blocks.check_invariants()
    slots.check_invariants()


PROBES = {
    KVBlockAllocator: lambda pool: pool.match_prefix(prefix(1)),
    SlotPool: lambda pool: pool.get_slot(0),
}


def _request():
    return Request(request_id="probe", prompt_tokens=PROMPT)


# Code outside of changes: its exception takes a request or a step back and keeps the cache.


def warm():
    """Return a context with a cached prompt."""
    context = make_context()
    generate(context, PROMPT, 1)
    return context


def check_kept(context):
    """Assert that the cached prompt is found again and nothing is held."""
    hit = generate(context, PROMPT, 2, request_id="hit")
    assert hit[2].skip_tokens == 3 * BLOCK
    assert_same_run(hit, PROMPT)
    context.check_invariants()
    assert context.stats().used_blocks == context.stats().reserved_slots == 0


@pytest.mark.parametrize("error", FOREIGN)
@pytest.mark.parametrize("kind", [Admitted, Stored])
def test_a_listener_that_raises_keeps_the_cache(kind, error):
    """An exception at an admission takes the request back; at a commit, the step is complete."""
    context = warm()

    def broken(event):
        raise error("struck")

    heard = []
    context.listeners.add(heard.append, Admitted)
    context.listeners.add(broken, kind)
    if kind is Admitted:
        with pytest.raises(error):
            add(context, "x", OTHER)
        assert [(event.request_id, event.num_tokens) for event in heard] == [("x", len(OTHER))]
        assert context.statuses() == {}
    else:
        add(context, "x", OTHER)
        step = context.begin_step()
        token = int(MODEL.forward(step.metadata, context)[0].argmax())
        with pytest.raises(error):
            context.commit_step({"x": token})
        assert context.output("x") == [token] == uncached(OTHER, 1)[0]
        context.listeners.remove(broken)
        run_step(context)
        assert context.finish("x") == uncached(OTHER, 2)[0]
    context.listeners.remove(broken)
    check_kept(context)


def test_listeners_are_called_after_a_reset_of_all_parts():
    """The slots are reset before the KV blocks, each in a separate change."""
    context, seen = warm(), []
    blocks = context.kv_block_allocator
    context.listeners.add(lambda event: seen.append(int((blocks.block_hashes >= 0).sum())), Removed)
    assert (blocks.block_hashes >= 0).any()
    context.reset()
    assert len(seen) >= 2
    assert not any(seen)


def test_a_listener_may_not_call_in():
    context = warm()
    context.listeners.add(lambda event: context.match(_request()), Stored)
    add(context, "x", OTHER)
    step = context.begin_step()
    token = int(MODEL.forward(step.metadata, context)[0].argmax())
    with pytest.raises(ConcurrentUseError, match="from within it"):
        context.commit_step({"x": token})
    assert context.finish("x") == [token]


CALLS = {
    "match": lambda context: context.match(context.prepare(_request())),
    "add_request": lambda context: context.add_request(_request()),
    "begin_step": DynamicInferenceContext.begin_step,
    "commit_step": lambda context: context.commit_step({}),
    "abort_step": DynamicInferenceContext.abort_step,
    "preempt": lambda context: context.preempt("x"),
    "finish": lambda context: context.finish("x"),
    "reset": DynamicInferenceContext.reset,
}


def test_no_call_of_a_context_comes_in_between():
    """Callbacks cannot call in; statistics and preparation work in any thread at any time."""

    class Meddling:
        def positions(self, facts):
            for name, call in CALLS.items():
                with pytest.raises(ConcurrentUseError, match=f"{name} was called from within it"):
                    call(context)
            assert context.stats().requests == 0
            assert len(context.prepare(_request()).hashes) == 3
            return ()

    context = make_context(placement=Meddling())
    add(context, "x", PROMPT)
    tokens = []
    for _ in range(3):  # calls may come from different threads in turn
        thread = threading.Thread(target=lambda: tokens.append(run_step(context)["x"][1]))
        thread.start()
        thread.join()
    assert context.finish("x") == tokens
    context.check_invariants()


def test_a_callback_that_calls_in_has_its_request_taken_back():
    class Meddling:
        def positions(self, facts):
            context.finish("x")

    context = make_context(placement=Meddling())
    for _ in range(2):  # the first refusal does not poison the context
        with pytest.raises(ConcurrentUseError, match="from within it while add_request"):
            add(context, "x", PROMPT)
    context.check_invariants()
    assert context.stats().used_blocks == context.stats().reserved_slots == 0


@pytest.mark.parametrize("error", FOREIGN)
def test_an_engine_continues_after_its_sampling_raised(monkeypatch, error):
    """Failures of the model: tests/property/test_engine_machine.py."""
    engine = make_engine()
    prompts = [PROMPT, OTHER]
    wanted = [one.tokens for one in engine.generate(prompts, SamplingParams(max_new_tokens=3))]
    ids = [engine.submit(prompt, SamplingParams(max_new_tokens=3)) for prompt in prompts]
    with monkeypatch.context() as patch:
        strike(patch, engine_module, "verify", error)
        with pytest.raises(error):
            engine.step()
    ends = {e.request_id: e.completion for e in engine.stream() if e.completion}
    assert [ends[request_id].tokens for request_id in ids] == wanted
    assert engine.context.stats().hits >= 1
    with monkeypatch.context() as patch:
        strike(patch, engine.context.kv_block_allocator, "register", error)
        engine.submit(PROMPT[::-1])
        with pytest.raises(error):
            engine.step()
    with pytest.raises(PoisonedError):
        engine.step()
    engine.reset()
    [one] = engine.generate([PROMPT], SamplingParams(max_new_tokens=3))
    assert one.tokens == wanted[0]


def test_an_interrupt_just_when_the_lock_is_acquired_leaves_it_free():
    blocks = KVBlockAllocator(16)
    lock = blocks._guard._lock

    class Struck:
        def acquire(self, *, blocking):
            lock.acquire(blocking=blocking)
            raise KeyboardInterrupt

        release = staticmethod(lock.release)

    blocks._guard._lock = Struck()
    with pytest.raises(KeyboardInterrupt):
        blocks.allocate_memory_blocks(1)
    blocks._guard._lock = lock
    answers = []
    thread = threading.Thread(target=lambda: answers.append(blocks.allocate_memory_blocks(0)))
    thread.start()
    thread.join()
    assert answers == [[]]


def test_an_interrupt_where_the_exit_of_an_ending_begins_leaves_no_events_held():
    blocks, told = KVBlockAllocator(16), []
    blocks.listeners.add(told.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Ending, "__exit__", lambda *_: raise_(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            blocks.reset()
    assert not told
    blocks.reset()
    assert [event.is_reset for event in told] == [True, True]


def test_an_interrupt_between_two_lines_leaves_nothing_locked():
    """A signal may come at any moment, also while a call begins and ends."""

    def strike_now(*_):
        raise KeyboardInterrupt

    def take_for_ever(blocks, seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            blocks.release_memory_blocks(blocks.allocate_memory_blocks(1))

    def ask(blocks, answers):
        try:
            answers.append(blocks.allocate_memory_blocks(0))
        except PoisonedError:
            blocks.reset()
            answers.append(blocks.allocate_memory_blocks(0))

    before = signal.signal(signal.SIGALRM, strike_now)
    # An interrupt inside a coverage tool would leave the tool's lock held.
    tracers = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        for number in range(400):
            blocks = KVBlockAllocator(16)
            with pytest.raises(KeyboardInterrupt):
                take_for_ever(blocks, 1e-4 + number * 1e-6)
            answers = []
            thread = threading.Thread(target=ask, args=(blocks, answers))
            thread.start()
            thread.join()
            ask(blocks, answers)
            assert answers == [[], []]
    finally:
        signal.signal(signal.SIGALRM, before)
        sys.settrace(tracers[0])
        threading.settrace(tracers[1])
