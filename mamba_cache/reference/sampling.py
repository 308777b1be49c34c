"""Sampling: the next token of a request, drawn from logits."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import torch

from mamba_cache._checks import as_ints, check_int, check_number
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
        stop_tokens: Ids that end the request; the one that did is its last token. Any collection
            of ints; kept as a tuple.

    Raises:
        InvalidArgumentError: A value is of a wrong type or out of range.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "max_new_tokens": check_int("max_new_tokens", self.max_new_tokens, minimum=1),
            "temperature": check_number(
                "temperature", self.temperature, maximum=sys.float_info.max
            ),
            "seed": check_int("seed", self.seed, minimum=0),
            "stop_tokens": tuple(
                check_int("each of stop_tokens", token, minimum=0)
                for token in as_ints("stop_tokens", self.stop_tokens)
            ),
        }
        if self.top_k is not None:
            checked["top_k"] = check_int("top_k", self.top_k, minimum=1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def sample(logits: torch.Tensor, params: SamplingParams, num_generated: int) -> int:
    """Pick a token.

    The draw is made from the request's seed and the token's number alone, so neither the rest of
    the batch, nor a step that was aborted, nor a preemption changes what a request says.

    Args:
        logits: [vocab_size] of one request, on the CPU, any floating-point type; -inf where a
            token is impossible.
        params: How to choose.
        num_generated: Tokens that the request has already.

    Returns:
        From 0 to vocab_size - 1.

    Raises:
        InvalidArgumentError: A logit is NaN or inf, or none is above -inf.
    """
    likeliest = logits.max()  # NaN if any logit is
    if not likeliest.isfinite():
        raise InvalidArgumentError(
            "logits must be finite or -inf, and not all -inf; the largest is "
            f"{likeliest.item()}: the model or its states are broken"
        )
    if params.temperature == 0:
        return int(logits.argmax())
    # The likeliest becomes 0, so that however low the temperature is, only others become -inf.
    scaled = (logits.double() - likeliest.double()) / params.temperature
    if params.top_k is not None and params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -math.inf)
    cumulative = scaled.softmax(0).cumsum(0)
    uniform = np.random.default_rng((params.seed, num_generated)).random()
    # Right of all that equal the draw: a token of probability 0 is never hit.
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
