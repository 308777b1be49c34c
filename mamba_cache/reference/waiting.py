"""Waiting for a common prefix: requests that begin alike share work that is not done yet.

Of several prompts submitted together, one computes what they have in common. It is told to save a
state where each of the others branches off; those may wait for it, and then resume from there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from mamba_cache.reference.requests import EngineRequest

__all__ = ["branch_positions", "common_blocks", "is_worth_waiting"]


def common_blocks(request: EngineRequest, other: EngineRequest) -> int:
    """Count the leading blocks that ``request`` need not compute once ``other`` has.

    Each digest names the whole prefix up to its block's end, so where one differs, all later ones
    do: a binary search finds the first.
    """
    limit = min(request.reusable_blocks, len(other.digests))
    return bisect_left(
        range(limit), True, key=lambda block: request.digests[block] != other.digests[block]
    )


def branch_positions(
    request: EngineRequest, queued: Iterable[EngineRequest], *, start: int, block_size_tokens: int
) -> list[int]:
    """Find where queued requests branch off one that is about to compute.

    Args:
        request: The request that computes.
        queued: Those that might resume from its states; it may be among them itself.
        start: The first token that it computes: states before it cannot be saved any more.
        block_size_tokens: Tokens of a block.

    Returns:
        Positions, in tokens, that it was not told before, ascending.
    """
    found = {
        common_blocks(other, request) * block_size_tokens
        for other in queued
        if other is not request
    }
    return sorted(p for p in found - request.branch_positions if p > start)


def is_worth_waiting(
    request: EngineRequest,
    scheduled: Iterable[tuple[EngineRequest, int]],
    *,
    skip_tokens: int,
    block_size_tokens: int,
) -> bool:
    """Say whether a queued request could skip more if it let others go first.

    Args:
        request: The queued request.
        scheduled: Requests that compute a part of their prompts in this step, each with the tokens
            that it has computed before.
        skip_tokens: What it could skip at once.
        block_size_tokens: Tokens of a block.

    Returns:
        Whether one of ``scheduled`` will save a state of a longer prefix of ``request``.
    """
    for other, num_computed in scheduled:
        position = common_blocks(request, other) * block_size_tokens
        if position > max(skip_tokens, num_computed) and position in other.branch_positions:
            return True
    return False
