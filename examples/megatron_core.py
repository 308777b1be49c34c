"""Megatron Core's inference context with this package's slots for saved states, and without cache.

``megatron.installed()`` installs the slots. A stand-in for the model advances a state, which must
be the same at the end without a cache. Needs a CUDA device and Megatron Core (tests: no device).
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from mamba_cache.integrations import megatron

try:
    import_module("megatron.core")
except ImportError as error:
    sys.exit(f"This example needs Megatron Core: {error}. pip install -e '.[megatron]'")
core = partial(import_module, package="megatron.core")
BLOCK, SHAPES = 128, ((6, 4), (2, 3, 5), torch.float32, torch.float32)
SYSTEM = b"You are a librarian. Answer in one sentence, and name the shelf on which it stands. " * 8
QUESTIONS = (b"Where are the books on birds?", b"Which shelf has the oldest maps?", b"Who drew it?")


def make_context(*, cached: bool) -> Any:
    """Return a context with room for a few prompts."""
    model = core(".transformer.transformer_config").TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=2, params_dtype=torch.float32
    )
    config, layers = core(".inference.config"), ["M", "*", "M"]
    states = config.MambaInferenceStateConfig(layers, *SHAPES, mamba_chunk_size=BLOCK)
    settings = config.InferenceConfig(
        block_size_tokens=BLOCK, buffer_size_gb=0.002, max_requests=4, max_tokens=16 * BLOCK,
        max_sequence_length=16 * BLOCK, enable_prefix_caching=cached,
        prefix_caching_eviction_policy=config.PrefixCachingEvictionPolicy.LRU,
        prefix_caching_mamba_gb=0.0001 if cached else None, mamba_inference_state_config=states,
    )  # fmt: skip
    return core(".inference.contexts.dynamic_context").DynamicInferenceContext(model, settings)


def forward(context: Any) -> tuple[int, torch.Tensor]:
    """Stand in for the model; return the number of computed tokens and the state after them."""
    meta, slots = context.mamba_metadata, context.mamba_slot_allocator
    tokens = context.current_input_and_position_ids()[0][0].tolist()[: context.active_token_count]
    row = int(meta.batch_indices_prefill[0])
    conv, ssm, after = context.mamba_conv_states[:, row], context.mamba_ssm_states[:, row], []
    for begin, end in pairwise(meta.cu_chunk_seqlens.tolist()):
        for token in tokens[begin:end]:
            conv.copy_(conv.roll(-1, dims=-1))[..., -1] = token
            ssm.mul_(0.99).add_(token)
        after.append((conv.clone(), ssm.clone()))
    if slots is not None:  # hand over the states to save, as Megatron's mixer does
        due = meta.intermediate_chunk_indices.tolist()
        for place, chunk in enumerate(due[: getattr(meta, "intermediate_real_count", None)]):
            slots.intermediate_conv_out[:, place] = after[chunk][0]
            slots.intermediate_ssm_out[:, place] = after[chunk][1]
        slots.commit_intermediate_states()
    return len(tokens), ssm.clone()


def run(*, cached: bool) -> list[tuple[int, torch.Tensor]]:
    """Compute every prompt; return the number of its computed tokens and its end state."""
    context, found = make_context(cached=cached), []
    sampling = core(".inference.sampling_params").SamplingParams(num_tokens_to_generate=8)
    device = context.token_to_input_ids.device
    for question in QUESTIONS:
        request = core(".inference.inference_request").DynamicInferenceRequest(
            request_id=1, prompt_tokens=torch.tensor(list(SYSTEM + question), device=device),
            sampling_params=sampling, block_size_tokens=BLOCK, enable_prefix_caching=cached,
        )  # fmt: skip
        context.add_request(request, prefill_chunk_length=len(SYSTEM + question))
        context.initialize_attention_state()
        found.append(forward(context))
        context.update_requests(*torch.zeros(2, 1, dtype=torch.int32, device=device))  # it ends
    return found


def main() -> int:
    """Compute all prompts with the cache and without, and compare; return the exit status."""
    with megatron.installed():
        with_cache = run(cached=True)
    without = run(cached=False)
    for (some, _), (every, _) in zip(with_cache, without, strict=True):
        print(f"prompt of {every} tokens: {some:3} computed with the cache, {every} without")
    same = all(torch.equal(a, b) for (_, a), (_, b) in zip(with_cache, without, strict=True))
    print(f"States with and without the cache {'agree' if same else 'DO NOT AGREE'}, bit by bit.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
