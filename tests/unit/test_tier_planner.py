"""Load or compute: by the formula, with measured rates."""

import math

import pytest

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.tiers import LoadPlanner, Rates
from mamba_cache.tiers.planner import quickest

STATE_BYTES, TOKEN_BYTES = 102.6e6, 16_384


def least_tokens(rates):
    """Return the least tokens of a prefix of Nemotron-H-8B that the planner loads."""
    planner = LoadPlanner(rates, learns=False)
    for tokens in range(1, 20_000):
        num_bytes = int(STATE_BYTES + TOKEN_BYTES * tokens)
        if planner.load_seconds(num_bytes) <= tokens / rates.tokens_per_second:
            return tokens
    return None


@pytest.mark.parametrize(
    ("gigabytes", "milliseconds", "at_12k", "at_50k"),
    [(52, 0.3, 27, 115), (25, 0.3, 53, 228), (6.5, 0.5, 202, 932)],
)
def test_the_formula(gigabytes, milliseconds, at_12k, at_50k):
    """n* = (L + S / B) / (1 / P - k / B), for three kinds of links."""
    for rate, expected in ((12_000, at_12k), (50_000, at_50k)):
        found = least_tokens(Rates(gigabytes * 1e9, milliseconds * 1e-3, rate))
        assert found == pytest.approx(expected, rel=0.02, abs=1)


def test_a_link_slower_than_prefill_is_never_used():
    """B <= k P: 0.82 GB/s at 50k tokens a second."""
    assert least_tokens(Rates(0.8e9, 0.0, 50_000)) is None


def test_of_equally_good_ones_the_longest():
    assert quickest([2.0, 1.0, math.inf, 1.0, 3.0], None) == 3


def test_rates_are_learned():
    planner = LoadPlanner()
    for _ in range(60):
        for num_bytes in (1e6, 5e7, 2e8):
            planner.record_load(int(num_bytes), 0.002 + num_bytes / 10e9)
        planner.record_prefill(1000, 0.1)
    assert planner.rates.bytes_per_second == pytest.approx(10e9, rel=1e-3)
    assert planner.rates.latency_seconds == pytest.approx(0.002, rel=1e-3)
    assert planner.rates.tokens_per_second == pytest.approx(10_000, rel=1e-3)


@pytest.mark.parametrize(
    ("latency", "loads", "learned", "bytes_per_second"),
    [
        # Loads of one size determine only the bandwidth; equal times of any sizes imply no latency.
        (0.001, [(10**8, 0.011)] * 5, 0.001, 1e10),
        (0.001, [(100, 1.0), (1000, 1.0)], 0.001, None),
        # An old latency estimate leaves time for the bytes.
        (1.0, [(1000, 0.1)] * 3, 0.05, 20_000),
    ],
)
def test_latency_and_bandwidth_follow_from_loads(latency, loads, learned, bytes_per_second):
    planner = LoadPlanner(Rates(1e9, latency, 1.0))
    for load in loads:
        planner.record_load(*load)
    assert planner.rates.latency_seconds == pytest.approx(learned)
    if bytes_per_second is not None:
        assert planner.rates.bytes_per_second == pytest.approx(bytes_per_second)


def test_implausible_measurements_are_ignored():
    planner = LoadPlanner()
    before = planner.rates
    planner.record_load(0, 1.0)
    planner.record_load(5, 0.0)
    planner.record_prefill(0, 1.0)
    planner.record_prefill(5, 0.0)
    planner.record_prefill(5, -1.0)
    assert planner.rates == before
    planner.record_load(1, 1e-9)
    assert planner.rates != before, "a load of one byte is plausible"
    planner = LoadPlanner()
    fixed = LoadPlanner(learns=False)
    fixed.record_load(5, 1.0)
    fixed.record_prefill(5, 1.0)
    assert fixed.rates == before
    # Larger loads that took less time do not change the latency, and no rate is negative.
    for num_bytes, seconds in ((10, 5.0), (1000, 1.0)) * 4:
        planner.record_load(num_bytes, seconds)
        assert planner.rates.bytes_per_second > 0
        assert planner.rates.latency_seconds >= 0


def test_rates_are_checked():
    for rates, message in (
        (Rates(0, 0, 1), "bytes_per_second must be above 0"),
        (Rates(1, -1, 1), "latency_seconds must be a number"),
        (Rates(1, 0, float("nan")), "tokens_per_second must be a number"),
        (Rates(1, 0, 0), "tokens_per_second must be above 0"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            LoadPlanner(rates)
    assert LoadPlanner(Rates(1, 0, 1)).rates.latency_seconds == 0
