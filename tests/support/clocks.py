"""Clocks that replace the module ``time`` in a module that reads it."""

import random
import time


class Clock:
    """A clock that advances ``tick`` seconds at each reading."""

    def __init__(self, tick: float) -> None:
        self._tick, self._now = tick, 0.0

    def perf_counter(self) -> float:
        self._now += self._tick
        return self._now

    monotonic = process_time = thread_time = time = perf_counter


class JumpingClock:
    """A clock that advances a random time at each reading: mostly little, sometimes much."""

    def __init__(self) -> None:
        self._random, self._now = random.Random(0), 0.0

    def perf_counter(self) -> float:
        self._now += 1e-6 + self._random.expovariate(1) ** 4  # less is lost in a large sum
        return self._now

    def time_ns(self) -> int:
        return int(1e9 * self.perf_counter())

    def sleep(self, seconds: float) -> None:
        """Advance the clock and let other threads run, without a real wait."""
        self._now += seconds
        time.sleep(0)

    monotonic = process_time = thread_time = time = perf_counter


class ManualClock:
    """A clock that stands still until a test changes ``now``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(1e9 * self.now)

    monotonic = process_time = thread_time = time = perf_counter
