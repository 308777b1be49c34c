"""Checkpoint placement: which positions of a prompt are worth a saved state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from mamba_cache._checks import as_ints, check_int
from mamba_cache._guard import outside
from mamba_cache.errors import InvalidArgumentError

__all__ = [
    "BranchPoint",
    "CheckpointPlacement",
    "EveryNthBlock",
    "LastBlock",
    "MegatronPlacement",
    "PlacementFacts",
    "check_placement",
    "placed_positions",
]


class PlacementFacts(NamedTuple):
    """What a placement decides by.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        block_size_tokens: Tokens of one block.
        num_matched_blocks: Blocks of the prompt whose keys and values were found cached.
        num_required_blocks: Blocks that the prompt fills, the last one perhaps in part.
    """

    prompt_tokens: int
    block_size_tokens: int
    num_matched_blocks: int
    num_required_blocks: int


@runtime_checkable
class CheckpointPlacement(Protocol):
    """Chooses the checkpoints of a prompt."""

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return absolute positions, in tokens from the prompt's start, in any order.

        A position inside a block stands for the block's beginning, where a state can be saved. It
        may repeat, and may lie outside what is computed or the prompt itself: those who use it keep
        what fits.
        """
        ...


@dataclass(frozen=True, slots=True)
class MegatronPlacement:
    """Three: the end of the KV match, of the last complete block, and of the penultimate block.

    The first is where another prompt branched off; the second serves the conversation's next turn;
    the third serves the same prompt again, which must compute at least one token.
    """

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return the three positions."""
        block = facts.block_size_tokens
        return (
            facts.num_matched_blocks * block,
            facts.prompt_tokens // block * block,
            (facts.num_required_blocks - 1) * block,
        )


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """One: the end of the KV match, where a prompt branches off from an earlier one.

    It is seen when a second prompt shares a beginning with the first, so the third finds the state.
    """

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return the one position."""
        return (facts.num_matched_blocks * facts.block_size_tokens,)


@dataclass(frozen=True, slots=True)
class LastBlock:
    """One: the end of the last complete block."""

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return the one position."""
        return (facts.prompt_tokens // facts.block_size_tokens * facts.block_size_tokens,)


@dataclass(frozen=True, slots=True)
class EveryNthBlock:
    """The end of every ``n``-th block of the prompt.

    Attributes:
        n: Blocks from one checkpoint to the next.

    Raises:
        InvalidArgumentError: ``n`` is not an int >= 1.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_int("n", self.n, minimum=1))

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return the positions up to the prompt's end."""
        step = self.n * facts.block_size_tokens
        return range(step, facts.prompt_tokens + 1, step)


def check_placement(placement: object) -> CheckpointPlacement:
    """Return what a caller gives as a placement, Megatron's three positions for None."""
    if placement is None:
        return MegatronPlacement()
    if isinstance(placement, CheckpointPlacement) and not isinstance(placement, type):
        return placement
    raise InvalidArgumentError(
        f"placement must be None or an object with the method positions, such as "
        f"MegatronPlacement(), LastBlock() or EveryNthBlock(4), got {placement!r}"
    )


def placed_positions(placement: CheckpointPlacement, facts: PlacementFacts) -> set[int]:
    """Ask a placement for its positions, and keep of each the block boundary at or before it.

    A state saved at any other position would be found as that of the boundary.
    """
    block = facts.block_size_tokens
    name = f"the positions of {type(placement).__name__}"
    with outside:
        positions = as_ints(name, placement.positions(facts))
    return {p // block * block for p in positions}
