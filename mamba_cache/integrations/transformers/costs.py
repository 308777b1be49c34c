"""What forwards, restores and cuts take here, learned from calls, and what of it pays."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import torch

from mamba_cache.context import CacheStats

__all__ = [
    "CostModel",
    "DeviceEvent",
    "PrefixCacheStats",
    "Spending",
    "fewest_winning",
    "make_cost_model",
]

_RECENT = 8
"""Samples that count at one size: what was measured before them may hold no longer."""

_EVENT_PAIRS = 16
_TRY_EVERY = 16
"""Of the hits that would not win, one in so many is used: nothing else measures them again."""

_LONGEST = 86_400.0
"""Seconds: a clock that tells more was set in between."""

_MOST_BEYOND = 1.25
"""How far from a measured size, as a ratio, a time is still taken to be known."""


class DeviceEvent(Protocol):
    """A moment in the work of a device, as ``torch.cuda.Event`` is one."""

    def record(self) -> None:
        """Let the moment be when all that is enqueued now is done."""
        ...

    def query(self) -> bool:
        """Say whether it has come; this does not wait."""
        ...

    def milliseconds_since(self, start: DeviceEvent) -> float:
        """Return the time from another one to this one; both have come."""
        ...


class _CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        # Not the current device's stream: the model may be on another one.
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def milliseconds_since(self, start: DeviceEvent) -> float:
        assert isinstance(start, _CudaEvent)
        return float(start._event.elapsed_time(self._event))


@dataclass(slots=True)
class Spending:
    """What was spent so that prompts need not be computed again, and what that saved.

    Attributes:
        declined_hits: Prompts computed as a whole although a prefix was cached, because restoring
            it was known to take longer.
        declined_tokens: Tokens of those prefixes.
        declined_loads: Prompts of which more lay on the disk or in the store, but was not waited
            for, or no longer: computing it was known to be faster, or might be by then.
        splits: States saved inside a prompt, each of which divided its scans, or its forward.
        declined_splits: Positions of a placement that were passed over, because their states were
            known to save less than they cost.
        seconds_splitting: What the splits took, as far as it is known.
        seconds_restoring: What the restores took.
        seconds_saved: What the prompts with a hit would have taken longer without, as far as it is
            known; the restores are taken off.
    """

    declined_hits: int = 0
    declined_tokens: int = 0
    declined_loads: int = 0
    splits: int = 0
    declined_splits: int = 0
    seconds_splitting: float = 0.0
    seconds_restoring: float = 0.0
    seconds_saved: float = 0.0

    def reset(self) -> None:
        """Set all of it to 0."""
        for one in fields(self):
            setattr(self, one.name, one.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats(CacheStats):
    """``CacheStats`` of a prefix cache, and what it spent and saved: see ``Spending``.

    Each request is a hit, a miss or a declined hit.
    """

    declined_hits: int
    declined_tokens: int
    declined_loads: int
    splits: int
    declined_splits: int
    seconds_splitting: float
    seconds_restoring: float
    seconds_saved: float

    @classmethod
    def of(cls, stats: CacheStats, spent: Spending) -> PrefixCacheStats:
        """Join what a store counted and what was spent."""
        counted = {one.name: getattr(stats, one.name) for one in fields(CacheStats)}
        return cls(**counted, **{one.name: getattr(spent, one.name) for one in fields(Spending)})


class _Curve:
    """Times by size, linear between measured sizes.

    Sizes within a fifth of each other share their samples, of which the fastest of the last few
    counts: whatever else a machine does, compilation and warm-up among it, makes a time longer.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, int]]] = {}
        self._fastest: dict[int, tuple[int, float]] = {}
        self._points: tuple[list[int], list[float]] | None = None

    def add(self, size: int, seconds: float) -> None:
        """Take a sample; the first one of its size warms up, and does not count."""
        key = _size_class(size)
        recent = self._samples.get(key)
        if recent is None:
            self._samples[key] = deque(maxlen=_RECENT)
            return
        self._points = None  # before: an interrupt in between leaves nothing stale
        recent.append((seconds, size))
        least, of_size = min(recent)
        self._fastest[key] = of_size, least

    def points(self) -> tuple[list[int], list[float]]:
        """Return measured sizes, ascending, and their times, which do not fall."""
        if self._points is None:
            fastest = sorted(self._fastest.values())
            sizes, times = [size for size, _ in fastest], [seconds for _, seconds in fastest]
            # What did more in less time shows that the smaller one was disturbed.
            for index in range(len(times) - 2, -1, -1):
                times[index] = min(times[index], times[index + 1])
            self._points = sizes, times
        return self._points

    def at(self, size: int) -> float | None:
        """Return the time of a size, None if nothing near it, or around it, was measured."""
        sizes, times = self.points()
        if not sizes or size * _MOST_BEYOND < sizes[0] or size > sizes[-1] * _MOST_BEYOND:
            return None
        index = bisect_left(sizes, size)
        if index == len(sizes):
            return times[-1] * size / sizes[-1]
        if not index:
            return times[0]
        share = (size - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        return times[index - 1] + share * (times[index] - times[index - 1])

    def anywhere(self, size: int) -> float | None:
        """Return the same, and beyond what was measured that of a fixed part and one per unit."""
        known = self.at(size)
        sizes, times = self.points()
        if known is not None or not sizes:
            return known
        if len(sizes) == 1:
            return times[0] * max(1.0, size / sizes[0])
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
        return max(times[0] + slope * (size - sizes[0]), 0.0)


def _size_class(size: int) -> int:
    """Number the sizes so that four numbers follow each power of two."""
    bits = size.bit_length()
    return 4 * bits + (size >> (bits - 3) & 3) if bits > 2 else size


class CostModel:
    """Learns what forwards, restores and cuts take, and says what pays.

    On a CPU the host's clock is read around the work. On a device the work is enqueued: two events
    are, too, and are read in a later call, once they have come. Nothing waits. Of the host's time
    and the device's the larger one counts.

    No result may depend on what it says, only how it is come by: clocks are not to be trusted.

    Args:
        clock: The time in seconds.
        make_event: Makes an event of the device; None: work is done when a call returns.
        is_on: False: nothing is measured, so that nothing is ever known.

    Attributes:
        spent: What was spent and saved so far.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] | None = None,
        make_event: Callable[[], DeviceEvent] | None = None,
        is_on: bool = True,
    ) -> None:
        self._clock = _now if clock is None else clock
        self._make_event = make_event
        self._is_on = is_on
        self._whole = _Curve()  # forwards from a sequence's start, by tokens
        self._rest = _Curve()  # forwards that go on from a context, by tokens
        self._restores = _Curve()  # by bytes
        self._cuts: deque[float] | None = None
        self._free: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._pending: deque[
            tuple[tuple[DeviceEvent, DeviceEvent], float, Callable[[float], None]]
        ] = deque()
        self._losses = 0
        self.spent = Spending()

    def forward(
        self, num_tokens: int, start: int, num_cuts: int = 0
    ) -> AbstractContextManager[None]:
        """Measure the forward inside, over ``num_tokens`` tokens from ``start`` on.

        Its scans are divided in ``num_cuts`` places, to take states out.
        """
        return self._timed(partial(self._learn_forward, num_tokens, start, num_cuts))

    def restore(self, num_bytes: int) -> AbstractContextManager[None]:
        """Measure the restore inside, of so many bytes."""
        return self._timed(partial(self._learn_restore, num_bytes))

    def collect(self) -> None:
        """Learn from events that have come meanwhile."""
        while self._pending and self._pending[0][0][1].query():
            (start, end), seconds, learn = self._pending.popleft()
            _learn(learn, max(seconds, end.milliseconds_since(start) / 1e3))
            self._free.append((start, end))

    def forward_seconds(self, num_tokens: int, start: int) -> float | None:
        """Return what a forward takes, None if that is not known."""
        return (self._rest if start else self._whole).at(num_tokens)

    def prefill_seconds(self, num_tokens: int, start: int) -> float | None:
        """Return about what it takes to compute tokens, None if no forward was measured."""
        known = self.forward_seconds(num_tokens, start)
        for curve in (self._whole, self._rest):
            known = curve.anywhere(num_tokens) if known is None else known
        return known

    def restore_seconds(self, num_bytes: int) -> float | None:
        """Return what restoring so many bytes takes, None if that is not known."""
        return self._restores.anywhere(num_bytes)

    def cut_seconds(self) -> float | None:
        """Return what it takes to divide a forward's scans once more, None if it is not known."""
        return statistics.median(self._cuts) if self._cuts else None

    def uses(self, saving: float | None) -> bool:
        """Decide whether a hit is used that saves so many seconds, None if that is not known."""
        if saving is None:
            return True
        if saving > 0:
            self.spent.seconds_saved += saving
            return True
        self._losses += 1
        return not self._losses % _TRY_EVERY

    @contextmanager
    def _timed(self, learn: Callable[[float], None]) -> Iterator[None]:
        if not self._is_on:
            yield
            return
        if self._make_event is None:
            begin = self._clock()
            yield
            _learn(learn, self._clock() - begin)
            return
        self.collect()
        if len(self._pending) >= _EVENT_PAIRS:  # the device is far behind
            yield
            return
        pair = self._free.pop() if self._free else (self._make_event(), self._make_event())
        pair[0].record()
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        pair[1].record()
        self._pending.append((pair, seconds, learn))

    def _learn_forward(self, num_tokens: int, start: int, num_cuts: int, seconds: float) -> None:
        curve = self._rest if start else self._whole
        if not num_cuts:
            curve.add(num_tokens, seconds)
            return
        uncut = curve.at(num_tokens)
        if uncut is None:
            return
        if self._cuts is None:  # the first one warms up
            self._cuts = deque(maxlen=_RECENT)
            return
        more = max(seconds - uncut, 0.0)
        self._cuts.append(more / num_cuts)
        self.spent.seconds_splitting += more

    def _learn_restore(self, num_bytes: int, seconds: float) -> None:
        self._restores.add(num_bytes, seconds)
        self.spent.seconds_restoring += seconds


def make_cost_model(device: torch.device, *, is_on: bool) -> CostModel:
    """Make the cost model of a model on ``device``; off where neither clock nor events tell."""
    if device.type == "cuda":
        return CostModel(make_event=partial(_CudaEvent, device), is_on=is_on)
    return CostModel(is_on=is_on and device.type == "cpu")


def fewest_winning(gains: Mapping[int, float]) -> float | None:
    """Return from how many cached tokens on a hit wins.

    Args:
        gains: By the number of cached tokens, the time by which the hit is faster.

    Returns:
        The fewest of them from which on all gains are positive: between two of ``gains`` where the
        sign changes. None if the last one is not, or there is none.
    """
    lengths = sorted(gains)
    losing = [length for length in lengths if not gains[length] > 0]
    if not lengths or (losing and losing[-1] == lengths[-1]):
        return None
    if not losing:
        return lengths[0]
    below = losing[-1]
    above = lengths[lengths.index(below) + 1]
    return below + -gains[below] / (gains[above] - gains[below]) * (above - below)


def _learn(learn: Callable[[float], None], seconds: float) -> None:
    """Pass a time on, unless the clock went backwards, or tells none."""
    if 0 <= seconds < _LONGEST:
        learn(seconds)


def _now() -> float:
    return time.perf_counter()
