"""Matches: how much of a prompt is cached, a query that changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mamba_cache.blocks import BlockHashes, KVBlockAllocator
from mamba_cache.slots import SlotPool

__all__ = ["MissReason", "PrefixMatch", "find_prefix"]


class MissReason(str, Enum):
    """Why a request skipped no tokens."""

    CACHE_DISABLED = "cache_disabled"
    """Prefix caching is switched off."""

    PROMPT_SHORTER_THAN_BLOCK = "prompt_shorter_than_block"
    """The prompt has no complete block, so nothing of it can ever be cached."""

    NO_KV_MATCH = "no_kv_match"
    """Not even the first block was found."""

    NO_STATE = "no_state"
    """Blocks were found, but no state is saved at the end of any of them."""

    STATE_TOO_LATE = "state_too_late"
    """The only states lie so near the prompt's end that too few tokens would be left to compute."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a prompt is cached.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        block_ids: KV blocks of the prompt found cached, from its start.
        state_matched_blocks: Blocks up to the farthest usable state.
        skip_tokens: Tokens up to it: they need not be computed again.
        miss_reason: Why ``skip_tokens`` is 0; None if it is not.
        loaded_blocks: KV blocks up to that state that are loaded from the host tier: those after
            ``block_ids``.
        loads_state: Whether the state is loaded from there as well.
        arriving_tokens: Tokens that can be skipped once what ``prefetch`` brings has arrived; 0 if
            nothing is under way.
    """

    prompt_tokens: int
    block_ids: tuple[int, ...]
    state_matched_blocks: int
    skip_tokens: int
    miss_reason: MissReason | None
    loaded_blocks: int = 0
    loads_state: bool = False
    arriving_tokens: int = 0

    @property
    def kv_matched_blocks(self) -> int:
        """Blocks found cached."""
        return len(self.block_ids)


def find_prefix(
    hashes: BlockHashes,
    prompt_tokens: int,
    kv_blocks: KVBlockAllocator,
    slots: SlotPool,
    *,
    block_size_tokens: int,
    min_computed_tokens: int,
) -> PrefixMatch:
    """Match a prompt against the cache."""
    block_ids = kv_blocks.match_prefix(hashes)
    reason: MissReason | None = None
    if not block_ids:
        reason = MissReason.NO_KV_MATCH if len(hashes) else MissReason.PROMPT_SHORTER_THAN_BLOCK
        return PrefixMatch(prompt_tokens, (), 0, 0, reason)
    usable_blocks = max(0, prompt_tokens - min_computed_tokens) // block_size_tokens
    state_blocks = slots.num_blocks_to_state(block_ids[:usable_blocks])
    if not state_blocks:
        too_late = slots.num_blocks_to_state(block_ids)
        reason = MissReason.STATE_TOO_LATE if too_late else MissReason.NO_STATE
    return PrefixMatch(
        prompt_tokens, tuple(block_ids), state_blocks, state_blocks * block_size_tokens, reason
    )
