"""The whole step on a GPU: exact, and without waiting for the device."""

import gc

import context_rig
import pytest
import torch
from context_rig import BLOCK, MODEL_CONFIG, VOCAB, assert_same_run, make_config
from gpu_rig import waiting_raises

from mamba_cache.cache import EveryNthBlock
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.reference import HybridModel

pytestmark = pytest.mark.gpu

STEM = [(7 * i * i + 3 * i) % VOCAB for i in range(4 * BLOCK)]
PROMPTS = [STEM[: 2 * BLOCK + n] + [n] * (3 * n) for n in range(1, 5)]


def make_context():
    return context_rig.make_context(device="cuda", placement=EveryNthBlock(1))


@pytest.fixture
def context():
    return make_context()


def run(context, model, prompts, num_tokens, chunk_tokens=None):
    """Greedy tokens and logits of prompts that run together."""
    tokens, logits = {n: [] for n in prompts}, {n: [] for n in prompts}
    with waiting_raises():
        for name, prompt in prompts.items():
            context.add_request(
                Request(request_id=name, prompt_tokens=prompt), chunk_tokens=chunk_tokens
            )
    while min(map(len, tokens.values())) < num_tokens:
        for name in prompts:
            if context.status(name).value == "prefilling":
                context.schedule_prefill(name, chunk_tokens=chunk_tokens)
        with waiting_raises():
            step = context.begin_step()
            rows = model.forward(step.metadata, context)
        sampled = {}
        for request, row in zip(step.requests, rows.cpu(), strict=True):
            if request.samples:
                sampled[request.request_id] = int(row.argmax())
                logits[request.request_id].append(row)
        with waiting_raises():
            context.commit_step(sampled)
        for name, token in sampled.items():
            tokens[name].append(token)
    for name in prompts:
        context.finish(name)
    context.check_invariants()
    return {name: (tokens[name], logits[name]) for name in prompts}


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_hits_equal_runs_without_a_cache(context, model, chunk_tokens):
    """Compare with the CPU's run without a cache, with the same weights in float64."""
    for _ in range(2):
        runs = run(context, model, dict(enumerate(PROMPTS)), 2 * BLOCK, chunk_tokens)
        for name, prompt in enumerate(PROMPTS):
            assert_same_run(runs[name], prompt)
    assert context.stats().hits >= len(PROMPTS)


def test_bfloat16_model_keeps_its_state_in_float32():
    """SGLang 33515: a pool in bf16 under a kernel in fp32 made a hit differ from a miss."""
    model = HybridModel(MODEL_CONFIG, dtype=torch.bfloat16, device="cuda", seed=1)
    context = DynamicInferenceContext(
        make_config(),
        MODEL_CONFIG.state_spec(torch.bfloat16),
        MODEL_CONFIG.kv_spec(torch.bfloat16),
        device="cuda",
    )
    assert context.slot_allocator.ssm_states.dtype == torch.float32
    prompt = [*STEM, 1]

    def first_logits(name):
        context.add_request(Request(request_id=name, prompt_tokens=prompt))
        step = context.begin_step()
        logits = model.forward(step.metadata, context)
        context.commit_step({name: 0})
        context.finish(name)
        return step, logits

    _, miss = first_logits("miss")
    step, hit = first_logits("hit")
    assert step.requests[0].skip_tokens == 4 * BLOCK
    torch.testing.assert_close(hit, miss, rtol=0.02, atol=0.02)


def test_a_dropped_context_gives_its_device_memory_back(model):
    run(make_context(), model, {"warm-up": PROMPTS[0]}, 2)
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        context = make_context()
        run(context, model, {"a": PROMPTS[0]}, 2)
        held = torch.cuda.memory_allocated()
        large = [context.kv_cache, *context.live_states.tensors.values()]
        num_bytes = sum(tensor.nbytes for tensor in large)
        assert held - before > num_bytes
        del context, large
        assert torch.cuda.memory_allocated() - before < num_bytes // 2
    finally:
        gc.enable()


def test_the_gpu_may_be_the_default_device(context, model):
    """Found by search: host tensors were made on the GPU, and could not be pinned."""
    prompts = dict(enumerate(PROMPTS))
    with torch.device("cuda"):
        other = make_context()
    for _ in range(2):
        expected = run(context, model, prompts, BLOCK)
        with torch.device("cuda"):
            got = run(other, model, prompts, BLOCK)
        for name, (tokens, logits) in expected.items():
            assert got[name][0] == tokens
            assert torch.equal(torch.stack(got[name][1]), torch.stack(logits))
    assert other.stats().hits == context.stats().hits >= len(PROMPTS)


@pytest.mark.parametrize("starts_in", [False, True])
def test_steps_may_be_in_and_out_of_inference_mode(model, starts_in):
    with torch.inference_mode(starts_in):
        context = make_context()
    for number in range(4):
        with torch.inference_mode((number % 2 == 0) == starts_in):
            runs = run(context, model, dict(enumerate(PROMPTS)), BLOCK)
        for name, prompt in enumerate(PROMPTS):
            assert_same_run(runs[name], prompt)
    assert context.stats().hits >= 3 * len(PROMPTS)
