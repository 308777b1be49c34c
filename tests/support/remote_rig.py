"""A store tier with small chunks over a store in memory, and a manual clock."""

import itertools
import threading

import disk_rig
from clocks import ManualClock
from disk_rig import SECRET, Answer, buffer_for, facts_of
from faulty_store import FaultyStore
from memory_store import MemoryStore

from mamba_cache.tiers import lower as lower_module
from mamba_cache.tiers.entry import EntryKind, EntryMacs
from mamba_cache.tiers.lower import LowerTier

CHUNK_BYTES = 2048
"""A state of the disk rig has five chunks, the last one shorter; a KV block has two."""

PAUSE = threading.Event()  # never set: ``PAUSE.wait(seconds)``

PATIENCE = 60.0
"""Seconds after which a call counts as hung."""


def let_see(tier):
    """Wake a store tier's threads after a change of the clock."""
    with tier._lock:
        tier._call_began.notify()
        tier._work_queued.notify_all()


class Bench:
    """A tier with its store, and calls that wait for their end."""

    def __init__(self, monkeypatch=None, *, store=None, secret=SECRET, **options):
        self.clock = ManualClock()
        if monkeypatch is not None:
            monkeypatch.setattr(lower_module, "time", self.clock)
        self.memory = MemoryStore() if store is None else store
        self.faulty = FaultyStore(self.memory)
        own = {
            "macs": EntryMacs(secret),
            "write_on_use": 1,
            "chunk_bytes": CHUNK_BYTES,
            "num_threads": 4,
        }
        self.options = own | options
        self.tier = LowerTier(self.faulty, **self.options)
        self.end()

    def put(self, number, kind=EntryKind.STATE, **changes):
        """Put an entry and wait for the answer; False if the call was refused."""
        return disk_rig.put(self.tier, number, kind, **changes)

    def load(self, number, kind=EntryKind.STATE, **changes):
        """Load an entry; return its bytes, the refusal, or False if the call was refused."""
        return disk_rig.load(self.tier, number, kind, **changes)

    def begin_load(self, number):
        """Begin to load an entry; return its future answer."""
        facts, answer = facts_of(number), Answer()
        assert self.tier.load(facts, buffer_for(facts), answer)
        return answer

    def ask(self, *numbers, kind=EntryKind.STATE):
        """Whether the store has entries; None if the call was refused."""
        answer, keys = Answer(), [facts_of(number, kind).key for number in numbers]
        if not self.tier.ask(keys, answer):
            return None
        answer.get()
        return self.tier.has_many(keys)

    def end(self):
        assert self.tier.flush(PATIENCE), "the tier did not end what it was given"

    def turn(self, seconds):
        """Advance the clock, and wake the tier's threads."""
        self.clock.now += seconds
        let_see(self.tier)

    def recover(self):
        """Wait until a suspended store is asked again and answers."""
        self.turn(5.1)
        wait_until(lambda: self.tier.is_healthy)

    def names(self):
        """Keys in the store, in order of storing."""
        return list(self.memory._blobs)

    def check(self):
        """Check that nothing is leaked and nothing hangs."""
        self.end()
        self.tier.check_invariants()
        stats = self.tier.stats()
        assert stats.loads == stats.restored + sum(stats.refused.values())
        assert not self.tier.num_queued


def wait_until(condition):
    """Wait for a condition that another thread fulfils."""
    for _ in itertools.takewhile(lambda _: not condition(), range(int(PATIENCE / 0.002))):
        PAUSE.wait(0.002)
    assert condition()
