"""Trust in what senders of requests say about the next one, learned for each source."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

__all__ = ["SourceTrust"]

_MOST_SOURCES: Final = 1024
_FEWEST_HINTS: Final = 32
_MOST_HINTS: Final = 2048
_NO, _YES = 0, 1
_SELDOM: Final = 0.1


class _Record:
    """What one source said: ends of prompts by hint, and how many were asked for again."""

    __slots__ = ("given", "returned")

    def __init__(self) -> None:
        self.given = [0, 0]
        self.returned = [0, 0]


class SourceTrust:
    """Says whether hints of a source are worth a class of their own.

    They are where prompts that were said to go on did so more often than those of the same source
    that were said not to, by more than chance explains. Until then, and where a source always says
    the same, its hints count as none: so random ones cost nothing.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()  # the longest unused first

    def level_of(self, source: Hashable, hint: bool) -> int:
        """Return the class of a hint.

        Returns:
            0 if it is not trusted; 1 if nothing is to follow and 2 if something is; 3 and 4 for the
            same of a source whose ends hardly ever went on.
        """
        record = self._records.get(source)
        if record is None or min(record.given) < _FEWEST_HINTS:
            return 0
        # Three deviations of the difference, squared: no root, whose last bit may differ.
        no, yes = (r / g for r, g in zip(record.returned, record.given, strict=True))
        share = sum(record.returned) / sum(record.given)
        variance = share * (1 - share) * (1 / record.given[_NO] + 1 / record.given[_YES])
        is_told_apart = yes > no and (yes - no) * (yes - no) > 9 * variance
        if not is_told_apart:
            return 0
        return (3 if no < _SELDOM * share else 1) + hint

    def count(self, source: Hashable, hint: bool) -> None:
        """Count the end of a prompt that came with a hint."""
        record = self._records.get(source)
        if record is None:
            record = self._records[source] = _Record()
            if len(self._records) > _MOST_SOURCES:
                self._records.popitem(last=False)
        self._records.move_to_end(source)
        record.given[hint] += 1
        if record.given[hint] > _MOST_HINTS:  # sources change
            record.given = [n // 2 for n in record.given]
            record.returned = [n // 2 for n in record.returned]

    def count_return(self, source: Hashable, hint: bool) -> None:
        """Count that such an end was asked for, for the first time."""
        record = self._records.get(source)
        if record is not None:
            record.returned[hint] = min(record.returned[hint] + 1, record.given[hint])
