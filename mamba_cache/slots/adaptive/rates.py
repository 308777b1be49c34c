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
_ROWS_AT_ONCE: Final = 12
_NO_GROUP: Final = -1


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
        index: [num_classes * NUM_BINS] int64, by class, then by age bin. Read only.
    """

    def __init__(self, groups: npt.NDArray[np.int64]) -> None:
        self._groups = groups
        self._num_groups = int(groups.max()) + 1
        self._classes_of_group = [(groups == g).nonzero()[0] for g in range(self._num_groups)]
        shape = len(groups), NUM_BINS
        self._events = np.zeros(shape, np.int64)
        self._ends = np.zeros(shape, np.int64)  # spells that end in a bin, less those that begin
        self._parts = np.zeros(shape, np.int64)  # what they spend in it, likewise
        self._is_seen = np.zeros(len(groups), np.bool_)
        self._table = np.zeros(shape, np.int64)
        self.index = self._table.reshape(-1)
        # Single elements are read and written several times faster through memoryviews.
        self._event_at, self._end_at = self._events.reshape(-1).data, self._ends.reshape(-1).data
        self._part_at, self._seen_at = self._parts.reshape(-1).data, self._is_seen.data
        self._bin_at = BIN_OF_AGE.data
        self.reset()

    def reset(self) -> None:
        """Forget everything that was seen."""
        for array in (self._events, self._ends, self._parts, self._is_seen):
            array.fill(0)
        self._seen: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._exposure = self._seen_events = np.empty((0, NUM_BINS))
        self._classes_of_row: list[npt.NDArray[np.intp]] = []
        self._rates: npt.NDArray[np.float64] | None = self._exposure
        self._num_done, self._num_bins = 0, NUM_BINS
        self._table[:] = _gittins(_PRIOR[None])

    def state(self) -> npt.NDArray[np.int64]:
        """Return what later indices depend on, as int64."""
        rates = self._exposure if self._rates is None else self._rates
        counts = (
            self._events[self._is_seen],
            self._ends[self._is_seen],
            self._parts[self._is_seen],
        )
        flat = [array.reshape(-1) for array in (*counts, self._table[self._is_seen])]
        progress = np.array([self._num_done, self._num_bins], np.int64)
        return np.concatenate((*flat, rates.reshape(-1).view(np.int64), progress))

    def begin_spell(self, klass: int, age: int) -> None:
        """Count a candidate that enters a class at an age, 0 if it is new or was just used."""
        self._seen_at[klass] = True
        if age:
            self._count(klass, age, -1)

    def end_spell(self, klass: int, age: int, *, is_event: bool) -> None:
        """Count a candidate that leaves a class at an age, because it was asked for or not."""
        if not age:
            return
        place = self._count(klass, age, 1)
        if is_event:
            self._event_at[place] += 1

    def _count(self, klass: int, age: int, step: int) -> int:
        age = min(age, OLDEST)
        bin_ = self._bin_at[age - 1]
        place = klass * NUM_BINS + bin_
        self._end_at[place] += step
        self._part_at[place] += step * (age - _FIRST_AT[bin_] + 1)
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
        seen = self._seen = self._is_seen.nonzero()[0]
        row_of_class = np.zeros(len(self._is_seen), np.int64)
        row_of_class[seen] = np.arange(len(seen))
        lived = ages > 0
        ages, rows = np.minimum(ages[lived], OLDEST), row_of_class[classes[lived]]
        bins = BIN_OF_AGE[ages - 1]
        places, size = rows * NUM_BINS + bins, len(seen) * NUM_BINS
        shape = len(seen), NUM_BINS
        # Sums of integers below 2**53: float64 adds them up exactly, in any order.
        ends = np.bincount(places, minlength=size).reshape(shape) + self._ends[seen]
        spent = np.bincount(places, ages - _FIRST_AGE[bins] + 1, minlength=size).reshape(shape)
        outlasting = ends[:, ::-1].cumsum(1)[:, ::-1] - ends
        self._exposure = outlasting * _WIDTHS + (spent + self._parts[seen])
        self._seen_events = self._events[seen].astype(np.float64)
        self._rates, self._num_done = None, 0

    def _lean(self) -> npt.NDArray[np.float64]:
        """Return the rates whose indices are to be derived, and keep of which classes each is.

        The first are those of all groups of which nothing was seen. Then come the other groups',
        for their classes of which nothing was, and those of the classes seen.
        """
        events, exposure = self._seen_events, self._exposure
        own = self._groups[self._seen]
        groups = sorted({*own.tolist()})
        is_of_group = own == np.array([_NO_GROUP, *groups])[:, None]
        sums = is_of_group.astype(np.float64)
        group_events, group_exposure = sums @ events, sums @ exposure
        in_all = _shrunk(group_events.sum(0), group_exposure.sum(0), _PRIOR)
        in_groups = _shrunk(group_events, group_exposure, in_all)
        of_groups = [self._classes_of_group[group] for group in groups]
        is_unseen = np.ones(len(self._is_seen), np.bool_)
        for classes in of_groups:
            is_unseen[classes] = False
        self._classes_of_row = [
            is_unseen.nonzero()[0],
            *(classes[~self._is_seen[classes]] for classes in of_groups),
            *self._seen[:, None],
        ]
        of_classes = _shrunk(events, exposure, in_groups[is_of_group.argmax(0)])
        return np.concatenate((in_groups, of_classes))

    def work(self) -> None:
        """Derive the indices of some classes from what the last ``refit`` has found."""
        if self._rates is None:  # by itself: together with the counting it would take too long
            self._rates = self._lean()
            return
        first, last = self._num_done, min(self._num_done + _ROWS_AT_ONCE, len(self._rates))
        if first == last:
            return
        found = _gittins(self._rates[first:last], self._num_bins)
        for classes, index in zip(self._classes_of_row[first:last], found, strict=True):
            self._table[classes, : self._num_bins] = index
        self._num_done = last


def _shrunk(
    events: npt.NDArray[np.float64],
    exposure: npt.NDArray[np.float64],
    prior: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    level = (events.sum(-1) + _LEVEL_EVENTS) / ((exposure * prior).sum(-1) + _LEVEL_EVENTS)
    prior = prior * level[..., None]
    rates: npt.NDArray[np.float64] = (events + _BIN_EVENTS) / (exposure + _BIN_EVENTS / prior)
    return rates


def _gittins(rates: npt.NDArray[np.float64], num_bins: int = NUM_BINS) -> npt.NDArray[np.int64]:
    """Return the index of each row of rates at each of the first age bins.

    Gittins, Glazebrook and Weber, Multi-armed Bandit Allocation Indices, 2011, chapter 2: for a
    state that is asked for at most once, the best stopping age has a closed form.
    """
    expected = rates * _WIDTHS
    # In place of exp(-x), whose last bit depends on the processor.
    survival = 1 / (1 + expected + expected * expected / 2)
    alive = np.ones((len(rates), NUM_BINS + 1))
    np.cumprod(survival, 1, out=alive[:, 1:])
    time = np.zeros((len(rates), NUM_BINS + 1))
    spent = (alive[:, :-1] + alive[:, 1:]) * (_WIDTHS / 2)
    time[:, :-1] = spent[:, ::-1].cumsum(1)[:, ::-1]
    ratio = alive[:, :num_bins, None] - alive[:, None, 1:]
    taking = time[:, :num_bins, None] - time[:, None, 1:]
    # Where the second bin comes first both are negative, and where no age lies in between neither
    # is anything: the one ratio is never the highest then, and the other is 0.
    ratio /= np.maximum(taking, _NO_TIME, out=taking)
    index: npt.NDArray[np.int64] = (ratio.max(2) * INDEX_SCALE).astype(np.int64)
    return index
