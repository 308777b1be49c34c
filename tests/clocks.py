"""Clocks that tests turn themselves, for code that reads ``time``."""


class Clock:
    """Stands for the module ``time`` in a module that reads it: each reading is ``tick`` later."""

    def __init__(self, tick: float) -> None:
        self._tick, self._now = tick, 0.0

    def perf_counter(self) -> float:
        self._now += self._tick
        return self._now

    monotonic = process_time = time = perf_counter
