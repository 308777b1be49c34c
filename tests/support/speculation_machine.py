"""A machine of steps with drafts: any of them right, any number of them accepted.

The tokens of a step are given on the host, or on the device and collected later, when the next
step may have begun.
"""

import numpy as np
import pytest
import torch
from context_machine import MODES, ContextMachine
from context_rig import BLOCK, VOCAB, UncachedRuns, saved_prefix_lengths
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from mamba_cache import DeviceTokens
from mamba_cache.context import RequestStatus
from mamba_cache.errors import CapacityError, StepOrderError

DRAFTS = 3
LONGEST_ANSWER = 28
UNCACHED = UncachedRuns(LONGEST_ANSWER + 2 * DRAFTS + 2)


class SpeculationMachine(ContextMachine):
    """Draws drafts, right and wrong ones, and how many tokens of each step are taken.

    ``Seen.generated`` holds all tokens that were sampled; ``self.uncollected`` says which of them
    the context does not know yet, by request.
    """

    longest_answer = LONGEST_ANSWER
    uncached = UNCACHED
    num_drafts = DRAFTS

    def more_settings(self):
        self.uncollected = {}
        self.is_uncollected = False
        self.lengths_before = {}
        return {"num_speculative_tokens": self.num_drafts}

    @precondition(lambda self: self.can_step())
    @rule(
        data=st.data(),
        on_device=st.booleans(),
        by_row=st.booleans(),
        late=st.booleans(),
        some=st.booleans(),
        times=st.integers(1, 4),
        mode=MODES,
    )
    def speculate(self, data, some, times, mode, **how):
        """Steps of decoding requests with drafts, beside whatever can be scheduled."""
        for _ in range(times):
            for chosen in self.with_status(RequestStatus.PREFILLING):
                try:
                    self.context.schedule_prefill(chosen)
                except CapacityError:
                    continue
            decoding = self.with_status(RequestStatus.DECODING)
            if self.can_step():
                chosen = decoding[::2] if some and decoding else decoding
                with torch.inference_mode(mode):
                    self.run_step(data, chosen, **how)

    @precondition(lambda self: self.is_uncollected)
    @rule()
    def collect(self):
        collected = self.context.collect_step()
        assert collected == self.uncollected
        self.forget_all_uncollected()
        for request_id in collected:
            self.publish_decoded(request_id)
        self.remember_states()

    def step(self, decode_ids):
        """The other machine's steps: without drafts, with tokens on the host."""
        if decode_ids is None:
            decode_ids = self.with_status(RequestStatus.DECODING)
        self.run_step(None, decode_ids, on_device=False, by_row=False, late=False)

    def run_step(self, data, decoding, *, on_device, by_row, late):
        drafts = {i: self.draw_drafts(data, self.requests[i]) for i in decoding}
        if self.is_uncollected and not late:
            self.collect()
        given = self.by_row(drafts) if by_row else self.cut(drafts)
        if not by_row and self.uses_arrays():
            given = self.in_order(given)
        if not self.can_step():
            return
        step = self.begin(decoding, drafts=given)
        if self.is_uncollected:
            self.collect()
        if step is not None:
            tokens = list(self.accepted(data, step, drafts))
            self.commit(step, tokens, on_device=on_device)
            self.finish_those_with(self.longest_answer)

    def draw_drafts(self, data, seen):
        """Tokens of which the first few are right."""
        if data is None:
            return []
        count = data.draw(st.integers(0, self.num_drafts), label="drafts")
        right = data.draw(st.integers(0, self.num_drafts), label="right ones")
        drafts = [self.wanted(seen, i) for i in range(count)]
        return [(t + (i >= right)) % VOCAB for i, t in enumerate(drafts)]

    def wanted(self, seen, index):
        return int(seen.logits(self.uncached, index).argmax())

    def cut(self, drafts):
        """On the host drafts must fit whatever the outcome of the last step is."""
        table = self.context.request_table
        room = {
            a.request_id: self.longest - table.num_computed[a.row] - table.num_in_doubt[a.row] - 1
            for a in table
        }
        return {i: tokens[: max(0, room[i])] for i, tokens in drafts.items()}

    def in_order(self, drafts):
        """As an array in the order of the requests that decode."""
        array = np.full((len(drafts), self.num_drafts), -1)
        for row, tokens in zip(array, drafts.values(), strict=True):
            row[: len(tokens)] = tokens
        return array

    def by_row(self, drafts):
        rows = {active.request_id: active.row for active in self.context.request_table}
        tensor = torch.full((self.context.config.max_requests, self.num_drafts), -1)
        for request_id, tokens in drafts.items():
            tensor[rows[request_id], : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return tensor

    def accepted(self, data, step, drafts):
        """The tokens that greedy verification takes of each request, some cut short."""
        logits = iter(self.model.forward(step.metadata, self.caches()))
        for request in step.requests:
            seen = self.requests[request.request_id]
            rows = [next(logits) for _ in range(1 if request.is_prefill else request.num_tokens)]
            taken = []
            if request.samples:
                drafted = [] if request.is_prefill else drafts[request.request_id]
                taken = self.verify(seen, drafted[: len(rows) - 1], rows)
            if data is not None and not request.is_prefill:
                least = 0 if self.num_drafts else 1
                taken = taken[: data.draw(st.integers(least, 2 + DRAFTS), label="taken")]
            yield taken

    def verify(self, seen, drafted, rows):
        taken = []
        for index, row in enumerate(rows):
            wanted = seen.logits(self.uncached, index)
            torch.testing.assert_close(row, wanted, rtol=0, atol=1e-9)
            taken.append(self.wanted(seen, index))
            if index == len(drafted) or drafted[index] != taken[-1]:
                return taken
        raise AssertionError("more drafts than tokens computed")

    def commit(self, step, tokens, *, on_device):
        sampled = {r.request_id: t for r, t in zip(step.requests, tokens, strict=True) if r.samples}
        decoded = {request.request_id for request in step.requests if not request.is_prefill}
        if on_device:
            padded = torch.full((len(tokens), 1 + self.num_drafts), -5)
            for row, new in zip(padded, tokens, strict=True):
                row[: len(new)] = torch.tensor(new, dtype=torch.int64)
            counts = None
            if self.num_drafts:
                counts = torch.tensor([len(new) for new in tokens], dtype=torch.int32)
            self.context.commit_step(DeviceTokens(padded, counts))
            self.uncollected, self.is_uncollected = dict(sampled), True
        else:
            self.commit_on_host(sampled)
        for request in step.requests:
            if request.is_prefill:
                self.publish(self.requests[request.request_id], request)
        for request_id, new in sampled.items():
            before = len(self.requests[request_id].tokens)
            # What a prefill saves is up to the placement.
            self.lengths_before[request_id] = before if request_id in decoded else before + BLOCK
            self.requests[request_id].generated += new
            if not on_device:
                self.publish_decoded(request_id)
        self.remember_states()

    def commit_on_host(self, sampled):
        if not self.uses_arrays():
            ints = {i: new[0] if len(new) == 1 else new for i, new in sampled.items()}
            self.context.commit_step(ints)
            return
        padded = np.full((len(sampled), 2 + DRAFTS), -5)
        for row, new in zip(padded, sampled.values(), strict=True):
            row[: len(new)] = new
        self.context.commit_step(padded, [len(new) for new in sampled.values()])

    def publish_decoded(self, request_id):
        """All complete blocks before the last token are findable, and the newest with its state."""
        seen = self.requests[request_id]
        for boundary in range(BLOCK, len(seen.tokens), BLOCK):
            self.published.add(seen.prefix(boundary))
            self.perhaps_saved.add(seen.prefix(boundary))
        self.check_found(seen, len(seen.tokens) - 1)
        newest = (len(seen.tokens) - 1) // BLOCK * BLOCK
        is_reached = newest >= self.lengths_before[request_id] and not seen.tenant
        if is_reached and self.keeps_all and self.context.config.save_decode_states:
            saved = saved_prefix_lengths(self.context, list(seen.tokens[:newest]))
            assert newest // BLOCK in saved

    def can_be_forked(self, request_id):
        if request_id not in self.uncollected:
            return True
        with pytest.raises(StepOrderError, match="collect_step"), self.unchanged_by_an_error():
            self.context.fork(request_id, [self.next_id])
        return False

    def forget_uncollected(self, request_id):
        lost = self.uncollected.pop(request_id, [])
        seen = self.requests[request_id]
        seen.generated = seen.generated[: len(seen.generated) - len(lost)]

    def forget_all_uncollected(self):
        self.uncollected, self.is_uncollected = {}, False

    def forget(self):
        super().forget()
        self.forget_all_uncollected()
