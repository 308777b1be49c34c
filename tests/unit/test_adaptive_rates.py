"""Rates of return and their index, compared with the formulas applied to one number at a time."""

import numpy as np
import pytest

from mamba_cache.cache import adaptive
from mamba_cache.cache.adaptive import (
    BIN_OF_AGE,
    INDEX_SCALE,
    MAX_EVENTS,
    NUM_BINS,
    OLDEST,
    ReturnRates,
    SourceTrust,
)

WIDTH = [int(np.count_nonzero(b == BIN_OF_AGE)) for b in range(NUM_BINS)]


def starts():
    """Return the first age of each bin; for an empty bin, the first age of the next one."""
    return [
        int(2 ** (b / 2)) if 2 ** (b / 2) % 1 == 0 else int(2 ** (b / 2)) + 1 for b in range(40)
    ]


class Plain:
    """Events and exposure by class and bin, counted request by request."""

    def __init__(self, groups):
        self.groups = groups
        self.events = np.zeros((len(groups), NUM_BINS))
        self.exposure = np.zeros((len(groups), NUM_BINS))

    def live(self, klass, start, end, is_event=False):
        for age in range(start + 1, end + 1):
            self.exposure[klass, BIN_OF_AGE[age - 1]] += 1
        if is_event and end:
            self.events[klass, BIN_OF_AGE[end - 1]] += 1

    @staticmethod
    def shrunk(events, exposure, prior):
        level = (events.sum() + 2) / ((exposure * prior).sum() + 2)
        return (events + 0.5) / (exposure + 0.5 / (prior * level))

    def index(self, klass):
        prior = np.array([0.5 / start for start in starts()])
        in_all = self.shrunk(self.events.sum(0), self.exposure.sum(0), prior)
        own = [c for c, group in enumerate(self.groups) if group == self.groups[klass]]
        rates = self.shrunk(self.events[own].sum(0), self.exposure[own].sum(0), in_all)
        if self.exposure[klass].any() or self.events[klass].any():
            rates = self.shrunk(self.events[klass], self.exposure[klass], rates)
        survival = [1 / (1 + x + x * x / 2) for x in rates * WIDTH]
        best = []
        for first in range(NUM_BINS):
            alive, time, ratios = 1.0, 0.0, [0.0]
            for last in range(first, NUM_BINS):
                time += alive * (1 + survival[last]) / 2 * WIDTH[last]
                alive *= survival[last]
                ratios.append((1 - alive) / time if time else 0.0)
            best.append(max(ratios))
        return best


def refit(rates, classes=(), ages=()):
    rates.refit(np.array(classes, np.int64), np.array(ages, np.int64))


def check(rates, plain):
    for klass in range(len(plain.groups)):
        for bin_, (start, expected) in enumerate(zip(starts(), plain.index(klass), strict=True)):
            if WIDTH[bin_]:
                found = rates.index_of(klass, start) / INDEX_SCALE
                assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    ages = np.arange(0, 100, 7)
    one_by_one = [rates.index_of(0, age) for age in ages.tolist()]
    assert rates.indices_of(np.zeros_like(ages), ages).tolist() == one_by_one


def test_indices_are_those_of_the_formulas(rng):
    groups = np.array([0, 0, 1, 1, 2])
    rates, plain = ReturnRates(groups), Plain(groups.tolist())
    for _ in range(300):
        klass, start = int(rng.integers(4)), int(rng.choice([0, 0, 3]))
        end, is_event = start + int(rng.geometric(0.02)), bool(rng.random() < 0.5)
        rates.count(klass, start, -1)
        rates.count(klass, end, 1, is_event=is_event)
        plain.live(klass, start, end, is_event)
    classes, ages = rng.integers(0, 4, 50).tolist(), [0, *rng.integers(0, 500, 49).tolist()]
    for klass, age in zip(classes, ages, strict=True):
        plain.live(klass, 0, age)
    refit(rates, classes, ages)
    check(rates, plain)


def test_all_counts_are_halved_when_there_are_many_events(rng, monkeypatch):
    monkeypatch.setattr(adaptive, "MAX_EVENTS", 40)
    groups = np.array([0, 0, 1])
    rates, plain = ReturnRates(groups), Plain(groups.tolist())
    going = {}  # candidates whose spells outlast a halving: class, age at its beginning, age now
    halvings = 0
    for number in range(600):
        klass = int(rng.integers(3))
        begun = int(rng.choice([0, 0, 7]))
        rates.count(klass, begun, -1)
        going[number] = [klass, begun, begun]
        for each in going.values():
            each[2] += 1
            plain.live(each[0], each[2] - 1, each[2])
        if rng.random() < 0.9:
            klass, _, age = going.pop(int(rng.choice(list(going))))
            is_event = bool(rng.random() < 0.4)
            rates.count(klass, age, 1, is_event=is_event)
            plain.events[klass, BIN_OF_AGE[age - 1]] += is_event
        if number % 50 == 49:
            refit(rates, [each[0] for each in going.values()], [each[2] for each in going.values()])
            check(rates, plain)
            if plain.events.sum() > 40:
                halvings += 1
                plain.events, plain.exposure = plain.events / 2, plain.exposure / 2
    assert halvings > 3


def test_a_rate_follows_a_change_of_traffic():
    """The rate of a class that stops returning falls after about as many events of others."""
    rates = ReturnRates(np.array([0, 1]))
    for _ in range(20):
        for _ in range(500):
            rates.count(0, 8, 1, is_event=True)
            rates.count(1, 8, 1, is_event=True)
        refit(rates)
    before = rates.index_of(0, 1) / rates.index_of(1, 1)
    assert 0.9 < before < 1.1
    for _ in range(3 * MAX_EVENTS // 500):
        for _ in range(500):
            rates.count(0, 8, 1, is_event=True)
            rates.count(1, 300, 1)
        refit(rates)
    assert rates.index_of(0, 1) > 8 * rates.index_of(1, 1)


def count_hints(trust, source, hint, given, returned):
    for _ in range(given):
        trust.count(source, hint)
    for _ in range(returned):
        trust.count_return(source, hint)


def test_hints_are_trusted_as_far_as_they_come_true():
    trust = SourceTrust()
    assert trust.level_of("new", True) == 0
    count_hints(trust, "right", True, 60, 55)
    assert trust.level_of("right", True) == 0  # no hint was negative
    count_hints(trust, "right", False, 60, 1)
    assert [trust.level_of("right", hint) for hint in (False, True)] == [3, 4]
    count_hints(trust, "fair", True, 60, 40)
    count_hints(trust, "fair", False, 60, 12)
    assert [trust.level_of("fair", hint) for hint in (False, True)] == [1, 2]
    count_hints(trust, "random", True, 60, 31)
    count_hints(trust, "random", False, 60, 30)
    assert [trust.level_of("random", hint) for hint in (False, True)] == [0, 0]
    count_hints(trust, "liar", True, 60, 1)
    count_hints(trust, "liar", False, 60, 55)
    assert [trust.level_of("liar", hint) for hint in (False, True)] == [0, 0]


def test_a_source_is_trusted_from_three_deviations_on():
    for more, level in ((16, 0), (17, 2)):
        trust = SourceTrust()
        count_hints(trust, "x", False, 60, 21)
        count_hints(trust, "x", True, 60, 21 + more)
        assert trust.level_of("x", True) == level


def test_a_source_can_lose_trust():
    trust = SourceTrust()
    count_hints(trust, "x", True, 200, 180)
    count_hints(trust, "x", False, 200, 10)
    assert trust.level_of("x", True) > 0
    for _ in range(30_000):
        trust.count("x", True)
        trust.count("x", False)
        trust.count_return("x", False)
    assert trust.level_of("x", True) == 0


def test_counts_of_a_source_are_halved_in_time():
    trust = SourceTrust()
    count_hints(trust, "x", False, 1_000, 101)
    count_hints(trust, "x", True, 2_048, 1_500)
    trust.count("x", True)
    assert trust._records["x"] == [500, 1_024, 50, 750]


def test_the_longest_unused_sources_are_forgotten():
    trust = SourceTrust()
    count_hints(trust, "old", True, 60, 55)
    count_hints(trust, "old", False, 60, 1)
    assert trust.level_of("old", True) > 0
    for number in range(1_024):
        count_hints(trust, number, True, 1, 0)
    trust.count_return("old", True)  # the return of a forgotten source
    assert trust.level_of("old", True) == 0
    count_hints(trust, "old", True, 1, 0)
    assert trust.level_of("old", True) == 0


def test_ages_beyond_the_last_count_as_the_last():
    rates, other = ReturnRates(np.array([0])), ReturnRates(np.array([0]))
    for each, age in ((rates, 10**9), (other, OLDEST)):
        each.count(0, age, 1, is_event=True)
        refit(each, [0], [age])
    assert all(rates.index_of(0, age) == other.index_of(0, age) for age in (*starts(), 10**9))
