"""Disk tiers and store tiers alone, whose callers are interrupted, and what must hold then."""

import gc
import mmap
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress

from disk_rig import facts_of, load, open_tier, payload_of
from interrupt_rig import Leak, Wedged, WrongAnswer

from mamba_cache.stores import MemoryStore
from mamba_cache.tiers import EntryKind, Refusal, RemoteTier

PATIENCE = 60.0
KV = EntryKind.KV
PAUSE = threading.Event()


class Given:
    """A call that was made with memory of its own, and what it was told."""

    def __init__(self, number, kind=EntryKind.STATE):
        self.facts, self.answers = facts_of(number, kind), []
        self.memory = mmap.mmap(-1, self.facts.payload_bytes)
        self.is_taken = None

    def put(self, tier):
        self.memory[:] = payload_of_facts(self.facts)
        self.is_taken = tier.put(self.facts, memoryview(self.memory), self.answers.append)

    def load(self, tier):
        self.is_taken = tier.load(self.facts, memoryview(self.memory), self.answers.append)

    def ask(self, tier):
        self.is_taken = tier.ask([self.facts.key], self.answers.append)

    def check(self):
        """It is told once if it was taken, at most once if nobody knows; its memory is free."""
        if len(self.answers) > 1 or (self.is_taken is not None and
                                     len(self.answers) != self.is_taken):  # fmt: skip
            raise WrongAnswer(f"taken: {self.is_taken}, told: {self.answers}")
        for _ in range(3000):  # a thread may not be back at its queue yet
            with suppress(BufferError):
                self.memory.close()
                return
            PAUSE.wait(0.01)
        raise Leak("a buffer of the caller's is kept")


def payload_of_facts(facts):
    return payload_of(int.from_bytes(facts.key.digest, "little"), facts.key.kind)


class LowerTierRun:
    """A tier that has the states 1 and 2, and is busy with what ``before`` gives it."""

    def __init__(self, before=lambda made: None):
        self.given = []
        self.is_removed = False
        self.open()
        for number in (1, 2):
            self.give(number).put(self.tier)
        self.tier.flush(PATIENCE)
        before(self)

    def give(self, number, kind=EntryKind.STATE):
        self.given.append(Given(number, kind))
        return self.given[-1]

    def busy(self):
        for number in (1, 2, 1):
            self.give(number).load(self.tier)
        for number in (4, 5):
            self.give(number, KV).put(self.tier)

    def remove(self):
        self.is_removed = None  # nobody knows
        self.tier.remove(facts_of(1).key)
        self.is_removed = True

    def check(self):
        if not self.tier.flush(PATIENCE):
            raise Wedged("a flush after it does not end")
        self.tier.check_invariants()
        self.check_books()
        if not self.is_ended:
            self.check_use()
        self.tier.close()
        self.check_books()
        for given in self.given:
            given.check()
        self.open()
        self.check_entries()

    def check_books(self):
        stats = self.tier.stats()
        if stats.loads != stats.hits + sum(stats.refused.values()) or self.tier.num_queued:
            raise Leak(f"the counts do not agree: {stats}")
        if stats.not_written.keys() - {"aborted", "in_flight", "queue_full"}:
            raise WrongAnswer(f"not written: {stats.not_written}")

    @property
    def is_ended(self):
        """Whether a close was begun: it takes nothing more."""
        return not self.tier.is_healthy

    def check_use(self):
        """It goes on, with what was there and with more."""
        self.check_entries()
        for number, kind in ((3, EntryKind.STATE), (3, KV), (6, EntryKind.STATE)):
            given = self.give(number, kind)
            given.put(self.tier)
            if not self.tier.flush(PATIENCE) or given.answers != [None]:
                raise Wedged(f"it stores nothing more: {given.answers}")
            if load(self.tier, number, kind) != bytes(payload_of(number, kind)):
                raise WrongAnswer("what was stored after it is another")
        if not self.tier.flush(PATIENCE):
            raise Wedged("a later flush does not end")

    def check_entries(self):
        for number in (1, 2):
            found = load(self.tier, number)
            may_miss = number == 1 and self.is_removed is not False
            if found is Refusal.MISSING and may_miss:
                continue
            if found != bytes(payload_of(number)) or (number == 1 and self.is_removed):
                raise WrongAnswer(f"{number} is now {str(found)[:30]}")


class DiskRun(LowerTierRun):
    """A disk tier of few rows."""

    def __init__(self, *args):
        self.folder = tempfile.mkdtemp(prefix="mamba-cache-lower-")
        super().__init__(*args)

    def open(self):
        self.tier = open_tier(self.folder, states=8, blocks=8)

    def check_books(self):
        super().check_books()
        if any(file.rows.leases for file in self.tier._files.values()):
            raise Leak("rows of the disk are held")

    def give_up(self):
        self.tier.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class StoreRun(LowerTierRun):
    """A store tier over a store in memory."""

    def __init__(self, *args):
        self.store = MemoryStore()
        super().__init__(*args)

    def open(self):
        self.tier = RemoteTier(
            self.store, write_on_use=1, chunk_bytes=2048, num_threads=2, call_seconds=1e9
        )  # nothing is decided by the clock, which jumps in tests
        self.tier.flush(PATIENCE)

    def give_up(self):
        self.tier.close()


class LowerTierCall:
    """A call of a disk tier or a store tier, for ``interrupt_rig.Search``."""

    def __init__(self, kind, run, before=lambda made: None):
        self.kind, self.call, self.before = kind, run, before

    def make(self):
        return self.kind(self.before)

    def run(self, made):
        self.call(made)

    def judge(self, made):
        try:
            made.check()
            return False  # a tier is never poisoned
        finally:
            made.give_up()


_CALLS = {
    "put": (lambda made: made.give(6).put(made.tier),),
    "put of what is there": (lambda made: made.give(1).put(made.tier),),
    "load": (lambda made: made.give(1).load(made.tier),),
    "load of what is not there": (lambda made: made.give(9).load(made.tier),),
    "has_many": (lambda made: made.tier.has_many([facts_of(number).key for number in (1, 2, 9)]),),
    "remove": (LowerTierRun.remove,),
    "flush": (lambda made: made.tier.flush(), LowerTierRun.busy),
    "close": (lambda made: made.tier.close(), LowerTierRun.busy),
    "stats": (lambda made: made.tier.stats(), LowerTierRun.busy),
}
LOWER_TIER_CALLS = {
    **{f"DiskTier.{name}": LowerTierCall(DiskRun, *each) for name, each in _CALLS.items()},
    **{f"RemoteTier.{name}": LowerTierCall(StoreRun, *each) for name, each in _CALLS.items()},
    "RemoteTier.ask": LowerTierCall(StoreRun, lambda made: made.give(1).ask(made.tier)),
    "RemoteTier.silence": LowerTierCall(
        StoreRun, lambda made: made.tier.silence(), LowerTierRun.busy
    ),
}


def signal_tier(kind, rng, num_signals, *, seconds=0.002):
    """Interrupts calls of a tier at random instants, as Ctrl-C does, until so many have struck.

    Returns:
        Counter: of the errors that came of the signals, by name.
    """
    made, counts, is_armed = kind(), Counter(), [False]

    def interrupt(*_):
        if is_armed[0]:
            is_armed[0] = False
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # Python drops what strikes in a callback of the collector's
    tracing = sys.gettrace()
    sys.settrace(None)  # coverage has a lock, which what strikes in it would leave taken
    try:
        while sum(counts.values()) < num_signals:
            try:
                is_armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, seconds)))
                while True:
                    _call_some(made, rng)
            except (KeyboardInterrupt, RuntimeError) as error:
                is_armed[0] = False
                counts[type(error).__name__] += 1
            if len(made.given) > 200:
                _have_answered(made)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
        sys.settrace(tracing)
    try:
        _have_answered(made)
        made.check()
    finally:
        made.give_up()
    return counts


def _call_some(made, rng):
    number, kind = int(rng.integers(1, 3)), EntryKind.STATE
    which = rng.random()
    if which < 0.4:
        made.give(number, kind).load(made.tier)
    elif which < 0.6:
        made.give(number, kind).put(made.tier)
    elif which < 0.7:
        made.tier.has_many([facts_of(each).key for each in (1, 2, 9)])
    elif which < 0.8:
        made.tier.remove(facts_of(7).key)
    elif which < 0.9:
        made.tier.flush()
    elif hasattr(made.tier, "ask"):
        made.give(number, kind).ask(made.tier)


def _have_answered(made):
    if not made.tier.flush(PATIENCE):
        raise Wedged("a flush does not end")
    for given in made.given:
        given.check()
    made.given = []
