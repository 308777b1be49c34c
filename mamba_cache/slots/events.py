"""What a pool of slots announces: which states became findable, and which ceased to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["StateEvent", "StateObserver", "StatesRemoved", "StatesStored"]


@dataclass(frozen=True, slots=True)
class StatesStored:
    """States became findable by hash.

    Attributes:
        slots: Where they lie.
        block_ids: The block at whose end each of them stands; who knows the blocks knows its
            digest, parent and tokens.
        hash_ids: The hash id of each block.
    """

    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StatesRemoved:
    """States are not findable any more.

    Attributes:
        slots: Where they lay.
        block_ids: The block of each.
        hash_ids: The hash id that each was found by; the block may have another by now, or none.
        is_reset: Whether nothing is findable any more.
    """

    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    hash_ids: tuple[int, ...]
    is_reset: bool = False


StateEvent: TypeAlias = StatesStored | StatesRemoved
"""What a ``StateObserver`` is called with."""

StateObserver: TypeAlias = Callable[[StateEvent], object]
"""Called with each event, in order."""
