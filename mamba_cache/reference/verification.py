"""Verification of drafts: which stand, so that the answer is what it would be without any."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch

from mamba_cache.context import DeviceTokens
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.metadata import StepMetadata
from mamba_cache.reference.sampling import SamplingParams, sample

__all__ = ["verify", "verify_greedy_on_device"]


def verify(
    logits: torch.Tensor, drafts: Sequence[int], params: SamplingParams, num_generated: int
) -> list[int]:
    """Sample one request's next tokens for as long as its drafts foretell them.

    Each token is sampled as without speculation, from the same logits and with the same draw; the
    logits after a draft are those of the answer only if the draft is what was sampled.

    Args:
        logits: [drafts + 1, vocab_size] of the last sampled token and of each draft, on the CPU.
        drafts: The tokens that were guessed.
        params: How to choose.
        num_generated: Tokens that the request has already.

    Returns:
        The drafts that stand and the token sampled after them, up to the first of ``stop_tokens``;
        at least one token.

    Raises:
        InvalidArgumentError: There are not as many rows of logits as tokens, or a token cannot be
            sampled; see ``sample``.
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
    """Take the likeliest tokens of a whole step, and count the drafts that stand, on the device.

    Nothing is read back, so that the next step can begin before anybody knows the outcome.

    Args:
        logits: [num_decode_tokens + num_prefills, vocab_size], as the model's forward gives them.
        metadata: The step.
        drafts: [max_requests, num_speculative_tokens] int64, as ``begin_step`` got them: by
            request row, -1 where there is none.

    Returns:
        What ``commit_step`` takes.

    Raises:
        InvalidArgumentError: ``drafts`` or ``logits`` are not of the step's shape.
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
    likeliest = logits.argmax(dim=1)
    bounds = metadata.query_start_loc[: num_decodes + 1].long()
    lengths = bounds[1:] - bounds[:-1]
    offsets = torch.arange(drafts.shape[1] + 1, device=logits.device)
    in_step = offsets < lengths[:, None]
    # Past a request's own tokens stands its last one again, which is never counted.
    decoded = likeliest[bounds[:-1, None] + torch.where(in_step, offsets, lengths[:, None] - 1)]
    guessed = drafts[metadata.request_rows[:num_decodes].long()]
    stands = (decoded[:, :-1] == guessed) & in_step[:, 1:]
    prefilled = likeliest[num_tokens:, None].expand(-1, len(offsets))
    num_standing = stands.int().cumprod(dim=1).sum(dim=1)
    return DeviceTokens(
        torch.cat([decoded, prefilled]),
        torch.cat([num_standing, torch.zeros_like(prefilled[:, 0])]).int() + 1,
    )
