"""Clocks for code that reads ``time``: they stand for that module in the module that reads it."""

import random
import time


class Clock:
    """Each reading is ``tick`` seconds after the one before."""

    def __init__(self, tick: float) -> None:
        self._tick, self._now = tick, 0.0

    def perf_counter(self) -> float:
        self._now += self._tick
        return self._now

    monotonic = process_time = thread_time = time = perf_counter


class JumpingClock:
    """Each reading is some time after the one before: mostly little, now and then much."""

    def __init__(self) -> None:
        self._random, self._now = random.Random(0), 0.0

    def perf_counter(self) -> float:
        self._now += 1e-6 + self._random.expovariate(1) ** 4  # less would be lost in a large sum
        return self._now

    def time_ns(self) -> int:
        return int(1e9 * self.perf_counter())

    def sleep(self, seconds: float) -> None:
        """Lets other threads run, for no longer than that takes."""
        self._now += seconds
        time.sleep(0)

    monotonic = process_time = thread_time = time = perf_counter


class ManualClock:
    """Stands still until somebody turns it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(1e9 * self.now)

    monotonic = process_time = thread_time = time = perf_counter
