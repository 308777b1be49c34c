"""The plan of a step's copies, and ``StateTable``: where states and block tables lie, and the list.

The kernels plan the same way on the GPU; tests hold them to these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mamba_cache._checks import INT32_MAX
from mamba_cache._torch import outside_inference_mode, to_device
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.mamba_spec import StateMemory

__all__ = [
    "BLOCKS_PER_GROUP",
    "FACTS",
    "IntArray",
    "Moves",
    "StateTable",
    "plan_alignment",
    "plan_migration",
    "running_columns",
    "whole_tables",
]

IntArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Moves(NamedTuple):
    """Copies of states between columns of the requests' block tables, one for each row that moves.

    The temporal state is read from column ``source + bias``. The conv window is read from the
    source column and shifted left by ``bias`` tokens.

    Attributes:
        rows: Rows of the batch.
        sources: Running columns that are copied.
        destinations: Columns that are written.
        biases: Drafts accepted beyond the first token.
    """

    rows: IntArray
    sources: IntArray
    destinations: IntArray
    biases: IntArray

    @property
    def staying_rows(self) -> IntArray:
        """Rows whose states stay in their column."""
        staying: IntArray = self.rows[self.sources == self.destinations]
        return staying


def running_columns(num_tokens: IntArray, block_size: int) -> IntArray:
    """Return the columns of the last of ``num_tokens`` tokens, -1 for none.

    Before a step these tokens are the computed ones, and the column holds the state. After it they
    include the scheduled ones, and the column is the first that the step writes.
    """
    return (num_tokens - 1) // block_size


def plan_migration(previous: IntArray, current: IntArray, num_accepted: IntArray) -> Moves:
    """Return how states get to the columns that the step will read.

    ``previous`` are the running columns of the last step, negative if there is none.
    """
    (rows,) = ((previous >= 0) & (previous != current)).nonzero()
    return Moves(rows, previous[rows], current[rows], np.maximum(num_accepted[rows] - 1, 0))


def plan_alignment(
    num_running: IntArray, num_accepted: IntArray, columns: IntArray, block_size: int
) -> Moves:
    """Return how states at block boundaries that were crossed are saved.

    ``num_running`` are the tokens in the state of the running column: all but the step's drafts.
    """
    aligned = (num_running + num_accepted - 1) // block_size * block_size
    (rows,) = ((aligned >= num_running) & (aligned > 0)).nonzero()
    destinations = aligned[rows] // block_size - 1
    return Moves(rows, columns[rows], destinations, (aligned - num_running)[rows])


FACTS = ("base_address", "block_stride", "block_bytes", "token_bytes", "conv_width", "group")
"""What a row of ``StateTable.facts`` tells of a state: its address in block 0, the bytes from block
to block, of a block, and of one token in one row, the tokens of a conv window (0 for a temporal
state), and the Mamba group."""

BLOCKS_PER_GROUP = 3
"""Block ids of one copy: the conv source, the temporal source and the destination."""

_MAX_WORD_BYTES = 8


class StateTable:
    """Where every state of a model lies, the block tables, and the list of copies.

    A plan, made on the host or on the device, fills ``copies``. One kernel carries the list out for
    all states.

    Args:
        num_groups: Mamba groups.
        block_size: Tokens of one column.
        copies: [num_ints(max_num_reqs, num_groups)] int32 on the device: room for the list.

    Attributes:
        copies: [1 + max_num_reqs, 1 + BLOCKS_PER_GROUP * num_groups] int32. Entry 0 begins with the
            number of copies; the entries after it have the bias of a copy, then its blocks by
            group.
        num_groups: Mamba groups.
        block_size: Tokens of one column.
        facts: [num_states, len(FACTS)] int64 on the device.
        memories: The states.
        num_blocks: By group: the blocks that every state has; no limit without a state.
        max_block_bytes: Bytes of the largest state of a block.
        word_bytes: The widest word, up to 8 bytes, that fits all addresses and sizes.
        pointers: [num_groups] int64 on the device: addresses of the block tables.
        row_stride: Elements from row to row of every block table.
        block_tables: [rows, columns] int32 of each group.
        is_by_slot: Whether their rows are request slots, else rows of the batch.
    """

    @outside_inference_mode
    def __init__(self, num_groups: int, block_size: int, copies: torch.Tensor) -> None:
        self.copies = copies.view(-1, 1 + BLOCKS_PER_GROUP * num_groups)
        self.num_groups = num_groups
        self.block_size = block_size
        self.facts = torch.zeros((0, len(FACTS)), dtype=torch.int64, device=copies.device)
        self.memories: Sequence[StateMemory] = ()
        self.num_blocks = [INT32_MAX] * num_groups
        self.max_block_bytes = 0
        self.word_bytes = 1
        self.pointers = torch.zeros(num_groups, dtype=torch.int64, device=copies.device)
        self.row_stride = 0
        self.block_tables: Sequence[torch.Tensor] = ()
        self.is_by_slot = True

    @staticmethod
    def num_ints(max_num_reqs: int, num_groups: int) -> int:
        """Return the ints of a list of ``max_num_reqs`` copies."""
        return (1 + max_num_reqs) * (1 + BLOCKS_PER_GROUP * num_groups)

    @property
    def device(self) -> torch.device:
        """Where the states live."""
        return self.copies.device

    def bind_states(self, memories: Sequence[StateMemory]) -> None:
        """Learn where the states lie, without waiting for the device."""
        facts = np.zeros((len(memories), len(FACTS)), dtype=np.int64)
        for row, m in zip(facts, memories, strict=True):
            row[:] = (
                m.blocks.data_ptr(), m.blocks.stride(0), m.block_bytes, m.token_bytes,
                m.conv_width, m.group,
            )  # fmt: skip
        self.facts = to_device(torch.from_numpy(facts), self.device)
        for group in range(self.num_groups):
            self.num_blocks[group] = min(
                (len(m.blocks) for m in memories if m.group == group), default=INT32_MAX
            )
        self.max_block_bytes = int(facts[:, FACTS.index("block_bytes")].max(initial=0))
        # Addresses, strides and bytes; each fits the word.
        self.word_bytes = math.gcd(_MAX_WORD_BYTES, int(np.gcd.reduce(facts[:, :4], axis=None)))
        self.memories = memories

    def bind_block_tables(self, block_tables: Sequence[torch.Tensor]) -> None:
        """Take the block tables to be used from now on, without waiting for the device.

        They are [rows, columns] int32 of each Mamba group, and must keep their storage.

        Raises:
            InvalidArgumentError: As ``whole_tables``. Nothing was changed.
        """
        whole = whole_tables(block_tables, self.num_groups, self.device)
        addresses = [table.data_ptr() for table in whole]
        if addresses != [table.data_ptr() for table in self.block_tables]:
            pointers = torch.from_numpy(np.array(addresses, dtype=np.int64))
            self.pointers = to_device(pointers, self.device)
        self.row_stride = whole[0].stride(0)
        self.block_tables = whole

    def list_copies(
        self,
        moves: Moves,
        blocks_of: Callable[[int, int], Sequence[int]],
        name_of: Callable[[int], str],
    ) -> list[int]:
        """Return the list of copies of some moves, as the ints that ``copies`` begins with.

        ``blocks_of`` returns the block of each column, of a row and group, and ``name_of`` what an
        error calls a row.

        Raises:
            InvalidArgumentError: A column or block is out of range.
        """
        listed = [len(moves.rows)] + [0] * (self.copies.shape[1] - 1)
        for row, source, destination, bias in zip(*(a.tolist() for a in moves), strict=True):
            listed.append(bias)
            for group, num_blocks in enumerate(self.num_blocks):
                blocks = blocks_of(row, group)
                columns = source, source + bias, destination
                if not all(0 <= column < len(blocks) for column in columns):
                    raise InvalidArgumentError(
                        f"{name_of(row)} has {len(blocks)} columns in Mamba group {group}, but "
                        f"copies column {source} to {destination} after {bias} accepted drafts"
                    )
                copied = [blocks[column] for column in columns]
                if max(copied) >= num_blocks:
                    raise InvalidArgumentError(
                        f"{name_of(row)} has block {max(copied)} in Mamba group {group}, whose "
                        f"states have {num_blocks} blocks"
                    )
                listed += copied
        return listed


def whole_tables(
    block_tables: Sequence[torch.Tensor], num_groups: int, device: torch.device
) -> list[torch.Tensor]:
    """Check block tables, and return them with all rows that their storage holds.

    An engine may show the first rows of a larger table.

    Raises:
        InvalidArgumentError: Their number, dtype, layout or device does not fit, or their rows lie
            at different distances.
    """
    if len(block_tables) != num_groups:
        raise InvalidArgumentError(
            f"a block table is required for each of {num_groups} Mamba groups, "
            f"got {len(block_tables)}"
        )
    for table in block_tables:
        fits = table.dim() == 2 and table.dtype == torch.int32 and table.device == device
        if not fits or (table.shape[1] > 1 and table.stride(1) != 1):
            raise InvalidArgumentError(
                f"a block table must be [rows, columns] int32 on {device} with contiguous rows, "
                f"got shape {tuple(table.shape)}, strides {table.stride()}, {table.dtype} on "
                f"{table.device}"
            )
    strides = {table.stride(0) for table in block_tables}
    if len(strides) > 1:
        raise InvalidArgumentError(
            f"all block tables must have one row stride, got {sorted(strides)}"
        )
    return [_all_rows(table) for table in block_tables]


def _all_rows(table: torch.Tensor) -> torch.Tensor:
    num_columns, stride = table.shape[1], table.stride(0)
    if not num_columns or not stride:
        return table
    room = table.untyped_storage().nbytes() // table.element_size() - table.storage_offset()
    return table.as_strided(((room - num_columns) // stride + 1, num_columns), table.stride())
