"""The exceptions of the package.

``MambaCacheError`` is the root. Each leaf also derives from a suitable built-in: ``ValueError`` for
bad input, ``RuntimeError`` for exhausted resources. A call that raises one has changed nothing.
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
    """An argument is invalid; the message has the given value and the allowed ones."""


class BudgetError(InvalidArgumentError):
    """A memory budget is too small for the cache, or larger than the memory."""


class SequenceLengthError(InvalidArgumentError):
    """A request is longer than the configured maximum sequence length."""


class UnknownBlockError(InvalidArgumentError):
    """A block id is negative, past the pool's end, or the block is not allocated."""


class UnknownRequestError(InvalidArgumentError):
    """No unfinished request has this id."""


class DoubleFreeError(InvalidArgumentError):
    """A block or slot was released more often than it was taken."""


class HashConflictError(InvalidArgumentError):
    """A block with one hash was to be registered under another hash."""


class MissingStateError(MambaCacheError, LookupError):
    """A block has no slot, so no state can be written to it or read from it."""


class NotCopyableError(MambaCacheError, TypeError):
    """An object that owns memory cannot be copied or pickled."""


class StepOrderError(MambaCacheError, RuntimeError):
    """A call is out of order, such as ``commit_step`` without ``begin_step``."""


class ConcurrentUseError(MambaCacheError, RuntimeError):
    """An object was called while another call of the same object was running."""


class PoisonedError(MambaCacheError, RuntimeError):
    """An exception interrupted a change in an earlier call; the message names both."""


class InvariantError(MambaCacheError, AssertionError):
    """``check_invariants`` found records that contradict each other: a bug, never bad input."""


class MissingExtraError(MambaCacheError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class UnsupportedVersionError(MambaCacheError, ImportError):
    """The installed version of another project is not supported; the message names what differs."""


class UnresumableModelError(MambaCacheError, RuntimeError):
    """A model that resumes from a saved state computes other results than without a break."""


class ModelChangedError(MambaCacheError, RuntimeError):
    """The model differs from the one that computed the cached prefixes."""


class UnwrittenStateWarning(MambaCacheError, RuntimeWarning):  # noqa: N818 (a warning)
    """A step's forward did not write all states of its checkpoints, so they are not published."""


class TierInUseError(MambaCacheError, RuntimeError):
    """Another process uses a folder of the disk cache; the message names the folder."""


class CapacityError(MambaCacheError, RuntimeError):
    """Too few of a resource are available.

    Attributes:
        required: Number that the call needed.
        available: Number that was available.
        detail: More about the reason, or "".
    """

    #: Name of the resource in the message.
    resource = "units"
    #: End of the message, after the available number.
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
    """Too few KV blocks are free or evictable."""

    resource = "KV blocks"


class RequestCapacityError(CapacityError):
    """Too few request rows are free."""

    resource = "request rows"


class TokenCapacityError(CapacityError):
    """A step would have more tokens than its buffers hold."""

    resource = "tokens in one step"


class MambaSlotCapacityError(CapacityError):
    """Too few slots are free or evictable."""

    resource = "Mamba slots"
    supply = "free or evictable slots are available"
