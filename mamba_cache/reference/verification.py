"""Prefixes computed without a cache, to be compared with what a cache has of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, HitToVerify, Request
from mamba_cache.states import PrefixContent

if TYPE_CHECKING:  # it calls this
    from mamba_cache.reference.engine import LanguageModel

__all__ = ["compute_prefix"]

_DECODED = 8
"""Tokens at the end that are computed one by one, as answers are."""


def compute_prefix(
    model: LanguageModel,
    context: DynamicInferenceContext,
    hit: HitToVerify,
    *,
    in_pieces: bool = False,
) -> PrefixContent:
    """Compute a hit's prefix with a context of its own, which is given up afterwards.

    Args:
        model: Computes the steps.
        context: Whose hit it is; it is not touched.
        hit: The hit.
        in_pieces: Compute it block by block, and its last tokens one by one, rather than in steps
            that are as long as they may be.
    """
    config, tokens = context.config, hit.tokens
    size, count = config.block_size_tokens, len(tokens)
    own = CacheConfig(
        block_size_tokens=size,
        max_requests=1,
        max_tokens=config.max_tokens,
        max_sequence_length=count + 1,
        num_kv_blocks=-(-(count + 1) // size),
        ssm_chunk_size=config.ssm_chunk_size,
        enable_prefix_caching=False,
        vocab_size=config.vocab_size,
    )
    shape = model.config
    alone = DynamicInferenceContext(
        own, shape.state_spec(model.dtype), shape.kv_spec(model.dtype), device=model.device
    )
    chunk = min(size, config.max_tokens) if in_pieces else config.max_tokens
    row, blocks = _run(model, alone, hit, chunk, _DECODED if in_pieces else 0)
    states = {name: tensor[:, row] for name, tensor in alone.live_states.tensors.items()}
    assert alone.kv_cache is not None, "a language model has a kv_spec"
    return PrefixContent(states, alone.kv_cache[:, :, blocks].flatten(2, 3)[:, :, :count])


def _run(
    model: LanguageModel,
    context: DynamicInferenceContext,
    hit: HitToVerify,
    chunk: int,
    num_decoded: int,
) -> tuple[int, list[int]]:
    """Compute a prefix as one request; return its row and its blocks, of a step in flight."""
    tokens = hit.tokens
    split = max(len(tokens) - num_decoded, 1)
    request = Request(
        request_id=0,
        prompt_tokens=tokens[:split],
        lora_id=hit.request.lora_id,
        multimodal_keys=hit.request.multimodal_keys,
    )
    context.add_request(request, chunk_tokens=chunk)
    while True:
        step = context.begin_step()
        [scheduled] = step.requests
        model.forward(step.metadata, context)
        done = scheduled.start + scheduled.num_tokens
        if done == len(tokens):
            held = -(-done // context.block_size_tokens)
            return scheduled.row, context.request_to_kv_block_ids[scheduled.row, :held].tolist()
        context.commit_step({0: int(tokens[done])} if scheduled.samples else {})
        if not scheduled.samples:
            context.schedule_prefill(0, chunk_tokens=chunk)
