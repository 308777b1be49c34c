"""A loop that begins each step before the last one's tokens are known gives the same answers."""

import pytest
import torch
from engine_rig import (
    BLOCK,
    MODEL,
    alone,
    cache_config,
    draw_prompt,
    greedy,
    prompts_with_shared_prefixes,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.context import DynamicInferenceContext, Request, RequestStatus
from mamba_cache.errors import BlockCapacityError, CapacityError
from mamba_cache.reference import verify_greedy_on_device


class Successors:
    """Drafts that only the device knows: each token is followed by what followed it last."""

    def __init__(self, max_requests, num_drafts, vocab_size=256):
        self.table = torch.full((vocab_size + 1,), -1)  # the last entry follows -1
        self.last = torch.zeros(max_requests, dtype=torch.int64)
        self.num_drafts = num_drafts

    def propose(self):
        drafts, token = [], self.last
        for _ in range(self.num_drafts):
            token = self.table[token]
            drafts.append(token)
        return torch.stack(drafts, dim=1)

    def learn(self, metadata, sampled):
        rows = metadata.request_rows[: metadata.num_requests].long()
        before = torch.cat([self.last[rows, None], sampled.tokens[:, :-1]], dim=1)
        valid = torch.arange(sampled.tokens.shape[1]) < sampled.counts[:, None]
        self.table[before[valid]] = sampled.tokens[valid]
        self.last[rows] = sampled.tokens.gather(1, sampled.counts[:, None].long() - 1)[:, 0]


class AsyncLoop:
    """Runs prompts; the tokens of a step are looked at when the next one is enqueued."""

    def __init__(self, num_drafts, *, chunk_tokens=1000, **changes):
        config = cache_config(num_speculative_tokens=num_drafts, **changes)
        specs = MODEL.config.state_spec(MODEL.dtype), MODEL.config.kv_spec(MODEL.dtype)
        self.context = DynamicInferenceContext(config, *specs)
        self.drafter = Successors(config.max_requests, num_drafts)
        self.chunk_tokens = chunk_tokens
        self.num_steps = 0
        self.running = []

    def run(self, prompts, max_new_tokens):
        """Return each prompt's answer."""
        waiting, answers = dict(enumerate(prompts)), {name: [] for name in range(len(prompts))}
        is_uncollected = False
        while self.running or waiting:
            step, drafts = self.begin(waiting)
            logits = MODEL.forward(step.metadata, self.context)
            sampled = verify_greedy_on_device(logits, step.metadata, drafts)
            if is_uncollected:
                for name, tokens in self.context.collect_step().items():
                    answers[name] += tokens
            self.context.commit_step(sampled)
            is_uncollected = True
            self.drafter.learn(step.metadata, sampled)
            self.context.check_invariants()
            for name in [n for n in self.running if len(answers[n]) >= max_new_tokens]:
                self.context.finish(name)
                self.running.remove(name)
        self.context.collect_step()
        return [tuple(answers[name][:max_new_tokens]) for name in range(len(prompts))]

    def begin(self, waiting):
        """Begin a step with all who fit; the youngest gives way when memory is short."""
        self.num_steps += 1
        self.schedule(waiting)
        drafts = self.drafter.propose()
        while True:
            try:
                return self.context.begin_step(drafts=drafts), drafts
            except BlockCapacityError:
                self.make_room()

    def schedule(self, waiting):
        context, limit = self.context, {"chunk_tokens": self.chunk_tokens}
        try:
            for name in self.running:
                status = context.status(name)
                if status is RequestStatus.PREFILLING:
                    context.schedule_prefill(name, **limit)
                elif status is RequestStatus.PREEMPTED:
                    context.resume_request(name, **limit)
            while waiting:
                name = next(iter(waiting))
                request = Request(request_id=name, prompt_tokens=waiting[name])
                context.add_request(request, **limit)
                self.running.append(name)
                del waiting[name]
        except CapacityError:
            statuses = {context.status(name) for name in self.running}
            if not statuses & {RequestStatus.SCHEDULED, RequestStatus.DECODING}:
                self.make_room()
                self.schedule(waiting)

    def make_room(self):
        holding = [n for n in self.running if self.context.status(n) != RequestStatus.PREEMPTED]
        self.context.preempt(holding[-1])


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_answers_are_those_of_a_plain_run(rng, num_drafts):
    root = draw_prompt(rng, 2 * BLOCK)
    prompts = [[*root, *draw_prompt(rng, length)] for length in (3, 9, 1)]
    loop = AsyncLoop(num_drafts)
    for _ in range(2):  # the second time from hits, with drafts that are right
        steps = loop.num_steps
        answers = loop.run(prompts, 3 * BLOCK)
        assert answers == [alone(prompt, greedy(3 * BLOCK)) for prompt in prompts]
    assert loop.num_steps - steps < 3 * BLOCK, "no draft was accepted"


def test_requests_preempted_before_their_tokens_are_collected_lose_none(rng):
    prompts = [draw_prompt(rng, length) for length in (20, 13, 9)]
    loop = AsyncLoop(3, num_kv_blocks=8)
    answers = loop.run(prompts, 3 * BLOCK)
    assert answers == [alone(prompt, greedy(3 * BLOCK)) for prompt in prompts]
    assert loop.context.stats().preemptions > 0


@examples(20)
@given(
    prompts=prompts_with_shared_prefixes(4),
    num_drafts=st.integers(1, 3),
    max_new_tokens=st.integers(1, 2 * BLOCK),
    settings=st.fixed_dictionaries(
        {
            "chunk_tokens": st.sampled_from([5, 17, 20]),
            "max_requests": st.integers(1, 5),
            "max_tokens": st.sampled_from([20, 120]),
            "num_kv_blocks": st.integers(13, 24),
            "max_slots": st.sampled_from([0, 1, 4, 32]),
            "eviction_policy": st.sampled_from(["lru", "ref_zero"]),
        }
    ),
)
def test_no_schedule_changes_a_token(prompts, num_drafts, max_new_tokens, settings):
    loop = AsyncLoop(num_drafts, **settings)
    expected = [alone(prompt, greedy(max_new_tokens)) for prompt in prompts]
    for _ in range(2):  # the second time from what the first has saved
        assert loop.run(prompts, max_new_tokens) == expected
