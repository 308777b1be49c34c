"""``examples/real_kernels.py`` with any kernels, compared with the reference model."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from mamba_cache import CacheConfig, DynamicInferenceContext, Request, RequestStatus
from mamba_cache.reference import HybridModel, HybridModelConfig

BLOCK = 32
SHAPE = HybridModelConfig(layer_pattern="M*M", ssm_chunk_size=BLOCK, hidden_size=32)


def make_context(model: HybridModel, block: int) -> DynamicInferenceContext:
    """Create a context for ``off_the_reference``."""
    config = CacheConfig(
        block_size_tokens=block,
        ssm_chunk_size=block,
        max_requests=4,
        max_tokens=16 * block,
        max_sequence_length=8 * block,
        num_kv_blocks=24,
        max_slots=12,
    )
    spec, kv_spec = model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
    return DynamicInferenceContext(config, spec, kv_spec, device=model.device)


def off_the_reference(
    example: ModuleType,
    kernels: Any,
    *,
    shape: HybridModelConfig = SHAPE,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> float:
    """Largest difference of logits and live states from the reference model, over varied steps.

    Both models run the same steps: a single prompt; then its decoding with three more prompts, of
    which one resumes from a state inside the first prompt, one from the state at its end, and one
    is new and is cut into two chunks; then all decode.
    """
    block = shape.ssm_chunk_size
    models = [HybridModel(shape, dtype=dtype, device=device) for _ in range(2)]
    example.with_kernels(models[1], kernels)
    contexts = [make_context(model, block) for model in models]
    drawn = torch.randint(256, (16 * block,), generator=torch.Generator().manual_seed(1)).tolist()
    first = drawn[: 4 * block]
    plan = [
        [("first", first, None)],
        [
            ("inside", first[: 3 * block] + drawn[6 * block : 6 * block + 19], None),
            ("end", first + drawn[7 * block : 8 * block + 1], None),
            ("new", drawn[10 * block : 13 * block - 6], 2 * block + 7),
        ],
        [], [],
    ]  # fmt: skip
    skipped, found = {}, []
    for admitted in plan:
        logits, states = [], []
        for model, context in zip(models, contexts, strict=True):
            if admitted == [] and context.status("new") is RequestStatus.PREFILLING:
                context.schedule_prefill("new")
            for name, prompt, chunk in admitted:
                request = Request(request_id=name, prompt_tokens=prompt)
                admission = context.add_request(request, chunk_tokens=chunk)
                skipped[name] = admission.skip_tokens
            step = context.begin_step()
            logits.append(model.forward(step.metadata, context))
            rows = step.metadata.state_rows[: step.metadata.num_requests].long()
            states += [context.live_states[name][:, rows] for name in ("conv", "ssm")]
            tokens = logits[0].argmax(dim=1).tolist()  # the same tokens for both models
            parts = zip(step.requests, tokens, strict=True)
            context.commit_step({part.request_id: token for part, token in parts if part.samples})
            context.check_invariants()
        pairs = [logits, states[::2], states[1::2]]
        found += [(b - a).abs().max().item() for a, b in pairs]
    assert skipped == {"first": 0, "inside": 3 * block, "end": 4 * block, "new": 0}
    slots = [context.slot_allocator.states.tensors for context in contexts]
    found += [(slots[1][name] - slots[0][name]).abs().max().item() for name in slots[0]]
    return torch.tensor(found).max().item()  # NaN if any is
