"""The claim of one who reads a slot."""

from __future__ import annotations

from dataclasses import dataclass

from mamba_cache.errors import InvalidArgumentError

__all__ = ["SlotLease", "check_lease"]


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


def check_lease(lease: object) -> None:
    """Checks that a caller gives a lease.

    Raises:
        InvalidArgumentError: It is something else.
    """
    if not isinstance(lease, SlotLease):
        raise InvalidArgumentError(f"give a SlotLease, got {lease!r}")
