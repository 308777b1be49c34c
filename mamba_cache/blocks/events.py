"""What a pool of KV blocks announces: which blocks became findable, and which ceased to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BlockEvent", "BlockObserver", "BlocksRemoved", "BlocksStored"]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one sequence became findable, each the parent of the next.

    Attributes:
        block_ids: The blocks.
        hash_ids: The hash id of each.
        digests: The full digest of each; None for one that was registered by id alone.
        parent_hash: Hash id of the block before the first one; None at a sequence's start.
        parent_digest: Its full digest; None also where it is not known.
        tokens: [num_blocks * block_size_tokens] int32. What the blocks hold, in order; None if
            whoever registered them did not tell.
        block_size_tokens: Tokens of each block; fewer than others have for the part of a block.
            None if ``tokens`` is.
    """

    block_ids: tuple[int, ...]
    hash_ids: tuple[int, ...]
    digests: tuple[bytes | None, ...]
    parent_hash: int | None
    parent_digest: bytes | None
    tokens: npt.NDArray[np.int32] | None
    block_size_tokens: int | None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are not findable any more.

    Attributes:
        block_ids: The blocks, in the order in which they went.
        hash_ids: The hash id that each had.
        digests: The full digest that each had, or None.
        is_reset: Whether nothing is findable any more.
    """

    block_ids: tuple[int, ...]
    hash_ids: tuple[int, ...]
    digests: tuple[bytes | None, ...]
    is_reset: bool = False


BlockEvent: TypeAlias = BlocksStored | BlocksRemoved
"""What a ``BlockObserver`` is called with."""

BlockObserver: TypeAlias = Callable[[BlockEvent], object]
"""Called with each event, in order."""
