"""Grow a conversation turn by turn, and see what each turn need not compute again.

Each prompt is all that was said before and a new question. States are saved while the model
answers too, so a turn begins where the answer before it ended, to within a block. Every turn runs
a second time without a cache; the answers, which mean nothing with random weights, must be equal.
"""

from __future__ import annotations

import torch

from mamba_cache import CacheConfig
from mamba_cache.reference import Completion, Engine, HybridModel, HybridModelConfig, SamplingParams

BLOCK_SIZE_TOKENS = 64
SAMPLING = SamplingParams(max_new_tokens=96)
SYSTEM = b"You are a guide in a museum of clocks. Be brief, and never make up a date.\n"
QUESTIONS = (
    b"Which clock here is the oldest?",
    b"Who built it, and for whom?",
    b"Does it still run?",
    b"How often is it wound?",
    b"May I hear it strike?",
    b"Thank you. Where is the way out?",
)


def make_engine(model: HybridModel, *, enable_prefix_caching: bool) -> Engine:
    """Return an engine for one request at a time."""
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
    return Engine(model, config)


def converse(engine: Engine) -> list[Completion]:
    """Ask every question on top of all that was said before."""
    history, turns = list(SYSTEM), []
    for question in QUESTIONS:
        prompt = [*history, *b"\nVisitor: ", *question, *b"\nGuide: "]
        [answer] = engine.generate([prompt], SAMPLING)
        turns.append(answer)
        history = [*prompt, *answer.tokens]
    return turns


def show(with_cache: list[Completion], without_cache: list[Completion]) -> None:
    """Print a line for each turn."""
    print("turn  prompt  skipped  computed  first token  no cache")
    for number, (turn, plain) in enumerate(zip(with_cache, without_cache, strict=True), start=1):
        print(
            f"{number:4}  {turn.prompt_tokens:6}  {turn.skipped_tokens:7}  "
            f"{turn.computed_tokens:8}  {milliseconds(turn):8.1f} ms  {milliseconds(plain):5.1f} ms"
        )
    computed = sum(turn.computed_tokens for turn in with_cache)
    needed = sum(turn.computed_tokens for turn in without_cache)
    print(f"\n{computed:,} prompt tokens computed instead of {needed:,}.")


def milliseconds(completion: Completion) -> float:
    """Return the time to the first token."""
    assert completion.ttft_seconds is not None, "every turn has an answer"
    return completion.ttft_seconds * 1e3


def main() -> int:
    """Run the conversation; return the exit status."""
    torch.set_num_threads(1)  # the tensors are small: more threads mostly wait for each other
    model = HybridModel(HybridModelConfig(layer_pattern="M*MM-"), dtype=torch.float64)
    make_engine(model, enable_prefix_caching=False).generate([list(SYSTEM)], SAMPLING)  # warm up
    cached = make_engine(model, enable_prefix_caching=True)
    with_cache = converse(cached)
    without_cache = converse(make_engine(model, enable_prefix_caching=False))
    show(with_cache, without_cache)
    slots = cached.context.slot_allocator
    print(f"{slots.num_cached_slots} states are kept for {len(QUESTIONS)} turns.")
    same = [turn.tokens for turn in with_cache] == [turn.tokens for turn in without_cache]
    print(f"Answers with and without the cache {'agree' if same else 'DO NOT AGREE'}.")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
