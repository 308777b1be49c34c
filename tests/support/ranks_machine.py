"""A state machine of several ranks in one process, whose tiers behave differently.

Ranks must have equal fingerprints and results, and the answers of uncached runs.
"""

import torch
from context_machine import STEM, Seen
from fingerprints import fingerprint
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from ranks_rig import Exchange, RankedModel, Ranks
from tier_rig import STATE, flip_header
from tiers_machine import PROMPTS, DiskMachine

from mamba_cache.context import PrefetchState


class RanksMachine(DiskMachine):
    """Ranks with host tiers and disks of different sizes, each with its own faults and delays.

    After every call the ranks' fingerprints and results are equal. Each rank's answers equal those
    of an uncached run. A request with damaged bytes on one rank is preempted on all ranks.
    """

    num_ranks = 2
    model = RankedModel()

    def __init__(self):
        self._bad_headers = {}
        super().__init__()

    @property
    def bad_headers(self):
        """Damaged headers of the rank in focus."""
        return self._bad_headers.setdefault(self.context.focus, set())

    @bad_headers.setter
    def bad_headers(self, headers):
        if headers:
            self._bad_headers[self.context.focus] = headers
        else:
            self._bad_headers.clear()

    def lower_settings(self):
        settings = super().lower_settings()
        share = self.opening + 1
        own = {name: max(1, rows // share) for name, rows in self.host_rows.items()}
        return settings | own | {
            "disk_cache_path": f"{self.folder}/{self.opening}",
            "disk_cache_gb": settings["disk_cache_gb"] / share,
        }  # fmt: skip

    def open_context(self, **options):
        exchange, parts = Exchange(self.num_ranks), []
        for rank in range(self.num_ranks):
            self.opening = rank
            parts.append(super().open_context(agreement=exchange, **options))
        return Ranks(parts, exchange)

    def on_each_rank(self):
        """Focus on each rank in turn, then on the rank before."""
        before = self.context.focus
        for rank in range(self.num_ranks):
            self.context.focus = rank
            yield rank
        self.context.focus = before

    @rule(rank=st.integers(0, 2))
    def look_at(self, rank):
        """Apply the tiers' rules to this rank from now on."""
        self.context.focus = rank % self.num_ranks

    @precondition(lambda self: self.copies)
    @rule(paces=st.lists(st.sampled_from([0, 1, 9]), min_size=3, max_size=3))
    def devices_get_on(self, paces):
        """Run each rank's copies up to its own number."""
        for rank in self.on_each_rank():
            self.copies.run(paces[rank])

    def looked_at(self):
        return [
            (part, self._bad_headers.get(rank, ())) for rank, part in enumerate(self.context.parts)
        ]

    def step(self, decode_ids):
        """Run a step; also compare the other ranks' logits, before the commit."""
        commit = self.context.commit_step

        def commit_and_compare(tokens):
            for logits in self.context.logits[1:]:
                for request, row in zip(self.context.steps[0].requests, logits, strict=True):
                    if request.samples and request.request_id not in self.damaged:
                        expected = self.requests[request.request_id].logits(self.uncached)
                        torch.testing.assert_close(row, expected, rtol=0, atol=1e-9)
            return commit(tokens)

        self.context.commit_step = commit_and_compare
        try:
            super().step(decode_ids)
        finally:
            del self.context.commit_step

    @precondition(lambda self: self.copies)
    @rule(number=st.integers(0, 20), rank=st.integers(0, 2))
    def cancel_prefetch(self, number, rank):
        """Cancel a prefetch on one rank; the others see the end when it ends on all ranks."""
        if self.prefetches:
            handles = self.context.of_first[id(self.prefetches[number % len(self.prefetches)])]
            handles[rank % self.num_ranks].cancel()

    @precondition(lambda self: self.copies)
    @rule()
    def poll(self):
        self.context.poll_tiers()
        for handle in self.prefetches:
            own = [each.own_state for each in self.context.of_first[id(handle)]]
            assert handle.is_done == (PrefetchState.PENDING not in own)

    @rule(what=st.sampled_from(["requests", "slots", "slots", "requests", "everything"]))
    def reset(self, what):
        super().reset(what)

    def return_to(self, stem, tail, tenant):
        self.all_get_on()
        seen = Seen((STEM[:stem] + tail or [1])[: self.longest], tenant)
        was_late, self.late.is_late = self.late.is_late, True
        handle = self.begin_prefetch(seen)
        self.context.poll_tiers()
        self.ranks_stand_alike()
        self.late.is_late = was_late
        self.all_get_on()
        self.context.poll_tiers()
        assert handle.is_done
        match = self.context.match(seen.request("probe", list(seen.prompt)))
        if handle.state is PrefetchState.READY and not self.turned:
            assert match.skip_tokens >= handle.skip_tokens
        self.ask(stem, tail, tenant)

    def all_get_on(self):
        for _ in self.on_each_rank():
            self.copies.run(99)
            self.late.flush()
            self.context._tiering.poll()

    @precondition(lambda self: self.copies)
    @rule(
        prompts=st.lists(PROMPTS, min_size=2, max_size=5),
        how=st.sampled_from(["a load fails", "a bit", "a bit of a header"]),
        row=st.integers(0, 30),
    )
    def trouble_on_one_rank(self, prompts, how, row):
        """Make one rank fail to load an entry that all ranks have in host memory."""
        self.ask_all(prompts, 9)
        self.all_get_on()
        self.context.kv_block_allocator.deregister_blocks(self.unused_blocks())
        self.exact = self.keeps_all = False
        self.drop_ended_pins(all_of_them=True)
        if how == "a load fails":
            self.copies.fails.add("load")
        elif how == "a bit":
            self.turn(STATE, row, 3)
        else:
            self.turn(STATE, row, 900, flip_header)
        self.ask_all(prompts, 9)

    def unused_blocks(self):
        """Cached blocks that no request holds."""
        kv_blocks = self.context.kv_block_allocator
        is_unused = (kv_blocks.block_hashes >= 0) & (kv_blocks.block_ref_counts == 0)
        return is_unused.nonzero().flatten().tolist()

    def leave(self, *, is_killed):
        if is_killed:
            for _ in self.on_each_rank():
                self.late.queue.clear()
                self.disk.close()
            self.requests.clear()
            self.forget_all_uncollected()
        else:
            self.end_everything()
            self.context.close()
        self.end_threads()
        self.forget_context()

    def end_threads(self):
        for thread in self.context.threads:
            thread.shutdown()

    @invariant()
    def ranks_stand_alike(self):
        if hasattr(self, "context"):
            fingerprint(self.context)
            for handle in self.prefetches:
                states = {each.state for each in self.context.of_first[id(handle)]}
                assert len(states) == 1, states

    @invariant()
    def each_copy_below_has_its_row(self):
        """Check each rank."""
        if not hasattr(self, "context") or not self.copies:
            return
        prefetches = self.prefetches
        for rank in self.on_each_rank():
            self.prefetches = [self.context.of_first[id(each)][rank] for each in prefetches]
            super().each_copy_below_has_its_row()
        self.prefetches = prefetches

    def end_everything(self):
        for request_id in list(self.requests):
            self.end(request_id)
        self.context.wait_for_tiers()
        for _ in self.on_each_rank():
            assert not any(self.context.host_tier.leases.values())
            assert not self.context.host_tier.lower_leases
        self.context.check_invariants()

    def teardown(self):
        try:
            super().teardown()
        finally:
            if hasattr(self, "context"):
                self.end_threads()
