"""A store that fails in every way: each load is right or a counted miss.

Combined faults at any moment: the machine over a store, tests/support/store_machine.py.
"""

import pytest
from disk_rig import Answer, buffer_for, facts_of, payload_of
from faulty_store import _TROUBLES
from remote_rig import Bench, wait_until

from mamba_cache.tiers import Refusal
from mamba_cache.tiers.entry import EntryKind

EVERY = [(call, trouble) for call, troubles in _TROUBLES.items() for trouble in troubles]
NUM_ENTRIES = 4


class Run:
    """Calls of two tiers over one store, as in two processes, with their answers."""

    def __init__(self, monkeypatch, seed):
        self.bench = Bench(monkeypatch, num_threads=2)
        self.bench.faulty._random.seed(seed)
        self.bench.faulty._sleep = lambda seconds: None
        self.other = Bench(store=self.bench.faulty, num_threads=2)
        self.other.clock = self.bench.clock
        self.benches = [self.bench, self.other]
        self.open = []
        for number in range(0, NUM_ENTRIES, 2):
            for kind in EntryKind:
                assert self.bench.put(number, kind) is None

    def begin(self, call, number, kind, which):
        """Begin a call of one of the tiers, which may refuse it."""
        tier, facts, answer = self.benches[which].tier, facts_of(number, kind), Answer()
        into = buffer_for(facts) if call == "load" else None
        given = {"put": (facts, payload_of(number, kind)), "load": (facts, into)}
        if getattr(tier, call)(*given.get(call, ([facts.key],)), answer):
            self.open.append((answer, into, (number, kind)))

    def wait(self):
        """End all calls under way, advancing the clock as far as needed."""
        for each in self.benches:
            while not each.tier.flush(0.02):
                # A call that is only slow on a busy machine must not time out.
                if self.bench.faulty.num_hanging or not all(
                    b.tier.is_healthy for b in self.benches
                ):
                    self.bench.turn(2.1)
                    self.other.turn(0)
        self.look()

    def look(self):
        """Assert that every answer so far is right."""
        for answer, into, wanted in self.open:
            if answer.calls:
                assert len(answer.calls) == 1
            if into is None or not answer.calls:
                continue
            if answer.calls[0] is None:
                assert bytes(into) == bytes(payload_of(*wanted)), "a wrong entry was restored"
            else:
                assert isinstance(answer.calls[0], Refusal)

    def end(self):
        self.wait()
        assert all(len(answer.calls) == 1 for answer, _, _ in self.open)
        self.bench.faulty.heal()
        for each in self.benches:
            wait_until(lambda each=each: not each.tier._num_hung)
            each.check()
            stats = each.tier.stats()
            if sum(stats.refused.values()) + sum(stats.dropped.values()) == 0:
                assert stats.restored == stats.loads
        # A recovered store is used again after every fault.
        self.bench.turn(5.1)
        self.other.turn(61)
        for each in self.benches:
            # Repeated, as the clock may have advanced during a call of the store.
            wait_until(lambda each=each: each.tier.is_healthy or each.turn(5.1))
        for number in range(NUM_ENTRIES):
            self.bench.put(number)
            found = self.other.load(number)
            if not isinstance(found, bytes):  # the entry was bad and has been removed
                self.other.end()
                self.other.put(number)
                self.bench.turn(61)
                self.bench.put(number)
                found = self.bench.load(number)
            assert found == bytes(payload_of(number))

    def close(self):
        self.bench.faulty.heal()
        for each in self.benches:
            each.tier.close()


def store_and_fetch(run, number, kind, *, is_damaged):
    """Store an entry in one process; look it up and load it in the other."""
    run.begin("put", number, kind, number % 2)
    run.wait()
    if is_damaged:
        blobs = run.bench.memory._blobs
        run.bench.memory._blobs = {name: blob[:-1] for name, blob in blobs.items()}
    run.begin("ask", number, kind, 1 - number % 2)
    run.begin("load", number, kind, 1 - number % 2)
    run.wait()


def probe_both(run):
    """Pause the store in both processes until they have probed its health."""
    for each in run.benches:
        wait_until(lambda each=each: run.bench.faulty.release() or not each.tier._num_hung)
    before = sum(run.bench.faulty.injected.values())
    for each in run.benches:
        with each.tier._lock:
            each.tier._failures, each.tier._paused_until = 2, 0.0
        each.turn(0)
    wait_until(
        lambda: (
            sum(run.bench.faulty.injected.values()) > before
            or all(each.tier.is_healthy for each in run.benches)
        )
    )


@pytest.mark.parametrize(
    ("call", "trouble"), EVERY, ids=lambda each: str(getattr(each, "value", each))
)
def test_every_trouble_of_every_call_is_survived_and_counted(call, trouble, seed) -> None:
    """Each fault occurs; afterwards every entry is right, or a miss with a counted reason."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("threading.excepthook", lambda args: None)
        run = Run(patch, seed)
        try:
            for is_bad in (False, True):
                if is_bad:
                    run.bench.faulty.inject(call, trouble, probability=0.5)
                for number in range(100 * is_bad, 100 * is_bad + 2 * NUM_ENTRIES):
                    for kind in EntryKind:
                        store_and_fetch(run, number, kind, is_damaged=call == "remove")
                    if call == "health" and is_bad:
                        probe_both(run)
            assert run.bench.faulty.injected[call, trouble]
            run.bench.faulty.heal()
            run.end()
        finally:
            run.close()
