"""A state machine of steps with drafts: any drafts are right, any number is accepted.

The tokens of a step are passed on the host, or on the device and collected later, possibly after
the next step has begun.
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
    """Draws right and wrong drafts, and the number of tokens of each step to commit.

    ``Seen.generated`` has all sampled tokens; ``self.uncollected`` has those not collected yet, by
    request.
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
        """Run steps of decoding requests with drafts, and of all requests that can be scheduled."""
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
        """Run a step of the base machine: without drafts, with tokens on the host."""
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
        """Drafts of which only the first few are right."""
        if data is None:
            return []
        count = data.draw(st.integers(0, self.num_drafts), label="drafts")
        right = data.draw(st.integers(0, self.num_drafts), label="right ones")
        drafts = [self.expected_token(seen, i) for i in range(count)]
        return [(t + (i >= right)) % VOCAB for i, t in enumerate(drafts)]

    def expected_token(self, seen, index):
        return int(seen.logits(self.uncached, index).argmax())

    def cut(self, drafts):
        """Cut drafts on the host, which must fit for any outcome of the last step."""
        table = self.context.request_table
        room = {
            a.request_id: self.longest
            - table.num_computed[a.row]
            - table.num_uncollected[a.row]
            - 1
            for a in table
        }
        return {i: tokens[: max(0, room[i])] for i, tokens in drafts.items()}

    def in_order(self, drafts):
        """Drafts as an array in the order of the decoding requests."""
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
        """The accepted tokens of each request, some of them cut short."""
        logits = iter(self.model.forward(step.metadata, self.caches()))
        for request in step.requests:
            seen = self.requests[request.request_id]
            rows = [next(logits) for _ in range(1 if request.is_prefill else request.num_tokens)]
            taken = []
            if request.samples:
                drafted = [] if request.is_prefill else drafts[request.request_id]
                taken = self.verify(seen, drafted[: len(rows) - 1], rows)
            if data is not None and not request.is_prefill:
                minimum = 0 if self.num_drafts else 1
                taken = taken[: data.draw(st.integers(minimum, 2 + DRAFTS), label="taken")]
            yield taken

    def verify(self, seen, drafted, rows):
        taken = []
        for index, row in enumerate(rows):
            expected = seen.logits(self.uncached, index)
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-9)
            taken.append(self.expected_token(seen, index))
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
            # The placement decides which states a prefill saves.
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
        """Check that all complete blocks before the last token match, the newest with a state."""
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
