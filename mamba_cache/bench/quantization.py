"""The benchmark of int8 slots' accuracy: errors of real states, and of logits after a hit.

The reference model (random weights, float32, on the CPU) reads English text that ships inside
CPython, with bytes as tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import get_args

import torch

from mamba_cache.bench.measure import Measurement, progress
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.reference import HybridModel, HybridModelConfig
from mamba_cache.states import SlotQuantization, SlotRounding, dequantize_states, quantize_states

__all__ = ["run_quantization"]

_TEXTS = ("compound", "execmodel", "debugger", "formatstrings", "types", "specialnames")
_LENGTH = 1500
_BLOCK = 128


def run_quantization() -> list[Measurement]:
    """Measure both roundings beside each other."""
    model = HybridModel(HybridModelConfig(layer_pattern="M*MM-"), dtype=torch.float32, seed=0)
    prompts = [list(topics[text].encode()[:_LENGTH]) for text in _TEXTS]
    progress("without quantisation")
    exact = _context(model, None)
    misses = [_logits(exact, model, prompt)[1] for prompt in prompts]
    slots = exact.slot_allocator
    states = slots.ssm_states[:, (slots.slot_to_block >= 0).nonzero().flatten()]
    results: list[Measurement] = []
    for rounding in get_args(SlotRounding):
        progress(f"int8, {rounding}")
        results += _state_errors(states, rounding)
        results += _logit_errors(model, prompts, misses, rounding)
    return results


def _context(model: HybridModel, rounding: SlotRounding | None) -> DynamicInferenceContext:
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        ssm_chunk_size=model.config.ssm_chunk_size,
        max_requests=1,
        max_tokens=2048,
        max_sequence_length=2048,
        num_kv_blocks=256,
        max_slots=64,
        slot_quantization=None if rounding is None else "int8",
        slot_rounding=rounding or "nearest",
    )
    dtype = torch.float32
    return DynamicInferenceContext(
        config, model.config.state_spec(dtype), model.config.kv_spec(dtype)
    )


def _logits(
    context: DynamicInferenceContext, model: HybridModel, prompt: list[int]
) -> tuple[int, torch.Tensor]:
    """Compute a prompt; return the tokens skipped and the logits of the next token."""
    admission = context.add_request(Request(request_id="prompt", prompt_tokens=prompt))
    step = context.begin_step()
    logits = model.forward(step.metadata, context)[0]
    context.commit_step({"prompt": int(logits.argmax())})
    context.finish("prompt")
    return admission.skip_tokens, logits


def _state_errors(states: torch.Tensor, rounding: SlotRounding) -> Iterator[Measurement]:
    codes_and_scales = quantize_states(states, SlotQuantization(rounding))
    error = dequantize_states(*codes_and_scales, states.dtype) - states
    relative = error.square().mean().sqrt() / states.square().mean().sqrt()
    largest = error.abs().amax((-2, -1)) / states.abs().amax((-2, -1))
    name = f"int8, {rounding}: error of {states.shape[1]} states"
    yield Measurement(f"{name}, root mean square over the states'", relative.item(), "x")
    yield Measurement(f"{name}, largest of a head over its largest", largest.max().item(), "x")


def _logit_errors(
    model: HybridModel, prompts: list[list[int]], misses: list[torch.Tensor], rounding: SlotRounding
) -> Iterator[Measurement]:
    context = _context(model, rounding)
    relative, agreeing = [], 0
    for prompt, miss in zip(prompts, misses, strict=True):
        _logits(context, model, prompt)
        skipped, hit = _logits(context, model, prompt)
        assert skipped, "the second run of a prompt is a hit"
        relative.append(((hit - miss).abs().max() / miss.std()).item())
        agreeing += int(hit.argmax() == miss.argmax())
    name = f"int8, {rounding}: logits after a hit, largest error over their deviation"
    detail = f"largest {max(relative):.5f}; {agreeing} of {len(prompts)} likeliest tokens agree"
    yield Measurement(f"{name}, median", statistics.median(relative), "x", detail=detail)
