"""Forks on a GPU: bit-equal to their parents, right answers, and no waiting."""

import pytest
import torch
from context_rig import BLOCK, VOCAB, UncachedRuns, make_config, make_context
from gpu_rig import BUSY_CYCLES, waiting_raises

from mamba_cache.context import Request

pytestmark = pytest.mark.gpu

PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(2 * BLOCK + 3)]
DRAFTS = 2
UNCACHED = UncachedRuns(3 * BLOCK)


@pytest.fixture(params=[0, DRAFTS], ids=["without drafts", "with drafts"])
def context(request):
    return make_context(make_config(num_speculative_tokens=request.param), device="cuda")


def run_step(context, model, **options):
    step = context.begin_step(**options)
    logits = model.forward(step.metadata, context).cpu()
    context.commit_step(logits.argmax(1).tolist())
    return dict(zip(step.request_ids, logits, strict=True))


def tokens_of(context, name):
    return tuple(PROMPT) + tuple(context.output(name))


def test_forks_go_on_as_their_tokens_say(context, model):
    context.add_request(Request(request_id="parent", prompt_tokens=PROMPT))
    for _ in range(3):
        run_step(context, model)
    for new_ids in (["a"], ["b", "c"]):  # the second fork finds the copiers made
        with waiting_raises():
            torch.cuda._sleep(BUSY_CYCLES)
            context.fork("parent", new_ids, last_tokens=[4, 5][: len(new_ids)])
    starts = {name: tokens_of(context, name) for name in ("parent", "a", "b", "c")}
    for index in range(2 * BLOCK):
        for name, logits in run_step(context, model).items():
            expected = UNCACHED.logits(starts[name], index)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
        if index == BLOCK:
            context.preempt("b")
            context.resume_request("b")  # restored on the side stream, beside the others
        context.check_invariants()
    assert context.stats().forks == 3
