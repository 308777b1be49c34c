"""Rates of return: how likely states of a class are to be asked for again, learned from counts."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["BIN_OF_AGE", "INDEX_SCALE", "NUM_BINS", "OLDEST", "ReturnRates"]

NUM_BINS: Final = 40
"""Ages are told apart by half-octaves."""

_EDGES: Final = np.array(
    # The first age of each bin: 2 ** (n / 2), rounded up, without a power of floats.
    [1 << n // 2 if n % 2 == 0 else -(-(1 << n // 2) * 665857 // 470832) for n in range(41)],
    np.int64,
)

OLDEST: Final = int(_EDGES[-1]) - 1
"""The highest age that is told apart, in requests."""

BIN_OF_AGE: Final = np.repeat(np.arange(NUM_BINS, dtype=np.int8), np.diff(_EDGES))
"""[OLDEST] int8: the bin of each age from 1 on."""

INDEX_SCALE: Final = 1 << 32
"""An index is a rate per request times this, an integer: sums of them come out alike anywhere."""

_FIRST_AGE: Final = _EDGES[:-1]
_WIDTHS: Final = np.diff(_EDGES).astype(np.float64)
_FIRST_AT: Final = _FIRST_AGE.data
_NO_TIME: Final = 1e-200
_PRIOR: Final = 0.5 / _FIRST_AGE
_LEVEL_EVENTS: Final = 2.0
_BIN_EVENTS: Final = 0.5
_AT_ONCE: Final = 1024


class ReturnRates:
    """Events and exposure by class and age, and the index that follows from them.

    A *spell* is the time that a candidate spends in one class: from the age at which it entered it
    to the age at which it was asked for, changed its class or was forgotten. Spells of an age bin
    together are its *exposure*, and events over exposure is the rate of return there. Where little
    was seen, the rate of the class leans on that of its group, this on that of all classes, and
    this on 1 / age (Gamma-Poisson shrinkage with two pseudo-events at each step).

    The index of a class at an age is that of Gittins: the highest ratio, over all ages up to which
    one might keep the state, of the chance that it is asked for by then to the time that it is
    expected to be kept.

    All is done by additions, products and quotients of float64 in a fixed order and rounded to
    integers, so processes that count alike have equal indices.

    Args:
        groups: [num_classes] the group of each class, from 0.

    Attributes:
        index: [NUM_BINS * num_classes] int64, by age bin, then by class. Read only.
    """

    def __init__(self, groups: npt.NDArray[np.int64]) -> None:
        self._groups = groups
        shape = len(groups), NUM_BINS
        # Side by side: events; spells that end in a bin, less those that begin; and what they
        # spend in it, likewise.
        self._counts = np.zeros((*shape, 3), np.int64)
        self._is_seen = np.zeros(len(groups), np.bool_)
        # By age first: ``work`` writes whole rows.
        self._table = np.zeros(shape[::-1], np.int64)
        self.index = self._table.reshape(-1)
        # Single elements are read and written several times faster through memoryviews.
        self._count_at, self._seen_at = self._counts.reshape(-1).data, self._is_seen.data
        self._bin_at = BIN_OF_AGE.data
        self.reset()

    def reset(self) -> None:
        """Forget everything that was seen."""
        self._counts.fill(0)
        self._is_seen.fill(False)
        self._seen: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._exposure = self._seen_events = np.empty((0, NUM_BINS))
        self._row_of_class = np.zeros(len(self._groups), np.intp)
        self._rates: npt.NDArray[np.float64] | None = _PRIOR[None]
        self._num_bins = NUM_BINS
        self._begin_deriving()
        while self._num_done < self._num_bins:
            self.work()

    def begin_spell(self, klass: int, age: int) -> None:
        """Count a candidate that enters a class at an age; one that is new or was just used is not.

        Its age is 0.
        """
        if age:
            self._count(klass, age, -1)

    def end_spell(self, klass: int, age: int, *, is_event: bool) -> None:
        """Count a candidate that leaves a class at an age, because it was asked for or not."""
        if age:
            place = self._count(klass, age, 1)
            if is_event:
                self._count_at[place] += 1

    def _count(self, klass: int, age: int, step: int) -> int:
        self._seen_at[klass] = True
        age = min(age, OLDEST)
        bin_ = self._bin_at[age - 1]
        place = 3 * (klass * NUM_BINS + bin_)
        self._count_at[place + 1] += step
        self._count_at[place + 2] += step * (age - _FIRST_AT[bin_] + 1)
        return place

    def refit(
        self, classes: npt.NDArray[np.int64], ages: npt.NDArray[np.int64], *, oldest: int = OLDEST
    ) -> None:
        """Begin to derive all indices anew from what was counted; ``work`` does it in parts.

        Args:
            classes: [n] the class of each candidate that is known now, whose spell goes on.
            ages: [n] its age.
            oldest: The highest age that any may have before the next refit is done.
        """
        self._num_bins = BIN_OF_AGE.item(min(oldest, OLDEST) - 1) + 1
        self._is_seen[classes] = True
        seen = self._seen = self._is_seen.nonzero()[0]
        events, begun_and_ended, parts = self._counts[seen].transpose(2, 0, 1)
        row_of_class = np.zeros(len(self._is_seen), np.int64)
        row_of_class[seen] = np.arange(len(seen))
        lived = ages > 0
        ages, rows = np.minimum(ages[lived], OLDEST), row_of_class[classes[lived]]
        bins = BIN_OF_AGE[ages - 1]
        places, size = rows * NUM_BINS + bins, len(seen) * NUM_BINS
        shape = len(seen), NUM_BINS
        # Sums of integers below 2**53: float64 adds them up exactly, in any order.
        ends = np.bincount(places, minlength=size).reshape(shape) + begun_and_ended
        spent = np.bincount(places, ages - _FIRST_AGE[bins] + 1, minlength=size).reshape(shape)
        outlasting = ends[:, ::-1].cumsum(1)[:, ::-1] - ends
        self._exposure = outlasting * _WIDTHS + (spent + parts)
        self._seen_events = events.astype(np.float64)
        self._rates, self._num_done = None, 0

    def _lean(self) -> npt.NDArray[np.float64]:
        """Return the rates whose indices are to be derived, and keep which are those of each class.

        The first are those of all groups of which nothing was seen. Then come the other groups',
        for their classes of which nothing was, and those of the classes seen.
        """
        events, exposure = self._seen_events, self._exposure
        groups, own = np.unique(self._groups[self._seen], return_inverse=True)
        own += 1
        sums = (own == np.arange(len(groups) + 1)[:, None]).astype(np.float64)
        group_events, group_exposure = sums @ events, sums @ exposure
        in_all = _shrunk(group_events.sum(0), group_exposure.sum(0), _PRIOR)
        in_groups = _shrunk(group_events, group_exposure, in_all)
        row_of_group = np.zeros(int(self._groups.max()) + 1, np.intp)
        row_of_group[groups] = np.arange(1, len(in_groups))
        self._row_of_class = row_of_group[self._groups]
        self._row_of_class[self._seen] = np.arange(len(own)) + len(in_groups)
        return np.concatenate((in_groups, _shrunk(events, exposure, in_groups[own])))

    def _begin_deriving(self) -> None:
        """Prepare what all indices follow from: who is still waiting at each age, and how long."""
        assert self._rates is not None, "there are rates, as the last refit has said"
        expected = self._rates.T * _WIDTHS[:, None]
        # In place of exp(-x), whose last bit depends on the processor.
        survival = 1 / (1 + expected + expected * expected / 2)
        self._alive = np.ones((NUM_BINS + 1, expected.shape[1]))
        np.cumprod(survival, 0, out=self._alive[1:])
        self._time = np.zeros_like(self._alive)
        spent = (self._alive[:-1] + self._alive[1:]) * (_WIDTHS[:, None] / 2)
        self._time[:-1] = spent[::-1].cumsum(0)[::-1]
        self._num_done = 0

    def work(self) -> None:
        """Derive the indices at some ages from what the last ``refit`` has found."""
        if self._rates is None:  # by itself: together with the counting it would take too long
            self._rates = self._lean()
            self._begin_deriving()
            return
        first = self._num_done
        if first == self._num_bins:
            return
        at_once = max(1, _AT_ONCE // len(self._rates))
        self._num_done = min(first + at_once, self._num_bins)
        for bin_ in range(first, self._num_done):
            index = _gittins(self._alive, self._time, bin_)
            index.take(self._row_of_class, out=self._table[bin_], mode="clip")


def _shrunk(
    events: npt.NDArray[np.float64],
    exposure: npt.NDArray[np.float64],
    prior: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    level = (events.sum(-1) + _LEVEL_EVENTS) / ((exposure * prior).sum(-1) + _LEVEL_EVENTS)
    prior = prior * level[..., None]
    rates: npt.NDArray[np.float64] = (events + _BIN_EVENTS) / (exposure + _BIN_EVENTS / prior)
    return rates


def _gittins(
    alive: npt.NDArray[np.float64], time: npt.NDArray[np.float64], start: int
) -> npt.NDArray[np.int64]:
    """Return the index at an age bin for each of some rates.

    Gittins, Glazebrook and Weber, Multi-armed Bandit Allocation Indices, 2011, chapter 2: for a
    state that is asked for at most once, the best stopping age has a closed form.

    Args:
        alive: [NUM_BINS + 1, n] the chance that nobody asks before a bin begins.
        time: [NUM_BINS + 1, n] the time that is expected to be spent from there on.
        start: The bin.
    """
    ratio = alive[start] - alive[start + 1 :]
    # Where no age lies in between neither is anything: the ratio is 0 then.
    ratio /= np.maximum(time[start] - time[start + 1 :], _NO_TIME)
    index: npt.NDArray[np.int64] = (ratio.max(0) * INDEX_SCALE).astype(np.int64)
    return index
