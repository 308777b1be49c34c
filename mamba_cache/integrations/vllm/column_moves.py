"""The rules of align mode, as plain numbers: which column of a block table is copied where.

The kernels decide the same way on the GPU; tests hold them to these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StateMove", "plan_alignment", "plan_migration", "previous_column", "running_column"]


@dataclass(frozen=True, slots=True)
class StateMove:
    """A copy of one request's states between columns of its block table.

    Attributes:
        source: The running column that is copied.
        destination: The column that is written.
        bias: Drafts accepted beyond the first token. The temporal state is that of column
            ``source + bias``; the conv window is shifted left by as many tokens.
    """

    source: int
    destination: int
    bias: int

    @property
    def stays(self) -> bool:
        """Whether the states stay in their column."""
        return self.source == self.destination

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return self.stays and not self.bias


def running_column(num_computed: int, num_scheduled: int, block_size: int) -> int:
    """Return the column that a step writes its first state to."""
    return -(-(num_computed + num_scheduled) // block_size) - 1


def previous_column(num_computed: int, block_size: int) -> int:
    """Return the column that holds the state of a request whose last step is not known.

    It is -1 for a request of which nothing is computed.
    """
    return (num_computed - 1) // block_size


def plan_migration(previous: int, current: int, num_accepted: int) -> StateMove | None:
    """Return how the state gets to the column that the step will read, or None if it is there.

    Args:
        previous: Running column of the last step, negative if there is none.
        current: Running column of this step.
        num_accepted: Tokens accepted of the last step.
    """
    if previous < 0 or previous == current:
        return None
    return StateMove(previous, current, max(num_accepted - 1, 0))


def plan_alignment(
    num_running: int, num_accepted: int, column: int, block_size: int
) -> StateMove | None:
    """Return how the state at the last block boundary is saved, or None if none was crossed.

    Args:
        num_running: Tokens in the state of the running column: all but the step's drafts.
        num_accepted: Tokens accepted of the step, the first one included.
        column: The running column.
        block_size: Tokens of one column.
    """
    num_computed = num_running + num_accepted - 1
    aligned = num_computed // block_size * block_size
    if aligned < num_running or aligned < 1:
        return None
    return StateMove(column, aligned // block_size - 1, aligned - num_running)
