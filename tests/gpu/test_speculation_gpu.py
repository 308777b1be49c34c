"""Drafts verified on a GPU, a step ahead of the host: right, and without waiting for the device."""

import pytest
import torch
from context_rig import BLOCK, VOCAB, make_config, make_context, saved_prefix_lengths, uncached
from gpu_rig import waiting_raises

from mamba_cache.context import Request
from mamba_cache.reference import verify_greedy_on_device

pytestmark = pytest.mark.gpu

DRAFTS = 3
PROMPTS = [[(7 * i * i + 3 * i + n) % VOCAB for i in range(2 * BLOCK + n)] for n in range(4)]
ANSWER = 4 * BLOCK


@pytest.fixture
def context():
    return make_context(make_config(num_speculative_tokens=DRAFTS), device="cuda")


class TrueDrafts:
    """Drafts on the device: the true answers, with every fifth token wrong."""

    def __init__(self, answers):
        self.table = torch.full((4, 2 * ANSWER), -1, device="cuda")
        for row, answer in enumerate(answers):
            self.table[row, : len(answer)] = torch.tensor(answer)
        self.table[:, ::5] = (self.table[:, ::5] + 1) % VOCAB
        self.known = torch.zeros(4, dtype=torch.int64, device="cuda")

    def drafts(self):
        places = self.known[:, None] + torch.arange(DRAFTS, device="cuda")
        return self.table.gather(1, places)

    def note(self, metadata, sampled):
        rows = metadata.request_rows[: metadata.num_requests].long()
        self.known[rows] += sampled.counts


def run_ahead(context, model, prompts, answers):
    """Answers of prompts that run together; each step begins before the last one's tokens arrive.

    Requests get rows 0, 1, ... in order, as the context gives them.
    """
    collected = [[] for _ in prompts]
    foreteller = TrueDrafts(answers)
    torch.cuda.synchronize()
    for number, prompt in enumerate(prompts):
        context.add_request(Request(request_id=number, prompt_tokens=prompt))
    is_uncollected, num_steps = False, 0
    while min(map(len, collected)) < ANSWER:
        with waiting_raises():
            drafts = foreteller.drafts()
            step = context.begin_step(drafts=drafts)
            logits = model.forward(step.metadata, context)
            sampled = verify_greedy_on_device(logits, step.metadata, drafts)
        if is_uncollected:
            for number, tokens in context.collect_step().items():
                collected[number] += tokens
        with waiting_raises():
            foreteller.note(step.metadata, sampled)
            context.commit_step(sampled)
        is_uncollected, num_steps = True, num_steps + 1
    for number, tokens in context.collect_step().items():
        collected[number] += tokens
        context.finish(number)
    context.check_invariants()
    return [tokens[:ANSWER] for tokens in collected], num_steps


def test_answers_are_those_of_plain_runs(context, model):
    expected = [uncached(prompt, ANSWER + 2 * DRAFTS + 2)[0] for prompt in PROMPTS]
    longer = [
        [*prompt, *answer[: 2 * BLOCK]] for prompt, answer in zip(PROMPTS, expected, strict=True)
    ]
    answers, num_steps = run_ahead(context, model, PROMPTS, expected)
    assert answers == [answer[:ANSWER] for answer in expected]
    assert num_steps < ANSWER  # drafts were accepted
    # The next turn resumes from states saved inside accepted drafts.
    for prompt in longer:
        assert max(saved_prefix_lengths(context, prompt), default=0) > 0
    rest = [uncached(prompt, ANSWER + 2 * DRAFTS + 2)[0] for prompt in longer]
    again, _ = run_ahead(context, model, longer, rest)
    assert again == [answer[:ANSWER] for answer in rest]
    assert context.stats().hits == len(PROMPTS)
