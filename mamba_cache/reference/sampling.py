"""Sampling and verification: the next tokens of a request, drawn from logits."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch

from mamba_cache._checks import as_ints, check_int, check_number
from mamba_cache.context import DeviceTokens
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.metadata import StepMetadata

__all__ = ["SamplingParams", "sample", "verify", "verify_greedy_on_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when the request ends.

    Attributes:
        max_new_tokens: Maximum number of tokens to generate.
        temperature: 0 takes the likeliest token; higher values draw more freely.
        top_k: Number of likeliest tokens to draw from. None: all.
        seed: Seed of the draws. Equal requests with equal seeds get equal tokens.
        stop_tokens: Token ids that end the request; the stop token is the last token of the answer.
            Any collection of ints; stored as a tuple.

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
    """Choose a token.

    The draw depends only on the request's seed and the token's number. So other requests of the
    batch, aborted steps and preemptions do not change the answer.

    Args:
        logits: [vocab_size] of one request, on the CPU, any floating-point type; -inf for
            impossible tokens.
        params: How to choose.
        num_generated: Number of tokens generated so far.

    Returns:
        The token id, from 0 to vocab_size - 1.

    Raises:
        InvalidArgumentError: A logit is NaN or inf, or all logits are -inf.
    """
    likeliest = logits.max()  # NaN if any logit is
    if not likeliest.isfinite():
        raise InvalidArgumentError(
            "logits must be finite or -inf, and not all -inf; the largest is "
            f"{likeliest.item()}: the model or its states are broken"
        )
    if params.temperature == 0:
        return int(logits.argmax())
    # Subtracting the maximum keeps it at 0: a low temperature can turn only others to -inf.
    scaled = (logits.double() - likeliest.double()) / params.temperature
    if params.top_k is not None and params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -math.inf)
    cumulative = scaled.softmax(0).cumsum(0)
    uniform = np.random.default_rng((params.seed, num_generated)).random()
    # ``right=True``: a token of probability 0 is never drawn.
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))


def verify(
    logits: torch.Tensor, drafts: Sequence[int], params: SamplingParams, num_generated: int
) -> list[int]:
    """Sample one request's next tokens until a token differs from its draft.

    Each token is sampled as without speculation, from the same logits with the same draw. The
    logits after a draft are valid only if the sampled token equals the draft.

    Args:
        logits: [drafts + 1, vocab_size] of the last sampled token and of each draft, on the CPU.
        drafts: The draft tokens.
        params: How to choose.
        num_generated: Number of tokens generated so far.

    Returns:
        The accepted drafts and the token sampled after them, up to the first of ``stop_tokens``; at
        least one token.

    Raises:
        InvalidArgumentError: ``logits`` has a wrong number of rows, or no token can be sampled; see
            ``sample``.
    """
    if len(logits) != len(drafts) + 1:
        raise InvalidArgumentError(
            f"logits must have {len(drafts) + 1} rows, one more than drafts, got {len(logits)}"
        )
    tokens: list[int] = []
    for row, draft in zip_longest(logits, drafts):
        tokens.append(sample(row, params, num_generated + len(tokens)))
        if tokens[-1] != draft or draft in params.stop_tokens:
            break
    return tokens


def verify_greedy_on_device(
    logits: torch.Tensor, metadata: StepMetadata, drafts: torch.Tensor
) -> DeviceTokens:
    """Take the likeliest tokens of a whole step, and count the accepted drafts, on the device.

    Nothing is read back, so the next step can begin before the host knows the result.

    Args:
        logits: [num_decode_tokens + num_prefills, vocab_size], the result of the model's forward.
        metadata: The step.
        drafts: [max_requests, num_speculative_tokens] int64, as passed to ``begin_step``: by
            request row, -1 for no draft.

    Returns:
        The tokens to pass to ``commit_step``.

    Raises:
        InvalidArgumentError: ``drafts`` or ``logits`` do not have the step's shape.
    """
    num_decodes, num_tokens = metadata.num_decodes, metadata.num_decode_tokens
    num_rows = num_tokens + metadata.num_prefills
    if logits.ndim != 2 or len(logits) != num_rows:
        raise InvalidArgumentError(
            f"logits must be [{num_rows}, vocab_size] for this step, got {list(logits.shape)}"
        )
    if drafts.ndim != 2 or drafts.shape[1] + 1 < metadata.max_decode_len:
        raise InvalidArgumentError(
            f"drafts must be [max_requests, num_speculative_tokens], and the step has up to "
            f"{metadata.max_decode_len - 1} for a request, got {list(drafts.shape)}"
        )
    likeliest, offsets = (
        logits.argmax(dim=1),
        torch.arange(drafts.shape[1] + 1, device=logits.device),
    )
    bounds = metadata.query_start_loc[: num_decodes + 1].long()
    firsts = torch.cat([bounds[:-1], torch.arange(num_tokens, num_rows, device=logits.device)])
    lengths = torch.cat([bounds.diff(), torch.ones_like(firsts[num_decodes:])])[:, None]
    # Entries past a request's tokens repeat its last token, and are never counted.
    tokens = likeliest[firsts[:, None] + torch.minimum(offsets, lengths - 1)]
    guessed = drafts[metadata.request_rows[: len(firsts)].long()]
    stands = (tokens[:, :-1] == guessed) & (offsets[1:] < lengths)
    return DeviceTokens(tokens, stands.int().cumprod(dim=1).sum(dim=1).int() + 1)
