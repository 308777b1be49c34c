"""Picks the next token of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from mamba_cache.engine._checks import check_int
from mamba_cache.errors import InvalidArgumentError

__all__ = ["SamplingParams", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_new_tokens: Tokens to generate at most.
        temperature: 0 takes the likeliest token; higher values draw more freely.
        top_k: Draw among this many likeliest tokens only. None: among all.
        seed: Of the draws. Equal requests of equal seeds get equal tokens.
        stop_tokens: Ids that end the request; the one that did is its last token.

    Raises:
        InvalidArgumentError: A value is out of range.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, minimum=1)
        check_int("seed", self.seed, minimum=0)
        if self.top_k is not None:
            check_int("top_k", self.top_k, minimum=1)
        for token in self.stop_tokens:
            check_int("each of stop_tokens", token, minimum=0)
        if not 0 <= self.temperature < math.inf:
            raise InvalidArgumentError(
                f"temperature must be finite and >= 0, got {self.temperature!r}"
            )


def sample(logits: torch.Tensor, params: SamplingParams, num_generated: int) -> int:
    """Pick a token.

    The draw is made from the request's seed and the token's number alone, so neither the rest of
    the batch, nor a step that was aborted, nor a preemption changes what a request says.

    Args:
        logits: [vocab_size] of one request, on the CPU, any floating-point type.
        params: How to choose.
        num_generated: Tokens that the request has already.

    Raises:
        InvalidArgumentError: A logit is NaN.
    """
    if logits.isnan().any():
        raise InvalidArgumentError("logits hold NaN: the model or its states are broken")
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    if params.top_k is not None and params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -math.inf)
    cumulative = scaled.softmax(0).cumsum(0)
    uniform = np.random.default_rng((params.seed, num_generated)).random()
    # Right of all that equal the draw: a token of probability 0 is never hit.
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
