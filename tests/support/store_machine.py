"""A state machine of a context over a host tier and a store with every kind of fault."""

from unittest import mock

from clocks import ManualClock
from faulty_store import _TROUBLES, FaultyStore
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from memory_store import MemoryStore
from remote_rig import let_see, wait_until
from tiers_machine import PROMPTS, LowerTierMachine

from mamba_cache.context import prefetch as prefetching
from mamba_cache.stores import StoreFault
from mamba_cache.tiers import lower as lower_module

MODULES = (lower_module, prefetching)
TROUBLES = [(call, trouble) for call, troubles in _TROUBLES.items() for trouble in troubles]


class StoreMachine(LowerTierMachine):
    """A host tier of few rows over a store, with successive contexts.

    For all faults of the store: answers equal those of uncached runs, every prefetch ends, and no
    row stays held when the store is idle.
    """

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.patches = [mock.patch.object(m, "time", self.clock) for m in MODULES]
        self.patches.append(mock.patch("threading.excepthook"))
        for patch in self.patches:
            patch.start()
        self.blobs = MemoryStore()
        self.store = FaultyStore(self.blobs, sleep=lambda seconds: None)

    def lower_settings(self):
        return {"store": self.store}

    @property
    def tier(self):
        return self.context.store_tier

    def turn_clock(self, seconds):
        self.clock.now += seconds
        let_see(self.tier)

    def quiet(self):
        """Wait until the store tier is idle; hanging calls time out."""
        while not self.tier.flush(0.02):
            self.turn_clock(2.1)
        self.context.poll_tiers()

    @precondition(lambda self: self.copies)
    @rule(
        what=st.sampled_from(TROUBLES),
        probability=st.sampled_from([0.1, 0.5, 1.0]),
        times=st.integers(1, 4),
        fault=st.sampled_from(list(StoreFault)),
    )
    def trouble(self, what, probability, times, fault):
        self.store.inject(*what, probability=probability, times=times, fault=fault)

    @precondition(lambda self: self.copies)
    @rule(seconds=st.sampled_from([0.01, 0.06, 2.1, 5.1, 61.0]))
    def time_passes(self, seconds):
        self.turn_clock(seconds)

    @precondition(lambda self: self.copies)
    @rule()
    def store_is_well_again(self):
        self.store.heal()
        wait_until(lambda: not self.tier._num_hung)
        self.turn_clock(5.1)
        wait_until(lambda: self.tier.is_healthy)

    @precondition(lambda self: self.copies)
    @rule(
        number=st.integers(0, 100), bit=st.integers(0, 10**6), way=st.sampled_from(["turn", "lose"])
    )
    def damage(self, number, bit, way):
        """Flip a bit of a blob, or evict the blob from the store."""
        self.quiet()
        names = sorted(self.blobs._blobs)
        if names:
            name = names[number % len(names)]
            blob = bytearray(self.blobs._blobs.pop(name))
            if way == "turn":
                blob[bit // 8 % len(blob)] ^= 1 << bit % 8
                self.blobs._blobs[name] = bytes(blob)

    @precondition(lambda self: self.copies)
    @rule(first=st.integers(0, 100), second=st.integers(0, 100))
    def exchange(self, first, second):
        """Exchange two whole entries of a kind, which only the store tier can detect.

        The host tier compares an entry only with facts loaded with the entry.
        """
        self.quiet()
        blobs = self.blobs._blobs
        names = sorted(name for name in blobs if f"{name}/0" in blobs)
        if names:
            one = names[first % len(names)]
            alike = [name for name in names if len(blobs[name]) == len(blobs[one])
                     and len(blobs[f"{name}/0"]) == len(blobs[f"{one}/0"])]  # fmt: skip
            other = alike[second % len(alike)]
            for chunk in ("", "/0"):
                pair = blobs.pop(one + chunk), blobs.pop(other + chunk, None)
                blobs[other + chunk] = pair[0]
                blobs[one + chunk] = pair[0] if pair[1] is None else pair[1]

    @precondition(lambda self: self.copies and self.prefetches)
    @rule(number=st.integers(0, 20))
    def cancel_prefetch(self, number):
        self.prefetches[number % len(self.prefetches)].cancel()

    @precondition(lambda self: self.copies)
    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=4),
        way=st.sampled_from(["leave", "clear", "stay"]),
        write_on_use=st.sampled_from([1, 1, 2]),
    )
    def round_trip(self, prompts, way, write_on_use):
        """Write entries to the store, change the process, and load them."""
        self.ask_all(prompts, 9)
        self.copies.run(99)
        self.context._tiering.poll()
        self.quiet()
        if way == "leave":
            self.leave()
            self.write_on_use = write_on_use
            self.context = self.open_context()
        elif way == "clear":
            self.context.host_tier.clear()
        for stem, tail in prompts:
            self.return_to(stem, [tail] * 9, {})

    def settle(self):
        self.quiet()
        self.quiet()  # first the store's answer, then the loads

    @precondition(lambda self: self.copies)
    @rule()
    def wait(self):
        """Wait for the tiers; advance the clock so that hanging calls time out."""
        self.quiet()
        self.context._tiering.wait()
        self.quiet()

    @invariant()
    def invariants_hold(self):
        super().invariants_hold()
        if hasattr(self, "context") and self.copies:
            self.tier.check_invariants()

    def end_everything(self):
        self.quiet()
        super().end_everything()
        assert all(handle.is_done for handle in self.prefetches)
        stats = self.tier.stats()
        assert stats.loads == stats.restored + sum(stats.refused.values())

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.store.heal()
            if hasattr(self, "context"):
                self.context.close()
            for patch in self.patches:
                patch.stop()
