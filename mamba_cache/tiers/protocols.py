"""What a tier below host memory implements: a disk, or a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from mamba_cache.tiers.entry import EntryFacts, EntryKey, Refusal

__all__ = ["AskedTier", "Done", "Found", "LowerTier"]

Done: TypeAlias = Callable[[Refusal | None], object]
"""Called once, from any thread, when a put or a load is over: None, or why it failed."""

Found: TypeAlias = Callable[[list[bool]], object]
"""Called once, from any thread, with whether each key was found."""


class LowerTier(Protocol):
    """A place for entries below host memory, which reads and writes with threads of its own.

    No call waits for input or output, and none raises because of it: what goes wrong is a
    ``Refusal``, which the tier counts too. A tier that is slow, full or broken refuses at once.

    Attributes:
        name: What stats call it, such as "disk".
    """

    name: str

    @property
    def is_healthy(self) -> bool:
        """Whether it takes calls now. One that is not may become so again."""

    def has_many(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Say of each key whether it is likely to be there; ``load`` alone knows."""

    def put(self, facts: EntryFacts, payload: memoryview, done: Done) -> bool:
        """Queue an entry to be stored.

        Args:
            facts: What it is.
            payload: [``facts.payload_bytes``] bytes. They are not written until ``done``, by which
                time the tier has read them to their end and does not read them again.
            done: Called when it is stored, or is known not to be.

        Returns:
            False if it is not taken: the queue is full, or the tier is not healthy. ``done`` is not
            called then.
        """

    def load(self, expected: EntryFacts, into: memoryview, done: Done) -> bool:
        """Queue an entry to be read and verified: each field of its header, and its digest.

        Args:
            expected: What the request derived of it.
            into: [``expected.payload_bytes``] bytes to write to, until ``done``. They hold the
                entry only if that was called with None.
            done: Called when it is there and verified, or is known not to be. An entry that does
                not match is not found again.

        Returns:
            False if it is not taken, as in ``put``.
        """

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until what was queued so far is over, and ``done`` has been called for it.

        Args:
            timeout_seconds: How long. Default: as long as it takes.

        Returns:
            Whether it is.
        """

    def close(self) -> None:
        """End its threads; what is queued is given up, and ``done`` called for each."""


class AskedTier(LowerTier, Protocol):
    """A lower tier that must be asked what it has: ``has_many`` says only what is known here."""

    def ask(self, keys: Sequence[EntryKey], found: Found) -> bool:
        """Queue a question which entries it has.

        Args:
            keys: Of the entries.
            found: Called with True or False for each; False where that cannot be known.

        Returns:
            False if it is not taken, as in ``put``.
        """

    def silence(self) -> float:
        """Return for how many seconds it has owed an answer to somebody who reads; 0: to nobody."""
