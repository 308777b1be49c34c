"""Copies in flight: the blocks or slots that each of them holds until it is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mamba_cache.errors import DoubleFreeError, InvalidArgumentError

__all__ = ["CopiesInFlight", "CopyInFlight", "Way"]

Way: TypeAlias = Literal["leaving", "arriving"]
"""Whether what is held is read, and free when the copy is done; or written, and findable then."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyInFlight:
    """What one copy holds: neither free nor findable until the copy is ended.

    Attributes:
        way: "leaving" or "arriving".
        ids: The blocks or slots, in order.
        number: Which copy of its pool it is; no two have the same, resets or not.
        block_ids: Of arriving slots, the block that each was taken for; else empty.
    """

    way: Way
    ids: tuple[int, ...]
    number: int
    block_ids: tuple[int, ...] = ()


class CopiesInFlight:
    """The copies out of one pool and into it.

    A copy that was begun before a reset is known as such when it ends at last, so it cannot end
    another one that holds the same blocks or slots by then.

    Attributes:
        num_leaving: Blocks or slots that are held by copies out of the pool.
        num_arriving: Likewise, by copies into it. Any thread may read both.
    """

    __slots__ = ("_first", "_held", "_next", "num_arriving", "num_leaving")

    def __init__(self) -> None:
        self._held: dict[int, CopyInFlight] = {}
        self._next = 0
        self.clear()

    def ids(self, way: Way | None = None) -> list[int]:
        """Return the blocks or slots that are held, by copies of one way or of both."""
        return [
            item for copy in self._held.values() if way in (None, copy.way) for item in copy.ids
        ]

    def block_of_slot(self) -> dict[int, int]:
        """Return the block that each arriving slot was taken for."""
        return {
            slot: block_id
            for copy in self._held.values()
            for slot, block_id in zip(copy.ids, copy.block_ids, strict=False)
        }

    def begin(self, way: Way, ids: Iterable[int], block_ids: Iterable[int] = ()) -> CopyInFlight:
        """Hold blocks or slots for a copy, and return what ends it."""
        copy = CopyInFlight(way, tuple(ids), self._next, tuple(block_ids))
        self._next += 1
        self._held[copy.number] = copy
        self._count(way, len(copy.ids))
        return copy

    def is_held(self, copy: CopyInFlight, way: Way) -> bool:
        """Say whether a copy still holds something, and not another one in its place.

        Returns:
            False if a reset has ended it.

        Raises:
            InvalidArgumentError: It is no copy, or goes the other way.
            DoubleFreeError: It was ended already, or is another pool's.
        """
        if not isinstance(copy, CopyInFlight) or copy.way != way:
            raise InvalidArgumentError(f"a copy must be what begin_{way} returned, got {copy!r}")
        if copy.number < self._first:
            return False
        if self._held.get(copy.number) is not copy:
            raise DoubleFreeError(f"{copy} was ended already, or is another pool's")
        return True

    def end(self, copy: CopyInFlight) -> tuple[int, ...]:
        """End a copy that holds something, and return what it held."""
        del self._held[copy.number]
        self._count(copy.way, -len(copy.ids))
        return copy.ids

    def clear(self) -> None:
        """End all copies, as a reset does."""
        self._held.clear()
        self._first = self._next  # of those since this reset
        self.num_leaving = self.num_arriving = 0

    def _count(self, way: Way, step: int) -> None:
        if way == "leaving":
            self.num_leaving += step
        else:
            self.num_arriving += step
