"""A context with tiers, pins, verified hits and the log of requests, in any order."""

import tempfile
from pathlib import Path

from example_counts import examples
from fresh_examples import all_drawn
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from store_machine import StoreMachine
from tiers_machine import DiskMachine, TieredMachine
from verification_rig import take, verify

from mamba_cache.context.verification import MAX_WAITING
from mamba_cache.integrations.trace import TraceLog


class Watched:
    """Verified hits, pins and the log of requests, added to the machine of a tier.

    Whatever tiers lose or damage, steps abort and pins hold, a hit equals the model's own result,
    and each request is in the trace.
    """

    def __init__(self):
        super().__init__()
        self.home = tempfile.TemporaryDirectory(prefix="mamba-cache-watched-")
        self.num_added = 0

    def more_settings(self):
        return super().more_settings() | {
            "verify_hits": 1.0,
            "max_pinned_share": 0.5,
        }

    def open_context(self, **options):
        context = super().open_context(**options)
        self.num_added = 0
        self.trace = TraceLog(Path(self.home.name, "trace"))
        context.listeners.add(self.trace)
        add_request = context.add_request

        def add(*args, **kwargs):
            admission = add_request(*args, **kwargs)
            self.num_added += 1
            return admission

        context.add_request = add
        return context

    @precondition(lambda self: self.context.verification_stats().waiting)
    @rule(count=st.integers(1, 6))
    def verify_some(self, count):
        for _ in range(count):
            hit = take(self.context)
            if hit is None:
                return
            assert verify(self.context, hit) == []

    @rule()
    def cannot_verify(self):
        hit = take(self.context)
        if hit is not None:
            self.context._memory.verifier.judge(hit, None)

    @invariant()
    def verified_hits_are_right(self):
        if not hasattr(self, "context"):
            return
        stats = self.context.verification_stats()
        assert stats.sampled == stats.verified + stats.waiting + stats.skipped
        assert not any(stats.differences.values())
        assert stats.waiting <= MAX_WAITING

    @invariant()
    def each_request_is_traced(self):
        if hasattr(self, "context"):
            self.trace.flush()
            assert (self.trace.num_written, self.trace.num_dropped) == (self.num_added, 0)

    def teardown(self):
        try:
            super().teardown()
        finally:
            if hasattr(self, "trace"):
                self.trace.close()
            self.home.cleanup()


class WatchedDiskMachine(Watched, DiskMachine):
    """The machine over a host tier and a disk."""


class WatchedStoreMachine(Watched, StoreMachine):
    """The machine over a host tier and a store."""


TestTieredMachine = all_drawn(TieredMachine.TestCase)
TestTieredMachine.settings = examples(100)
TestWatchedDiskMachine = all_drawn(WatchedDiskMachine.TestCase)
TestWatchedDiskMachine.settings = examples(60)
TestWatchedStoreMachine = all_drawn(WatchedStoreMachine.TestCase)
TestWatchedStoreMachine.settings = examples(30)
