"""Paths of prompts at positions a few tokens apart, for states that lie inside blocks as well."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Final

import numpy as np
import numpy.typing as npt

from mamba_cache.blocks import BlockHashChain
from mamba_cache.slots import PromptFacts, StateProposal

__all__ = ["PromptPaths"]

_UNITS: Final = 64
"""In a block: fewer tokens than a chat template puts between what is said and a prompt's end."""

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIXERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class PromptPaths:
    """Names the positions of prompts for a policy that knows prompts by their blocks.

    Such a policy sees block boundaries alone. Where prompts and answers end inside blocks, and
    prompts go on from there, it is shown units of a few tokens in the place of blocks. A state
    counts for the last whole unit before it. The end of a block has the hash id of the block.

    Args:
        block_size_tokens: Tokens of a block.

    Attributes:
        unit_tokens: Tokens of a unit.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self.unit_tokens = math.gcd(block_size_tokens, max(1, block_size_tokens // _UNITS))
        self._weights: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def hash_ids(self, chain: BlockHashChain, tokens: npt.NDArray[np.int32]) -> list[int]:
        """Return the id of each unit of a sequence, which names the whole prefix.

        Args:
            chain: The sequence, or a longer one, hashed.
            tokens: Its token ids; if they fill no unit, all of them are one.
        """
        unit, count = self.unit_tokens, len(tokens)
        if count > len(self._weights):
            self._weights = _weights(2 * count)
        sums = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * self._weights[:count])
        ends = sums[unit - 1 :: unit] if count >= unit else sums[-1:]
        root = np.uint64(int.from_bytes(chain.parent_digest(0)[:8], "little"))
        ids: list[int] = ((ends + root) >> np.uint64(1) | np.uint64(1)).tolist()
        per_block = self._block_size // unit
        num_blocks = count // self._block_size
        ids[per_block - 1 : num_blocks * per_block : per_block] = chain.hashes[:num_blocks]
        return ids

    def facts(
        self,
        hash_ids: list[int],
        num_tokens: int,
        num_matched: int,
        num_usable: int,
        *,
        will_continue: bool | None,
        source: Hashable,
    ) -> PromptFacts:
        """Describe a prompt that was just matched.

        Args:
            hash_ids: What ``hash_ids`` returned.
            num_tokens: Its tokens.
            num_matched: How many of them were found.
            num_usable: How many of them could be skipped at most.
            will_continue: As in ``PromptFacts``, like the next.
            source: See there.
        """
        # Policies tell prompts apart by what of them is new, in blocks.
        num_new = (num_tokens - num_matched) // self._block_size
        return PromptFacts(
            hash_ids,
            self.unit_tokens,
            max(0, len(hash_ids) - num_new),
            num_usable // self.unit_tokens,
            will_continue,
            source,
        )

    def depth(self, position: int) -> int:
        """Return how many units lie before a position, at least one."""
        return max(1, position // self.unit_tokens)

    def propose_answer(
        self, prompt: object, hash_ids: list[int], *, is_asked: bool
    ) -> StateProposal:
        """Describe the state where an answer ends.

        Args:
            prompt: What the policy returned for its prompt.
            hash_ids: Of prompt and answer, up to the state.
            is_asked: As in ``StateProposal``.
        """
        return StateProposal(prompt, len(hash_ids), "end", is_asked, hash_ids, knows_last=True)


def _weights(count: int) -> npt.NDArray[np.uint64]:
    """Return a number for each position, [count], the same whatever the count."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    for mixer, shift in zip(_MIXERS, (30, 27), strict=True):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * mixer
    odd: npt.NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return odd
