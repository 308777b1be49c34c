"""The copies of a fork, by the kernel and its twin: every forked byte, and no other.

tests/support/context_machine.py checks which of a request's live states is copied.
"""

from functools import partial

import pytest
import torch
from context_rig import BLOCK, MODEL_CONFIG, make_config

from mamba_cache import DynamicInferenceContext, KVCacheSpec, Request, StateSpec
from mamba_cache.context import context as module
from mamba_cache.states import StateCopier

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(2 * BLOCK + 3)]
HYBRIDS = {
    "float64": (MODEL_CONFIG.state_spec(torch.float64), MODEL_CONFIG.kv_spec(torch.float64)),
    "of several dtypes, odd": (
        StateSpec.mamba(3, (5, 3), (1, 7, 3), torch.bfloat16, torch.float32),
        KVCacheSpec(num_layers=2, num_kv_heads=3, head_dim=5, dtype=torch.bfloat16),
    ),
    "without attention": (
        StateSpec.mamba(2, (4, 3), (1, 4, 4), torch.float16, torch.float32),
        KVCacheSpec(num_layers=0, num_kv_heads=1, head_dim=4, dtype=torch.float16),
    ),
}


def as_bytes(tensor):
    return tensor.unsqueeze(-1).view(torch.uint8)


def snapshot(tensor):
    return as_bytes(tensor).cpu().clone()


@pytest.fixture
def make(backend, device, monkeypatch, generator):
    """Return a function that makes decoding contexts over random bits, without a model."""

    def make_context(specs, prompt):
        context = DynamicInferenceContext(
            make_config(enable_prefix_caching=False, max_requests=7), *specs, device=device
        )
        context.add_request(Request(request_id="other", prompt_tokens=prompt))
        context.add_request(Request(request_id="parent", prompt_tokens=prompt))
        context.begin_step()
        context.commit_step({"other": 5, "parent": 5})
        # Only for copies of forks: on the CPU, a step passes lists to its own copies.
        monkeypatch.setattr(module, "StateCopier", partial(StateCopier, backend=backend))
        for tensor in (context.kv_cache, *context.live_states.tensors.values()):
            data = as_bytes(tensor)
            random = torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator)
            data.copy_(random)
        return context

    return make_context


@pytest.mark.parametrize("num_forks", [1, 5])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[: 2 * BLOCK]], ids=["inside", "boundary"])
@pytest.mark.parametrize("specs", HYBRIDS.values(), ids=HYBRIDS)
def test_only_the_unfinished_block_and_the_state_are_copied(make, specs, prompt, num_forks):
    context = make(specs, prompt)
    kv_cache = snapshot(context.kv_cache)
    states = {name: snapshot(tensor) for name, tensor in context.live_states.tensors.items()}
    forks = context.fork("parent", range(num_forks))
    assert len(forks.blocks) == (num_forks if len(prompt) % BLOCK else 0)
    for block in forks.blocks:
        kv_cache[:, :, block] = kv_cache[:, :, forks.source_block]
    assert torch.equal(snapshot(context.kv_cache), kv_cache)
    for name, wanted in states.items():
        wanted[:, list(forks.rows)] = wanted[:, [forks.source_row]]
        assert torch.equal(snapshot(context.live_states[name]), wanted)
