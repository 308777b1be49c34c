"""Every exception that the package raises on purpose.

``MambaCacheError`` is the root. Each leaf also derives from the built-in that a caller who does not
know this package would expect (``ValueError`` for bad input, ``RuntimeError`` for exhausted
resources). A call that raises one of them has changed nothing.
"""

__all__ = [
    "BlockCapacityError",
    "BudgetError",
    "CapacityError",
    "ConcurrentUseError",
    "DoubleFreeError",
    "HashConflictError",
    "InvalidArgumentError",
    "InvariantError",
    "MambaCacheError",
    "MambaSlotCapacityError",
    "MissingExtraError",
    "MissingStateError",
    "ModelChangedError",
    "NotCopyableError",
    "PoisonedError",
    "RequestCapacityError",
    "SequenceLengthError",
    "StepOrderError",
    "TierInUseError",
    "TokenCapacityError",
    "UnknownBlockError",
    "UnknownRequestError",
    "UnresumableModelError",
    "UnsupportedVersionError",
    "UnwrittenStateWarning",
]


class MambaCacheError(Exception):
    """Root of the package's exceptions."""


class InvalidArgumentError(MambaCacheError, ValueError):
    """An argument is outside what the call accepts; the message says what was given and allowed."""


class BudgetError(InvalidArgumentError):
    """A memory budget does not hold the least that the cache needs, or is more than there is."""


class SequenceLengthError(InvalidArgumentError):
    """A request is longer than the configured maximum sequence length."""


class UnknownBlockError(InvalidArgumentError):
    """A block id is negative, past the pool's end, or names a block that is not allocated."""


class UnknownRequestError(InvalidArgumentError):
    """A request id was never added, or its request is already finished."""


class DoubleFreeError(InvalidArgumentError):
    """A block or slot was given back more often than it was taken."""


class HashConflictError(InvalidArgumentError):
    """A block that carries one hash was registered under another."""


class MissingStateError(MambaCacheError, LookupError):
    """A block has no slot, so no state can be written to it or read from it."""


class NotCopyableError(MambaCacheError, TypeError):
    """An object that owns memory was to be copied or pickled."""


class StepOrderError(MambaCacheError, RuntimeError):
    """A call came out of order, such as ``commit_step`` without ``begin_step``."""


class ConcurrentUseError(MambaCacheError, RuntimeError):
    """A call came while another one of the same object was running."""


class PoisonedError(MambaCacheError, RuntimeError):
    """An exception broke off an earlier call in the middle of a change; the message says which."""


class InvariantError(MambaCacheError, AssertionError):
    """``check_invariants`` found bookkeeping that contradicts itself: a bug, never bad input."""


class MissingExtraError(MambaCacheError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class UnsupportedVersionError(MambaCacheError, ImportError):
    """Another project is installed in a version that this package does not fit; it says where."""


class UnresumableModelError(MambaCacheError, RuntimeError):
    """A model does not compute the same from a saved state as without a break."""


class ModelChangedError(MambaCacheError, RuntimeError):
    """A model is no longer the one that the cached prefixes were computed with."""


class UnwrittenStateWarning(MambaCacheError, RuntimeWarning):  # noqa: N818 (a warning)
    """A step's forward did not write states that it was to save, so they are not published."""


class TierInUseError(MambaCacheError, RuntimeError):
    """A folder of a disk cache is used by another process; the message says which."""


class CapacityError(MambaCacheError, RuntimeError):
    """Something that the call needs is used up.

    Attributes:
        required: How many the call needed.
        available: How many it could have had.
        detail: More about the reason, or "".
    """

    #: What is short, as the message names it.
    resource = "units"
    #: How the message ends, after the number available.
    supply = "are available"

    def __init__(self, required: int, available: int, detail: str = "") -> None:
        super().__init__(required, available, detail)
        self.required = required
        self.available = available
        self.detail = detail

    def __str__(self) -> str:
        message = (
            f"{self.required} {self.resource} are required, but only {self.available} {self.supply}"
        )
        return f"{message}: {self.detail}" if self.detail else message


class BlockCapacityError(CapacityError):
    """Free and evictable KV blocks do not suffice."""

    resource = "KV blocks"


class RequestCapacityError(CapacityError):
    """Every request row is taken."""

    resource = "request rows"


class TokenCapacityError(CapacityError):
    """A step would compute more tokens than its buffers hold."""

    resource = "tokens in one step"


class MambaSlotCapacityError(CapacityError):
    """Free and evictable slots do not suffice."""

    resource = "Mamba slots"
    supply = "free or evictable slots are available"
