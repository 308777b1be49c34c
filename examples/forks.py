"""Several answers to one prompt and a beam search, with forks and without.

With forks the prompt is computed once: its full KV blocks are shared, and each answer or beam has a
copy of the unfinished block and of the live state. Without forks, every answer computes the whole
prompt, and every beam computes it at every step.

The model is small and hybrid (Mamba-2, attention and MLP layers; random weights, float64, on the
CPU). Its texts mean nothing, but must be the same both ways.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import torch

from mamba_cache import CacheConfig, DynamicInferenceContext, Request
from mamba_cache.reference import Engine, HybridModel, SamplingParams

PROMPT = b"To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer "
SAMPLING = SamplingParams(max_new_tokens=24, temperature=0.8, seed=1)
NUM_ANSWERS = 8
NUM_BEAMS, BEAM_TOKENS = 4, 20


class Beam(NamedTuple):
    """A text and its logarithmic probability."""

    score: float
    tokens: tuple[int, ...]


def make_config(*, enable_prefix_caching: bool = True) -> CacheConfig:
    """Return settings with room for all answers at once."""
    return CacheConfig(
        block_size_tokens=16,
        ssm_chunk_size=16,
        max_requests=max(NUM_ANSWERS, NUM_BEAMS),
        max_tokens=256,
        max_sequence_length=256,
        num_kv_blocks=128,
        max_slots=16,
        enable_prefix_caching=enable_prefix_caching,
    )


def make_context(model: HybridModel) -> DynamicInferenceContext:
    """Return an empty context for a model."""
    specs = model.config.state_spec(model.dtype), model.config.kv_spec(model.dtype)
    return DynamicInferenceContext(make_config(), *specs)


def several_answers(model: HybridModel) -> tuple[list[tuple[int, ...]], int]:
    """Draw answers to one prompt by forks; return answers and the number of computed tokens."""
    engine = Engine(model, make_config())
    name = engine.submit(PROMPT, SAMPLING, n=NUM_ANSWERS)
    names = [name, *((name, index) for index in range(1, NUM_ANSWERS))]
    done = {event.request_id: event.completion for event in engine.stream() if event.completion}
    answers = [done[name].tokens for name in names]
    return answers, engine.context.stats().computed_tokens


def separate_answers(model: HybridModel) -> tuple[list[tuple[int, ...]], int]:
    """Draw the same answers by separate requests, without a cache."""
    engine = Engine(model, make_config(enable_prefix_caching=False))
    answers = []
    for index in range(NUM_ANSWERS):
        sampling = replace(SAMPLING, seed=SAMPLING.seed + index)
        answers.append(engine.generate([PROMPT], sampling)[0].tokens)
    return answers, engine.context.stats().computed_tokens


def beam_search(model: HybridModel) -> tuple[list[Beam], int]:
    """Find the likeliest texts by forks; return texts and the number of computed tokens."""
    context = make_context(model)
    context.add_request(Request(request_id=0, prompt_tokens=PROMPT))
    scores: dict[Hashable, float] = {0: 0.0}
    new_ids = count(1)
    for _ in range(BEAM_TOKENS):
        step = context.begin_step()
        logits = model.forward(step.metadata, context)
        known = torch.tensor([scores[beam] for beam in step.request_ids])
        totals = (known[:, None] + logits.log_softmax(1)).flatten()
        found: dict[Hashable, list[tuple[float, int]]] = {beam: [] for beam in step.request_ids}
        for place in totals.topk(NUM_BEAMS).indices.tolist():
            index, token = divmod(place, logits.shape[1])
            found[step.request_ids[index]].append((float(totals[place]), token))

        # A beam goes on with its likeliest token, and forks for each further token.
        context.commit_step({beam: chosen[0][1] if chosen else 0 for beam, chosen in found.items()})
        scores = {}
        for beam, chosen in found.items():
            if not chosen:
                context.finish(beam)  # before any fork, so that rows are free for the forks
        for beam, chosen in found.items():
            ids = [beam, *(next(new_ids) for _ in chosen[1:])]
            if chosen[1:]:
                context.fork(beam, ids[1:], last_tokens=[token for _, token in chosen[1:]])
            scores.update(zip(ids, (score for score, _ in chosen), strict=False))
    beams = [Beam(score, tuple(context.finish(beam))) for beam, score in scores.items()]
    return sorted(beams, reverse=True), context.stats().computed_tokens


def separate_beam_search(model: HybridModel) -> tuple[list[Beam], int]:
    """Find the same texts; each step computes every beam from the start."""
    beams, num_computed = [Beam(0.0, ())], 0
    for _ in range(BEAM_TOKENS):
        found = []
        for score, tokens in beams:
            context = make_context(model)
            context.add_request(Request(request_id=0, prompt_tokens=[*PROMPT, *tokens]))
            logits = model.forward(context.begin_step().metadata, context)
            best = logits[0].log_softmax(0).topk(NUM_BEAMS)
            for more, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                found.append(Beam(score + more, (*tokens, token)))
            num_computed += len(PROMPT) + len(tokens)
        beams = sorted(found, reverse=True)[:NUM_BEAMS]
    return beams, num_computed


def main() -> int:
    """Print the number of computed tokens both ways; return 1 if the texts differ."""
    torch.set_num_threads(1)  # small tensors: more threads mostly wait for each other
    model = HybridModel(dtype=torch.float64, seed=0)
    answers, num_computed = several_answers(model)
    same_answers, num_separate = separate_answers(model)
    print(f"{NUM_ANSWERS} answers of {SAMPLING.max_new_tokens} tokens, prompt of {len(PROMPT)}:")
    print(f"  {num_computed:5,} tokens computed with forks, {num_separate:6,} without")
    beams, num_beamed = beam_search(model)
    same_beams, num_separate = separate_beam_search(model)
    print(f"{NUM_BEAMS} beams of {BEAM_TOKENS} tokens:")
    print(f"  {num_beamed:5,} tokens computed with forks, {num_separate:6,} without")
    agree = answers == same_answers and [b.tokens for b in beams] == [b.tokens for b in same_beams]
    print("All texts agree." if agree else "The texts DO NOT AGREE.")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
