"""The claim of one who reads a slot."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SlotLease"]


@dataclass(frozen=True, slots=True)
class SlotLease:
    """A reader's claim on what a slot held when it was pinned.

    Attributes:
        slot: The pinned slot.
        block_id: The block whose state the slot held.
        generation: How often the slot had been taken from a block until then.
    """

    slot: int
    block_id: int
    generation: int
