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
    """The input of a placement.

    Attributes:
        prompt_tokens: Number of tokens of the prompt.
        block_size_tokens: Number of tokens of one block.
        num_matched_blocks: Number of the prompt's blocks with cached keys and values.
        num_required_blocks: Number of blocks of the prompt, with an incomplete last one.
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

        A position inside a block stands for the block's beginning, where a state can be saved.
        Positions may repeat, and may lie outside of the computed tokens or the prompt: such
        positions are ignored.
        """
        ...


@dataclass(frozen=True, slots=True)
class MegatronPlacement:
    """Ends of the KV match, of the last complete block, and of the penultimate block.

    The first is where another prompt branched off. The second is for the conversation's next turn.
    The third is for the same prompt again, which must compute at least one token.
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
    """The end of the KV match, where a prompt branches off from an earlier one.

    The second prompt with a common prefix saves a state at its end, which the third one finds.
    """

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return the one position."""
        return (facts.num_matched_blocks * facts.block_size_tokens,)


@dataclass(frozen=True, slots=True)
class LastBlock:
    """The end of the last complete block."""

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return the one position."""
        return (facts.prompt_tokens // facts.block_size_tokens * facts.block_size_tokens,)


@dataclass(frozen=True, slots=True)
class EveryNthBlock:
    """The end of every ``n``-th block of the prompt.

    Attributes:
        n: Number of blocks from one checkpoint to the next.

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
    """Return ``placement`` if it is one, and ``MegatronPlacement`` for None."""
    if placement is None:
        return MegatronPlacement()
    if isinstance(placement, CheckpointPlacement) and not isinstance(placement, type):
        return placement
    raise InvalidArgumentError(
        f"placement must be None or an object with the method positions, such as "
        f"MegatronPlacement(), LastBlock() or EveryNthBlock(4), got {placement!r}"
    )


def placed_positions(placement: CheckpointPlacement, facts: PlacementFacts) -> set[int]:
    """Return the last block boundary at or before each position of a placement.

    A state saved at another position would later be restored at the boundary.
    """
    block = facts.block_size_tokens
    name = f"the positions of {type(placement).__name__}"
    with outside:
        positions = as_ints(name, placement.positions(facts))
    return {p // block * block for p in positions}
