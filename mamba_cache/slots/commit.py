"""What one step has to put into slots, and how much of it fits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mamba_cache.states import PAD_SLOT_ID

__all__ = ["CommitBatch", "last_write_wins"]


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """States of one step on their way into slots: those in the scratch, then EOS checkpoints.

    Attributes:
        intermediate_block_ids: The block of each state in the scratch.
        src_offsets: Where in the scratch each of them is.
        eos_block_ids: The block of each EOS checkpoint.
        eos_requests: The row of the request whose live state it is.
        hashes: The hash id of each block, in the order of ``block_ids``.
    """

    intermediate_block_ids: list[int]
    src_offsets: list[int]
    eos_block_ids: list[int]
    eos_requests: list[int]
    hashes: list[int]

    @property
    def block_ids(self) -> list[int]:
        """All blocks: those of the scratch, then those of EOS checkpoints."""
        return self.intermediate_block_ids + self.eos_block_ids

    def within_capacity(self, housed: Collection[int], num_slots: int) -> CommitBatch:
        """Keeps, in order, what there is room for.

        Args:
            housed: Blocks that have a slot already, and so need no other.
            num_slots: Slots to be had for other blocks.
        """
        kept: set[int] = set()
        indices = []
        for index, block_id in enumerate(self.block_ids):
            if block_id not in housed and block_id not in kept:
                if len(kept) == num_slots:
                    continue
                kept.add(block_id)
            indices.append(index)
        return self._select(indices)

    def _select(self, indices: Sequence[int]) -> CommitBatch:
        num_intermediates = len(self.intermediate_block_ids)
        first = [i for i in indices if i < num_intermediates]
        eos = [i - num_intermediates for i in indices if i >= num_intermediates]
        return CommitBatch(
            intermediate_block_ids=[self.intermediate_block_ids[i] for i in first],
            src_offsets=[self.src_offsets[i] for i in first],
            eos_block_ids=[self.eos_block_ids[i] for i in eos],
            eos_requests=[self.eos_requests[i] for i in eos],
            hashes=[self.hashes[i] for i in indices],
        )


def last_write_wins(destinations: Sequence[int]) -> list[int]:
    """Turns all but the last mention of each destination into ``PAD_SLOT_ID``.

    The pairs of one launch run side by side: two that write to one slot would leave a mixture.
    """
    last = {destination: index for index, destination in enumerate(destinations)}
    return [d if last[d] == index else PAD_SLOT_ID for index, d in enumerate(destinations)]
