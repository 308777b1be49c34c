"""Engines and bare allocators that are interrupted at any moment, and what must hold then."""

import copy
import gc
import signal
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from engine_rig import BLOCK, MODEL, alone, cache_config, greedy
from fault_rig import frozen
from injectors import Interrupt, LineInterrupt, LineOfSignals

from mamba_cache import KVBlockAllocator, MambaSlotAllocator
from mamba_cache.blocks import BlockHashes
from mamba_cache.errors import PoisonedError, UnknownRequestError
from mamba_cache.events import Removed, Stored
from mamba_cache.reference import Engine, SamplingParams


class WrongAnswer(AssertionError):
    """A token, a state or a block that is not what it should be."""


class Wedged(AssertionError):
    """Something does not go on, and a reset is not asked for or does not help."""


class Leak(AssertionError):
    """Blocks, slots, rows or hooks that nobody has."""


FAULTS = (WrongAnswer, Wedged, Leak)


class Search:
    """Interrupts one call again and again, each time at another moment.

    Args:
        subject: Has ``make()``, which returns what ``run(made)`` is called with; and
            ``judge(made)``, which raises one of ``FAULTS``, or returns whether it was poisoned.
        injector: Where a moment is.
    """

    def __init__(self, subject, injector=LineInterrupt):
        self.subject, self.injector = subject, injector
        made = subject.make()
        with injector(None, 0) as counting:
            subject.run(made)
        self.num_moments = counting.count
        subject.judge(made)

    def moments(self, most=None):
        """The moments, or as many of them as ``most`` that lie evenly.

        Left out is the last instruction of all, which returns: before it, the caller has as good as
        nothing; after it, everything; and no signal is delivered there.
        """
        found = range(1, self.num_moments + issubclass(self.injector, LineInterrupt))
        return found if most is None else found[:: max(1, len(found) // most)]

    def strike(self, index):
        """Interrupts the call at one moment; returns whether that poisoned its object."""
        made = self.subject.make()
        injected = self.injector(None, index)
        try:
            with injected:
                self.subject.run(made)
        except KeyboardInterrupt:
            pass
        try:
            return self.subject.judge(made)
        except Exception as failure:
            kind = type(failure) if isinstance(failure, FAULTS) else Wedged
            raise kind(f"moment {index}, {injected.where}: {failure!r}") from failure

    def survey(self, moments):
        """Strikes at each of the moments; counts what came of it."""
        counts, examples = Counter(), []
        for index in moments:
            counts["struck"] += 1
            try:
                counts["poisoned" if self.strike(index) else "went on"] += 1
            except FAULTS as failure:
                counts[type(failure)] += 1
                examples.append(str(failure))
        return counts, examples


# Engine.

PROMPTS = {
    "shared": [(5 * i * i + 11 * i) % 256 for i in range(2 * BLOCK + 3)],
    "branch": [*((5 * i * i + 11 * i) % 256 for i in range(2 * BLOCK)), 7, 7, 7, 1, 2],
    "other": [(7 * i + 3) % 256 for i in range(BLOCK + 2)],
    "long": [(13 * i + 5) % 256 for i in range(4 * BLOCK)],
}
NUM_TOKENS = {"shared": 5, "branch": 4, "other": 9, "long": 3}
SEVERAL = "other"  # the prompt of which several answers are drawn
DRAWN = SamplingParams(max_new_tokens=4, temperature=1.5)
ANSWERS = {}


def answer(name):
    if name not in ANSWERS:
        ANSWERS[name] = alone(*prompt_and_sampling(name))
    return ANSWERS[name]


def prompt_and_sampling(name):
    """Of the answers to one prompt the first is "several", the others are ("several", index)."""
    if name in PROMPTS:
        return PROMPTS[name], greedy(NUM_TOKENS[name])
    return PROMPTS[SEVERAL], replace(DRAWN, seed=0 if name == "several" else name[1])


class EngineRun:
    """An engine, and what its caller was told."""

    def __init__(self, **changes):
        settings = {"num_kv_blocks": 12, "max_slots": 4, "max_tokens": 24, "max_requests": 3}
        self.engine = Engine(MODEL, cache_config(**(settings | changes)))
        self.told = {}
        self.ends = {}
        self.cancelled = set()
        self.events = []  # of the call that is interrupted

    def submit(self, name):
        self.told[name] = []
        self.engine.submit(*prompt_and_sampling(name), request_id=name)

    def submit_several(self, n):
        self.told |= {name: [] for name in ("several", *(("several", i) for i in range(1, n)))}
        self.engine.submit(*prompt_and_sampling("several"), n=n, request_id="several")

    def take(self, events):
        for event in events:
            if event.token is not None:
                self.told[event.request_id].append(event.token)
            if event.finished:
                if event.request_id in self.ends:
                    raise WrongAnswer(f"{event.request_id} ended twice")
                self.ends[event.request_id] = event.completion

    def step(self):
        self.take(self.engine.step())

    def check(self):
        """Runs everybody to the end. Returns whether the engine was poisoned."""
        is_poisoned = self.recover()
        self.drain()
        return is_poisoned

    def recover(self):
        """Resets the engine if it is poisoned, and says whether it was."""
        try:
            self.engine.submit([1], greedy(1), request_id="probe")
            self.engine.cancel("probe")
        except PoisonedError:
            self.restart()
            return True
        return False

    def restart(self):
        """What is told to do: reset, and add the requests again that have not ended."""
        try:
            self.engine.step()
        except PoisonedError:
            pass
        else:
            raise Wedged("one call says that it is poisoned, the next one goes on")
        self.engine.reset()
        for name in [name for name in self.told if name not in self.ends]:
            self.submit(name)

    def drain(self):
        for _ in range(200):
            if not self.engine.num_requests:
                break
            self.step()
        else:
            raise Wedged(f"{self.engine.num_requests} requests do not come to an end")
        self.engine.context.check_invariants()
        for name, tokens in self.told.items():
            if name not in self.ends and name not in self.cancelled:
                raise Wedged(f"the end of {name!r} is never told")
            if name in self.ends and self.ends[name].tokens != tuple(tokens):
                raise WrongAnswer(f"{name!r} ended with {self.ends[name].tokens}, told {tokens}")
            wanted = answer(name)[: len(tokens)] if name in self.cancelled else answer(name)
            if tuple(tokens) != tuple(wanted):
                raise WrongAnswer(f"{name!r} was told {tokens}, alone it is {answer(name)}")
        stats = self.engine.context.stats()
        if stats.used_blocks or stats.reserved_slots:
            raise Leak(f"{stats.used_blocks} blocks and {stats.reserved_slots} slots are held")


class EngineCall:
    """A call of an engine that is busy with what ``before`` has it do."""

    def __init__(self, before, run, **changes):
        self.before, self.call, self.changes = before, run, changes

    def make(self):
        made = EngineRun(**self.changes)
        self.before(made)
        return made

    def run(self, made):
        self.call(made)

    def judge(self, made):
        made.take(made.events)
        return made.check()


def _busy(made, steps=3):
    for name in ("shared", "other"):
        made.submit(name)
    for _ in range(steps):
        made.step()
    for name in ("branch", "long"):
        made.submit(name)


def _cancel(made, name):
    made.cancelled.add(name)  # cancelled or not, what is told of it must be right
    made.engine.cancel(name)


def _submit(made):
    try:
        made.submit("branch")
    except KeyboardInterrupt:
        try:
            made.engine.cancel("branch")
        except (UnknownRequestError, PoisonedError):
            del made.told["branch"]
            raise KeyboardInterrupt from None
        raise Wedged("a request that was not submitted is there") from None


def _step(made):
    made.events = made.engine.step()


def _stream(made):
    for event in made.engine.stream():
        made.events.append(event)


ENGINE_CALLS = {
    "Engine.step, requests queued": EngineCall(
        lambda made: [made.submit(name) for name in PROMPTS], _step
    ),
    "Engine.step, some decode": EngineCall(_busy, _step),
    "Engine.step, one ends": EngineCall(lambda made: _busy(made, 5), _step),
    "Engine.step, too few blocks": EngineCall(
        lambda made: _busy(made, 4), _step, num_kv_blocks=5
    ),
    "Engine.step, with drafts": EngineCall(_busy, _step, num_speculative_tokens=2),
    "Engine.step, one is forked": EngineCall(
        lambda made: [made.submit("shared"), made.step(), made.submit_several(3)], _step,
        max_requests=4,
    ),
    "Engine.submit": EngineCall(
        lambda made: [made.submit("shared"), made.step()], _submit
    ),
    "Engine.cancel, of one that decodes": EngineCall(_busy, lambda made: _cancel(made, "other")),
    "Engine.cancel, of one that is queued": EngineCall(_busy, lambda made: _cancel(made, "long")),
    "Engine.stream": EngineCall(
        lambda made: [made.submit("shared"), made.submit("branch")], _stream
    ),
}  # fmt: skip


# Bare allocators.

NUM_BLOCKS, NUM_SLOTS = 7, 4
WAYS = "leaving", "arriving"


class Bare:
    """A KV block allocator and a slot allocator that only a callback joins.

    What a block holds is a digest; the state in a slot is the number of the digest that it was
    saved for. So it shows when one is found beside the other's content.
    """

    def __init__(self):
        self.kv = KVBlockAllocator(NUM_BLOCKS + 1, as_tensor=torch.from_numpy)
        zeros = torch.zeros(1, 3, 1)
        self.context = SimpleNamespace(
            kv_block_allocator=self.kv,
            max_requests=3,
            block_size_tokens=4,
            max_mamba_intermediate_states_per_step=6,
            request_to_kv_block_ids=torch.zeros(3, 4, dtype=torch.int32),
            mamba_metadata=SimpleNamespace(
                request_to_mamba_state_idx=torch.arange(3, dtype=torch.int32),
                intermediate_count=0,
                per_request_intermediate_counts=[],
            ),
            mamba_conv_states=zeros.clone(),
            mamba_ssm_states=zeros.clone(),
            batch_dimensions=SimpleNamespace(prefill_req_count=1, decode_req_count=0),
            paused_request_count=0,
            device="cpu",
        )
        self.slots = MambaSlotAllocator(
            self.context, NUM_SLOTS, 1, (1,), (1,), torch.float32, torch.float32
        )
        self.heard = {"blocks": {}, "states": {}}  # by hash, as who only hears of events knows it
        self.kv.listeners.add(lambda event: self.hear(event.kind + "s", event), Stored, Removed)
        self.held = []
        self.reserved = []

    def store(self, number, *, keep=False):
        """Caches a block of one digest, and its state."""
        [block] = self.kv.allocate_memory_blocks(1)
        hashes = hashes_of(number)
        self.kv.register_kv_block_hashes([block], hashes)
        [slot] = self.slots.reserve_slots([block])
        if slot is not None:
            self.slots.ssm_states[:, slot] = self.slots.conv_states[:, slot] = float(number)
            self.slots.commit_reserved([slot], [block], list(hashes))
        if keep:
            self.held.append(block)
        else:
            self.kv.release_memory_blocks([block])
        return block

    def hear(self, what, event):
        known = self.heard[what]
        if isinstance(event, Stored):
            known.update(zip(event.hash_ids, event.block_ids, strict=True))
            return
        for hash_id in event.hash_ids:
            known.pop(hash_id, None)
        if event.is_reset:
            known.clear()

    def check_heard(self):
        """What was announced is what is there."""
        hashes = np.asarray(self.kv.block_hashes)
        there = {int(hashes[block]): int(block) for block in np.flatnonzero(hashes >= 0)}
        if self.heard["blocks"] != there:
            raise WrongAnswer(f"announced: {self.heard['blocks']}, there: {there}")
        found = self.slots.hash_to_block_id
        there = {h: block for h, block in found.items() if self.slots.has_state(block)}
        if self.heard["states"] != there:
            raise WrongAnswer(f"announced: {self.heard['states']}, there: {there}")

    def check_states(self):
        """No state is found beside a block of other content."""
        self.check_heard()
        for number in range(1, 10):
            hashes = hashes_of(number)
            for block in self.kv.match_prefix(hashes):
                slot = self.slots.get_slot(block)
                if slot >= 0 and float(self.slots.ssm_states[0, slot]) != number:
                    raise WrongAnswer(f"the state of digest {number} is another's")

    def check_whole(self):
        """Everything is there, and can be had."""
        self.kv.check_invariants()
        self.slots.check_invariants()
        blocks = self.kv.allocate_memory_blocks(NUM_BLOCKS)
        slots = self.slots.reserve_slots(blocks)
        if len([slot for slot in slots if slot is not None]) != NUM_SLOTS:
            raise Leak("slots are missing")
        self.slots.cancel_reserved([slot for slot in slots if slot is not None])
        self.kv.release_memory_blocks(blocks)


def hashes_of(number):
    return BlockHashes([number.to_bytes(8, "little") + b"digested"])


class BareCall:
    """A call of a bare allocator: afterwards all is as before it, or as after it, or poisoned."""

    def __init__(self, run, *, prepare=lambda made: None, hands_out=False):
        self.call, self.prepare, self.hands_out = run, prepare, hands_out
        self._known = None

    def make(self):
        made = Bare()
        for number in (1, 2, 3):
            made.store(number)
        made.store(4, keep=True)
        made.prepare = self.prepare(made)
        if self._known is None:
            other = copy.copy(self)
            other._known = ()
            done = other.make()
            self.call(done)
            self._known = (_frozen(made), _frozen(done))
            self._known_held = [_held(made), _held(done)]
        return made

    def run(self, made):
        made.is_ended = False
        self.call(made)
        made.is_ended = True

    def judge(self, made):
        is_poisoned = [_is_poisoned(made.slots.has_state, 0), _is_poisoned(made.kv.find_block, 1)]
        if any(is_poisoned):
            for poisoned, calls in zip(
                is_poisoned,
                (
                    [lambda: made.slots.reserve_slots([5]), lambda: made.slots.get_slot(1)],
                    [lambda: made.kv.allocate_memory_blocks(1), lambda: made.kv.find_block(2)],
                ),
                strict=True,
            ):
                if poisoned and not all(_is_poisoned(call) for call in calls):
                    raise Wedged("one call says that it is poisoned, the next one goes on")
            made.slots.reset()
            made.kv.reset()
            made.check_states()
            made.store(8)
            made.store(9)
            made.check_states()
            made.check_whole()
            return True
        before, after = self._known
        state = _frozen(made)
        if state == after and state != before and self.hands_out and not made.is_ended:
            raise Leak("it was handed out, but to nobody")
        if state not in (before, after):  # it was taken back, at the cost of what was evicted
            made.kv.check_invariants()
            made.slots.check_invariants()
            if _held(made) not in self._known_held:
                raise Leak("something is held that was not, or is not that was")
        made.check_states()
        return False


def _is_poisoned(call, *args):
    try:
        call(*args)
    except PoisonedError:
        return True
    return False


def _frozen(made):
    return frozen(made.kv), frozen(made.slots)


def _held(made):
    pool = made.slots.pool
    refs = np.asarray(made.kv.block_ref_counts).tolist()
    in_flight = [sorted(it._copies.ids(way)) for it in (pool, made.kv) for way in WAYS]
    return refs, dict(pool.reserved), int(pool.pin_counts.sum()), in_flight


def _reserve(made):
    [block] = made.kv.allocate_memory_blocks(1)
    [slot] = made.slots.reserve_slots([block])
    made.slots.ssm_states[:, slot] = made.slots.conv_states[:, slot] = 5.0
    made.kv.register_kv_block_hashes([block], hashes_of(5))
    return slot, block


def _plan_commit(made):
    """Two checkpoints of a forward: one in the scratch, one of the prompt's end."""
    blocks = made.kv.allocate_memory_blocks(2)
    for block, number in zip(blocks, (5, 6), strict=True):
        made.kv.register_kv_block_hashes([block], hashes_of(number))
    made.context.request_to_kv_block_ids[0, :2] = torch.tensor(blocks)
    request = SimpleNamespace(prompt_tokens=range(8), finished_chunk_token_count=0)
    made.slots.compute_and_store_offsets(request, 0, 0, 8, 1, [], 2)
    metadata = made.context.mamba_metadata
    metadata.intermediate_count, metadata.per_request_intermediate_counts = 1, [1]
    made.slots.intermediate_ssm_out[:, 0] = made.slots.intermediate_conv_out[:, 0] = 5.0
    made.context.mamba_ssm_states[:, 0] = made.context.mamba_conv_states[:, 0] = 6.0


def _offsets(made):
    request = SimpleNamespace(prompt_tokens=range(8), finished_chunk_token_count=0)
    made.slots.compute_and_store_offsets(request, 1, 0, 8, 1, [], 2)


def _arrive(made):
    [block] = made.kv.allocate_memory_blocks(1)
    copy = made.slots.begin_arriving([block])
    made.slots.ssm_states[:, copy.ids] = made.slots.conv_states[:, copy.ids] = 5.0
    made.kv.register_kv_block_hashes([block], hashes_of(5))
    return copy, block


def _complete(made):
    copy, block = made.prepare
    made.slots.complete_arriving(copy, [block], list(hashes_of(5)))


def _cached(made):
    return [int(block) for block in np.flatnonzero(np.asarray(made.kv.block_hashes) >= 0)]


BARE_CALLS = {
    "KVBlockAllocator.allocate_memory_blocks, evicting": BareCall(
        lambda made: made.kv.allocate_memory_blocks(6), hands_out=True
    ),
    "KVBlockAllocator.retain_memory_blocks": BareCall(
        lambda made: made.kv.retain_memory_blocks(_cached(made)), hands_out=True
    ),
    "KVBlockAllocator.release_memory_blocks": BareCall(
        lambda made: made.kv.release_memory_blocks(made.held)
    ),
    "KVBlockAllocator.register_kv_block_hashes": BareCall(
        lambda made: made.kv.register_kv_block_hashes(made.prepare, hashes_of(7)),
        prepare=lambda made: made.kv.allocate_memory_blocks(1),
    ),
    "KVBlockAllocator.deregister_blocks": BareCall(
        lambda made: made.kv.deregister_blocks(_cached(made))
    ),
    "KVBlockAllocator.begin_leaving": BareCall(
        lambda made: made.kv.begin_leaving(_cached(made)), hands_out=True
    ),
    "KVBlockAllocator.end_leaving": BareCall(
        lambda made: made.kv.end_leaving(made.prepare),
        prepare=lambda made: made.kv.begin_leaving(_cached(made)),
    ),
    "KVBlockAllocator.begin_arriving, evicting": BareCall(
        lambda made: made.kv.begin_arriving(5), hands_out=True
    ),
    "KVBlockAllocator.complete_arriving": BareCall(
        lambda made: made.kv.complete_arriving(made.prepare, hashes_of(7)),
        prepare=lambda made: made.kv.begin_arriving(1),
    ),
    "KVBlockAllocator.cancel_arriving": BareCall(
        lambda made: made.kv.cancel_arriving(made.prepare),
        prepare=lambda made: made.kv.begin_arriving(2),
    ),
    "KVBlockAllocator.reset": BareCall(lambda made: made.kv.reset()),
    "MambaSlotAllocator.allocate_slots_batch, evicting": BareCall(
        lambda made: made.slots.allocate_slots_batch(made.prepare),
        prepare=lambda made: made.kv.allocate_memory_blocks(2), hands_out=True,
    ),
    "MambaSlotAllocator.reserve_slots, evicting": BareCall(
        lambda made: made.slots.reserve_slots(made.prepare),
        prepare=lambda made: made.kv.allocate_memory_blocks(2), hands_out=True,
    ),
    "MambaSlotAllocator.commit_reserved": BareCall(
        lambda made: made.slots.commit_reserved(
            [made.prepare[0]], [made.prepare[1]], list(hashes_of(5))
        ),
        prepare=_reserve,
    ),
    "MambaSlotAllocator.cancel_reserved": BareCall(
        lambda made: made.slots.cancel_reserved([made.prepare[0]]), prepare=_reserve
    ),
    "MambaSlotAllocator.pin_slots": BareCall(
        lambda made: made.slots.pin_slots([made.slots.get_slot(made.held[0])]), hands_out=True
    ),
    "MambaSlotAllocator.unpin_slots": BareCall(
        lambda made: made.slots.unpin_slots(made.prepare),
        prepare=lambda made: made.slots.pin_slots([made.slots.get_slot(made.held[0])]),
    ),
    "MambaSlotAllocator.begin_leaving": BareCall(
        lambda made: made.slots.begin_leaving([0, 3]), hands_out=True
    ),
    "MambaSlotAllocator.end_leaving": BareCall(
        lambda made: made.slots.end_leaving(made.prepare),
        prepare=lambda made: made.slots.begin_leaving([1]),
    ),
    "MambaSlotAllocator.begin_arriving, evicting": BareCall(
        lambda made: made.slots.begin_arriving(made.prepare),
        prepare=lambda made: made.kv.allocate_memory_blocks(2), hands_out=True,
    ),
    "MambaSlotAllocator.complete_arriving": BareCall(_complete, prepare=_arrive),
    "MambaSlotAllocator.cancel_arriving": BareCall(
        lambda made: made.slots.cancel_arriving(made.prepare[0]), prepare=_arrive
    ),
    "MambaSlotAllocator.invalidate_block": BareCall(
        lambda made: made.slots.invalidate_block(made.held[0])
    ),
    "MambaSlotAllocator.on_kv_blocks_deregistered": BareCall(
        lambda made: made.slots.on_kv_blocks_deregistered(made.held, list(hashes_of(4)))
    ),
    "MambaSlotAllocator.store_from_tensors": BareCall(
        lambda made: made.slots.store_from_tensors(
            made.held[0], 0, torch.full((1,), 4.0), torch.full((1,), 4.0)
        )
    ),
    "MambaSlotAllocator.compute_and_store_offsets": BareCall(_offsets),
    "MambaSlotAllocator.commit_intermediate_states": BareCall(
        lambda made: made.slots.commit_intermediate_states(), prepare=_plan_commit
    ),
    "MambaSlotAllocator.reset": BareCall(lambda made: made.slots.reset()),
}  # fmt: skip


def subjects(prefix=""):
    """Yields (name, subject, injector) of every search; those of transformers if it is there."""
    from interrupt_lower_rig import LOWER_TIER_CALLS  # noqa: PLC0415 - it needs this module
    from interrupt_tiers_rig import TIER_CALLS  # noqa: PLC0415 - likewise

    over_threads = {**TIER_CALLS, **LOWER_TIER_CALLS}
    calls = {**BARE_CALLS, **ENGINE_CALLS, **over_threads}
    if "PrefixCache".startswith(prefix) or prefix.startswith("PrefixCache"):
        try:
            from interrupt_cache_rig import cache_calls  # noqa: PLC0415 - needs an extra
        except ImportError:
            pass
        else:
            calls.update(cache_calls())
    for name, call in calls.items():
        if name.startswith(prefix):
            has_threads = " tiers" in name or name in over_threads
            line = LineOfSignals if has_threads else LineInterrupt
            yield name, call, Interrupt if name in BARE_CALLS else line


# Real signals.


def signal_engine(rng, num_signals, *, seconds=0.03):
    """Interrupts an engine's steps at random instants, as Ctrl-C does, until that many have struck.

    The signal is a timer's: the kernel sends it whatever the interpreter does at that moment.

    Returns:
        Counter: signals that struck in a step, how often that poisoned the engine, and requests
        that came to their ends.
    """
    counts, run, is_armed = Counter(), EngineRun(), [False]

    def interrupt(*_):
        if is_armed[0]:
            is_armed[0] = False
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    # Tools have callbacks in the collector, as Hypothesis has; Python drops what strikes there.
    gc.disable()
    tracing = sys.gettrace()
    sys.settrace(None)  # coverage has a lock, which what strikes in it would leave taken
    try:
        while counts["struck"] < num_signals:
            if not run.engine.num_requests:
                run.drain()
                counts["ended"] += len(run.ends)
                run.told, run.ends = {}, {}
                for name in rng.permutation(sorted(PROMPTS)).tolist():
                    run.submit(name)
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, seconds)))
            counts["struck"] += _steps_are_struck(run, is_armed)
            counts["poisoned"] += run.recover()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
        sys.settrace(tracing)
    run.drain()
    return counts


def _steps_are_struck(run, is_armed):
    """Steps to the end or until a signal strikes in a step, and says whether one did."""
    events = []
    try:
        while run.engine.num_requests:
            is_armed[0] = True
            events = run.engine.step()
            is_armed[0] = False
            run.take(events)
            events = []
    except KeyboardInterrupt:
        run.take(events)  # of a step that had returned when the signal came
        return True
    return False
