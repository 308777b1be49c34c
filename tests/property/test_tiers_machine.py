"""Context and host tier together under every order of calls, and of copies that come late."""

import torch
from context_machine import ContextMachine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tier_rig import (
    KV,
    STATE,
    CopyError,
    LateTransfers,
    always,
    cached_rows,
    flip,
    flip_header,
)

from mamba_cache.context import RequestStatus


class Copies(LateTransfers):
    """Copies that are late, and raise when they are told to."""

    fails = ()

    def spill(self, jobs):
        if "spill" in self.fails:
            self._transfers.spill(jobs[: len(jobs) // 2])
            raise CopyError
        return super().spill(jobs)

    def load(self, jobs):
        if "load" in self.fails:
            self._transfers.load(jobs[: len(jobs) // 2])
            raise CopyError
        return super().load(jobs)


class TieredMachine(ContextMachine):
    """Small pools on the GPU; a tier that holds little or all; answers as without a cache.

    A bit that is turned in a row is found before anything that depends on it is told or findable.
    """

    def more_settings(self):
        return {"num_host_blocks": 24, "num_host_states": 5, "max_tier_copies": 12}

    def forget(self):
        super().forget()
        tiering = self.context._tiering
        if tiering is not None and not isinstance(tiering.transfers, Copies):
            tiering.transfers = Copies(tiering.transfers)
            tiering.planner = always()

    pace = 9

    @property
    def copies(self):
        tiering = self.context._tiering
        return None if tiering is None else tiering.transfers

    @precondition(lambda self: self.copies)
    @rule(
        stems=st.lists(st.sampled_from([16, 24, 32, 40]), min_size=2, max_size=4),
        tails=st.lists(st.integers(0, 3), min_size=4, max_size=4),
        turned=st.none() | st.integers(0, 10**6),
    )
    def traffic(self, stems, tails, turned):
        """Requests one after the other, so that what the first ones have left is evicted."""
        self.copies.run(9)
        self.context._tiering.poll()
        rows = cached_rows(self.context, STATE)
        if turned is not None and rows:
            bits = 8 * self.copies._transfers._layouts[STATE].payload_bytes
            flip(self.context, STATE, rows[turned % len(rows)], turned % bits)
        for stem, tail in zip(stems, tails, strict=False):
            before = set(self.requests)
            self.add(stem, [tail] * 9, {}, None, [])
            if self.can_step():
                self.step(None)
            for request_id in set(self.requests) - before:
                self.end(request_id)

    @precondition(lambda self: self.copies)
    @rule(pace=st.sampled_from([0, 1, 9, 9, 9, 9]))
    def device_gets_on(self, pace):
        """By so many copies each way now, and after each step."""
        self.pace = pace
        self.copies.run(pace)

    @precondition(lambda self: self.copies)
    @rule(fails=st.sampled_from([(), (), (), (), ("spill",), ("load",)]))
    def copies_fail(self, fails):
        self.copies.fails = fails

    @precondition(lambda self: self.copies)
    @rule()
    def wait(self):
        self.context.wait_for_tiers()

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), kind=st.sampled_from([KV, STATE]), is_header=st.booleans())
    def turn_a_bit(self, data, kind, is_header):
        rows = cached_rows(self.context, kind)
        if not rows:
            return
        row = data.draw(st.sampled_from(rows))
        if is_header:
            flip_header(self.context, kind, row, data.draw(st.integers(0, 8 * 256 - 1)))
        else:
            layout = self.copies._transfers._layouts[kind]
            end = layout.checksums.stop
            flip(self.context, kind, row, data.draw(st.integers(0, 8 * end - 1)))

    @rule(what=st.sampled_from(["requests", "slots", "slots", "requests", "everything"]))
    def reset(self, what):
        super().reset(what)

    @precondition(lambda self: self.copies)
    @rule()
    def clear_tier(self):
        self.context.host_tier.clear()

    def begin(self, decode_ids=None, **drafts):
        """As ever, but what a damaged row brought is not compared."""
        self.damaged = set()
        admitted = {i: seen.admission for i, seen in self.requests.items()}
        begin_step = self.context.begin_step

        def begin_and_look(*args, **kwargs):
            step = begin_step(*args, **kwargs)
            for active in self.context._runner._prefills:
                load = active.chunk.load
                if load is not None:
                    own = range(load.first_job, load.first_job + len(load.leases))
                    # The ticket below that of the late device: it knows at once.
                    if set(load.ticket._run().damaged()) & set(own):
                        self.damaged.add(active.request_id)
                        self.requests[active.request_id].admission = None
            return step

        self.context.begin_step = begin_and_look
        try:
            return super().begin(decode_ids, **drafts)
        finally:
            del self.context.begin_step
            for request_id in self.damaged:
                self.requests[request_id].admission = admitted[request_id]

    def step(self, decode_ids):
        step = self.begin(decode_ids)
        if step is None:
            return
        logits = self.model.forward(step.metadata, self.caches())
        new_tokens = {}
        for request, row in zip(step.requests, logits, strict=True):
            if request.samples:
                wanted = self.requests[request.request_id].logits(self.uncached)
                if request.request_id not in self.damaged:
                    torch.testing.assert_close(row, wanted, rtol=0, atol=1e-9)
                new_tokens[request.request_id] = int(wanted.argmax())
        preempted = self.context.commit_step(
            [*new_tokens.values()] if self.uses_arrays() else new_tokens
        )
        assert set(preempted) == self.damaged
        for request_id in preempted:
            assert self.context.status(request_id) is RequestStatus.PREEMPTED
        for request in step.requests:
            if request.request_id not in self.damaged:
                self.publish(self.requests[request.request_id], request)
        for request_id, token in new_tokens.items():
            if request_id not in self.damaged:
                self.requests[request_id].generated.append(token)
        self.remember_states()
        self.finish_those_with(self.longest_answer)
        if self.copies:
            self.copies.run(self.pace)

    def teardown(self):
        """Nothing is leaked: when all requests are over, and all copies, no row is held."""
        if hasattr(self, "context") and self.copies:
            for request_id in list(self.requests):
                self.end(request_id)
            self.context.wait_for_tiers()
            assert not any(self.context.host_tier.leases.values())
            self.context.check_invariants()


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=2 * settings.default.max_examples)
