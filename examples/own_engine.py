"""Your own engine: four calls around a model's forward, with the cache and without.

A visitor asks a guide one question after another; each prompt is the whole conversation so far.
States are also saved while the model answers, so a turn begins where the last answer ended, to
within a block. The model is small, with random weights and bytes as tokens: its answers mean
nothing, but must be the same with the cache and without. Replace it by your model, whose layers
read ``step.metadata``, and states, keys and values from the context (docs/tutorial/embed.md).
"""

from __future__ import annotations

import torch

from mamba_cache import CacheConfig, DynamicInferenceContext, Request
from mamba_cache.reference import HybridModel

BLOCK_SIZE_TOKENS, NEW_TOKENS = 64, 96
SYSTEM = b"You are a guide in a museum of clocks. Be brief, and never make up a date.\n"
QUESTIONS = (
    b"Which clock here is the oldest?",
    b"Who built it, and for whom?",
    b"Does it still run?",
    b"How often is it wound?",
    b"May I hear it strike?",
    b"Thank you. Where is the way out?",
)


def make_context(model: HybridModel, *, enable_prefix_caching: bool) -> DynamicInferenceContext:
    """Return a context with memory for a model's requests and its cache."""
    config = CacheConfig(
        block_size_tokens=BLOCK_SIZE_TOKENS,
        ssm_chunk_size=model.config.ssm_chunk_size,
        max_requests=1,
        max_tokens=2048,
        max_sequence_length=2048,
        num_kv_blocks=64,
        max_slots=16,
        enable_prefix_caching=enable_prefix_caching,
    )
    specs = model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
    return DynamicInferenceContext(config, *specs)


def answer(
    context: DynamicInferenceContext, model: HybridModel, prompt: list[int]
) -> tuple[list[int], int]:
    """Return an answer, and the number of skipped prompt tokens."""
    found = context.add_request(Request(request_id="a", prompt_tokens=prompt))
    for _ in range(NEW_TOKENS):
        step = context.begin_step()
        logits = model.forward(step.metadata, context)
        context.commit_step({"a": int(logits[0].argmax())})
    return context.finish("a"), found.skip_tokens


def converse(
    context: DynamicInferenceContext, model: HybridModel
) -> list[tuple[int, int, list[int]]]:
    """Ask every question; return the prompt's length, skipped tokens and answer of each turn."""
    history, turns = list(SYSTEM), []
    for question in QUESTIONS:
        prompt = [*history, *b"\nVisitor: ", *question, *b"\nGuide: "]
        tokens, skipped = answer(context, model, prompt)
        turns.append((len(prompt), skipped, tokens))
        history = [*prompt, *tokens]
    context.check_invariants()
    return turns


def main() -> int:
    """Hold the conversation with the cache and without, and compare; return the exit status."""
    torch.set_num_threads(1)  # small tensors: more threads mostly wait for each other
    model = HybridModel(dtype=torch.float64)
    with_cache, without = (
        converse(make_context(model, enable_prefix_caching=cached), model)
        for cached in (True, False)
    )
    print("turn  prompt  skipped  computed with the cache  without")
    for number, (length, skipped, _) in enumerate(with_cache, start=1):
        print(f"{number:4}  {length:6}  {skipped:7}  {length - skipped:23}  {length:7}")
    prompts = sum(length for length, _, _ in with_cache)
    computed = prompts - sum(skipped for _, skipped, _ in with_cache)
    same = [turn[2] for turn in with_cache] == [turn[2] for turn in without]
    print(f"\n{computed:,} prompt tokens computed with the cache, {prompts:,} without.")
    print(f"Answers with and without the cache {'agree' if same else 'DO NOT AGREE'}.")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
