"""Whether to load a prefix from a tier or to compute it again, by what either takes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mamba_cache._checks import check_number
from mamba_cache._guard import outside
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.protocols import RankAgreement

__all__ = ["LoadPlanner", "Rates", "largest", "quickest"]

_WEIGHT = 0.9
"""Of what was measured before, each time that something is measured."""

_MIN_SPREAD = 0.05
"""Of the sizes of loads, relative to their mean: below it one cannot tell latency and bandwidth."""


class Rates(NamedTuple):
    """What loading and computing take.

    Attributes:
        bytes_per_second: Of a load, once it flows.
        latency_seconds: Of a load of no bytes.
        tokens_per_second: Of prefill.
    """

    bytes_per_second: float = 20e9
    latency_seconds: float = 0.3e-3
    tokens_per_second: float = 12_000.0


class LoadPlanner:
    """Knows what loading and computing take, so that a request resumes where it is soonest.

    A load of S bytes of state and k bytes for each of n tokens wins over computing them where
    ``L + (S + k n) / B < n / P``. B, L and P are measured while the cache runs; until then they are
    assumed.

    Args:
        rates: What is assumed at first. Default: those of a slow link and a fast GPU's 8B model.
        learns: Whether what is measured counts.

    Attributes:
        rates: What it decides by now.

    Raises:
        InvalidArgumentError: A rate is not a finite number above 0, or the latency is below 0.
    """

    def __init__(self, rates: Rates | None = None, *, learns: bool = True) -> None:
        self.rates = _checked(Rates() if rates is None else rates)
        self._learns = learns
        self._has_prefill = False
        # Of loads, weighted: how many, and the means of bytes, seconds, bytes**2, bytes * seconds.
        self._weight = 0.0
        self._means = (0.0, 0.0, 0.0, 0.0)

    def load_seconds(self, num_bytes: int) -> float:
        """Return how long it takes to load so many bytes; 0 if there are none."""
        if not num_bytes:
            return 0.0
        return self.rates.latency_seconds + num_bytes / self.rates.bytes_per_second

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that computed so many tokens of prompts."""
        if not self._learns or seconds <= 0 or num_tokens <= 0:
            return
        rate = num_tokens / seconds
        if self._has_prefill:
            rate = _WEIGHT * self.rates.tokens_per_second + (1 - _WEIGHT) * rate
        self._has_prefill = True
        self.rates = self.rates._replace(tokens_per_second=rate)

    def record_load(self, num_bytes: int, seconds: float) -> None:
        """Learn from a load: latency and bandwidth are the line through what loads have taken."""
        if not self._learns or seconds <= 0 or num_bytes <= 0:
            return
        self._weight = _WEIGHT * self._weight + 1
        share = 1 / self._weight
        seen = float(num_bytes), seconds, float(num_bytes) ** 2, num_bytes * seconds
        pairs = zip(self._means, seen, strict=True)
        mean_bytes, mean_seconds, squares, products = (a + (b - a) * share for a, b in pairs)
        self._means = mean_bytes, mean_seconds, squares, products
        variance = squares - mean_bytes**2
        latency = self.rates.latency_seconds
        if variance > (_MIN_SPREAD * mean_bytes) ** 2:
            slope = (products - mean_bytes * mean_seconds) / variance
            if slope > 0:
                latency = max(0.0, mean_seconds - slope * mean_bytes)
        # A latency that leaves nothing for the bytes was measured when loads were others.
        latency = min(latency, mean_seconds / 2)
        self.rates = self.rates._replace(
            latency_seconds=latency, bytes_per_second=mean_bytes / (mean_seconds - latency)
        )


def largest(values: Sequence[float], agreement: RankAgreement | None) -> Sequence[float]:
    """Return each value of the rank where it is largest; None: there is one rank."""
    with outside:
        return values if agreement is None else agreement.largest(values)


def quickest(seconds: Sequence[float], agreement: RankAgreement | None) -> int:
    """Return which takes the least time on the rank that takes longest; of equals the last."""
    longest = largest(seconds, agreement)
    return min(range(len(longest)), key=lambda index: (longest[index], -index))


def _checked(rates: Rates) -> Rates:
    """Check rates that a caller gives."""
    for name, value in rates._asdict().items():
        number = check_number(name, value, maximum=1e18)
        if name != "latency_seconds" and not number:
            raise InvalidArgumentError(f"{name} must be above 0, got {value!r}")
    return rates
