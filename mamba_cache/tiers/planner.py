"""The choice between loading a prefix from a tier and computing it, by measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mamba_cache._checks import check_number
from mamba_cache._guard import outside
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.protocols import RankAgreement

__all__ = ["LoadPlanner", "Rates", "largest", "quickest"]

_WEIGHT = 0.9
"""Weight of the old average at each new sample."""

_MIN_SPREAD = 0.05
"""Minimum spread of load sizes, relative to their mean, to tell latency from bandwidth."""


class Rates(NamedTuple):
    """Speed of loading and of computing.

    Attributes:
        bytes_per_second: Bandwidth of a load, without its latency.
        latency_seconds: Time of a load of no bytes.
        tokens_per_second: Speed of prefill.
    """

    bytes_per_second: float = 20e9
    latency_seconds: float = 0.3e-3
    tokens_per_second: float = 12_000.0


class LoadPlanner:
    """Estimates the time of loading and of computing, to choose where a request resumes.

    A load of S bytes of state and k bytes for each of n tokens is faster than computing them if
    ``L + (S + k n) / B < n / P``. B, L and P are the ``Rates`` in their order. They are assumed at
    first, and measured while the cache runs.

    Args:
        rates: Rates assumed at first. Default: a slow link, and an 8B model on a fast GPU.
        learns: Whether measurements change the rates.

    Attributes:
        rates: The rates in use now.

    Raises:
        InvalidArgumentError: A rate is not a finite number above 0, or the latency is below 0.
    """

    def __init__(self, rates: Rates | None = None, *, learns: bool = True) -> None:
        self.rates = _checked(Rates() if rates is None else rates)
        self._learns = learns
        self._has_prefill = False
        # Weight of all loads, and weighted means of bytes, seconds, bytes**2, bytes * seconds.
        self._weight = 0.0
        self._means = (0.0, 0.0, 0.0, 0.0)

    def load_seconds(self, num_bytes: int) -> float:
        """Return the estimated time to load ``num_bytes``; 0 if there are none."""
        if not num_bytes:
            return 0.0
        return self.rates.latency_seconds + num_bytes / self.rates.bytes_per_second

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step that computed ``num_tokens`` of prompts."""
        if not self._learns or seconds <= 0 or num_tokens <= 0:
            return
        rate = num_tokens / seconds
        if self._has_prefill:
            rate = _WEIGHT * self.rates.tokens_per_second + (1 - _WEIGHT) * rate
        self._has_prefill = True
        self.rates = self.rates._replace(tokens_per_second=rate)

    def record_load(self, num_bytes: int, seconds: float) -> None:
        """Record the time of a load; a line through all times gives latency and bandwidth."""
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
        # A latency near the mean time is outdated: it was measured on different loads.
        latency = min(latency, mean_seconds / 2)
        self.rates = self.rates._replace(
            latency_seconds=latency, bytes_per_second=mean_bytes / (mean_seconds - latency)
        )


def largest(values: Sequence[float], agreement: RankAgreement | None) -> Sequence[float]:
    """Return each value's maximum over all ranks; without ``agreement`` there is one rank."""
    with outside:
        return values if agreement is None else agreement.largest(values)


def quickest(seconds: Sequence[float], agreement: RankAgreement | None) -> int:
    """Return the index with the least time, on its slowest rank; the last one of equals."""
    longest = largest(seconds, agreement)
    return min(range(len(longest)), key=lambda index: (longest[index], -index))


def _checked(rates: Rates) -> Rates:
    """Check and return the rates of a caller."""
    for name, value in rates._asdict().items():
        number = check_number(name, value, maximum=1e18)
        if name != "latency_seconds" and not number:
            raise InvalidArgumentError(f"{name} must be above 0, got {value!r}")
    return rates
