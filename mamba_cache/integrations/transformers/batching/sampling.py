"""The choice of the next tokens of many requests at once, where their logits are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._torch import to_device
from mamba_cache.integrations.transformers.batching.answers import AnswerSettings
from mamba_cache.integrations.transformers.batching.requests import BatchRequest

__all__ = ["Sampler", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class _Limits:
    """The settings of a batch's rows on the device, and what of them anybody uses."""

    settings: tuple[AnswerSettings | None, ...]
    is_greedy: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    most: int


def uniforms(seeds: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """Return a number in [0, 1) for each seed and token number: splitmix64's.

    It depends on them alone: who else is in the batch, and whether the token is computed a second
    time, changes nothing.
    """
    with np.errstate(over="ignore"):
        x = seeds + (numbers + np.uint64(1)) * _GOLDEN
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    numbers_in_53_bits: npt.NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64)
    return numbers_in_53_bits / 2.0**53


class Sampler:
    """Chooses tokens; nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._limits: _Limits | None = None

    def choose(self, logits: torch.Tensor, requests: Sequence[BatchRequest | None]) -> torch.Tensor:
        """Choose the next token of each request.

        Args:
            logits: [rows, vocabulary] on the device.
            requests: The request of each row, if it has one.

        Returns:
            [rows] int64 on the device.
        """
        if all(one is None or one.settings.is_simple for one in requests):
            return logits.argmax(-1)
        scores = logits.float()
        special = [(i, one) for i, one in enumerate(requests) if one and one.processors is not None]
        if special:
            scores = scores.clone()
            for index, one in special:
                ids = torch.tensor([[*one.prompt, *one.answer]], device=self._device)
                try:
                    scores[index : index + 1] = one.processors(ids, scores[index : index + 1])
                except Exception as error:  # of this request alone: the others go on
                    one.refuse(error)
        limits = self._limits_of(requests)
        greedy = scores.argmax(-1)
        if all(one is None or one.settings.is_greedy for one in requests):
            return greedy
        seeds = np.array([one.seed if one else 0 for one in requests], dtype=np.uint64)
        numbers = np.array([len(one.answer) if one else 0 for one in requests], dtype=np.uint64)
        uniform = to_device(torch.from_numpy(uniforms(seeds, numbers)), self._device)
        return torch.where(limits.is_greedy, greedy, _draw(scores, limits, uniform))

    def _limits_of(self, requests: Sequence[BatchRequest | None]) -> _Limits:
        settings = tuple(one.settings if one else None for one in requests)
        known = self._limits
        if known is not None and len(known.settings) == len(settings):  # noqa: SIM102
            if all(a is b for a, b in zip(known.settings, settings, strict=True)):
                return known
        # Those of the library's processors are applied by now.
        rows = [one if one and one.make_processors is None else None for one in settings]
        drawn = [row for one, row in zip(settings, rows, strict=True) if one and not one.is_greedy]
        most = 0
        if any(row is not None and _is_limited(row) for row in drawn):
            counts = [row.top_k if row else 0 for row in drawn]
            most = max(counts) if all(counts) else -1

        def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
            values = [getattr(s, name) if s else default for s in rows]
            return to_device(torch.tensor(values, dtype=dtype, device="cpu"), self._device)

        is_greedy = torch.tensor([s is None or s.is_greedy for s in settings], device="cpu")
        self._limits = _Limits(
            settings,
            to_device(is_greedy, self._device),
            column("temperature", 1.0, torch.float32),
            column("top_k", 0, torch.int64),
            column("top_p", 1.0, torch.float64),
            column("min_p", 0.0, torch.float64),
            most,
        )
        return self._limits


def _is_limited(settings: AnswerSettings) -> bool:
    return bool(settings.top_k) or settings.top_p < 1 or settings.min_p > 0


def _draw(scores: torch.Tensor, limits: _Limits, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token from each row: where the sum of probabilities passes the row's number."""
    scores = scores / limits.temperature[:, None]
    if not limits.most:
        return _pass(scores.double().softmax(-1), uniform)
    size = scores.shape[-1]
    count = size if limits.most < 0 else min(limits.most, size)
    # Whoever has no limit of his own has as many as there are; if one has none, all are sorted.
    values, ids = scores.topk(count, dim=-1)
    values = values.double()
    order = torch.arange(count, device=scores.device)
    top_k = torch.where(limits.top_k > 0, limits.top_k, size)[:, None]
    values = values.masked_fill(order >= top_k, -math.inf)
    shares = values.softmax(-1)
    before = shares.cumsum(-1) - shares
    is_out = (before >= limits.top_p[:, None]) & (limits.top_p < 1)[:, None]
    is_out |= shares < limits.min_p[:, None] * shares[:, :1]
    is_out[:, 0] = False
    values = values.masked_fill(is_out, -math.inf)
    return ids.gather(-1, _pass(values.softmax(-1), uniform)[:, None])[:, 0]


def _pass(shares: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    sums = shares.cumsum(-1)
    # Right of all that equal the number: a token of probability 0 is never hit.
    at = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]
    return at.clamp(max=shares.shape[-1] - 1)
