"""The table of addresses, strides and sizes of all states and block tables that kernels read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache._to_device import to_device
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.copy_specs import StateMemory

__all__ = ["CHUNK_FIELDS", "NUM_COUNTERS", "TILE_BYTES", "BlockTables", "StateTable"]

TILE_BYTES = 4096
"""Bytes of a state that a program of the fused kernels copies at a time. A power of two."""

CHUNK_FIELDS = (
    "base_address",
    "block_stride",
    "block_bytes",
    "token_bytes",
    "conv_width",
    "group",
    "first_tile",
    "num_tiles",
)
"""What a row of ``StateTable.chunks`` tells: of the chunk's state the address in block 0, the bytes
from block to block, of a block, and of one token in one row, the tokens of a conv window (0 for a
temporal state) and the Mamba group; then the chunk's first tile, and the tiles of a block."""

NUM_COUNTERS = 17
"""Counters by which the programs of a fused kernel share their work; each has a line of its own."""

_LINE_INTS = 32  # 128 bytes: atomics on neighbours would wait for each other
_MOST_TILES_PER_CHUNK = 16
_WIDEST_WORD_BYTES = 8


class BlockTables:
    """The block tables of all Mamba groups, and where kernels find them.

    Args:
        num_groups: Mamba groups.
        device: Where the tables live.

    Attributes:
        pointers: [num_groups] int64 on the device: their addresses.
        stride: Elements from row to row of every table.
        tensors: [rows, columns] int32 of each group.
    """

    @outside_inference_mode
    def __init__(self, num_groups: int, device: torch.device) -> None:
        self.pointers = torch.zeros(num_groups, dtype=torch.int64, device=device)
        self.stride = 0
        self.tensors: Sequence[torch.Tensor] = ()

    def bind(self, tables: Sequence[torch.Tensor]) -> None:
        """Take the block tables to be used from now on, without waiting for the device.

        Args:
            tables: [rows, columns] int32 of each Mamba group. A table that is the first rows of a
                larger one stands for all of it. They are read at each launch, so they must keep
                their storage, or be bound again.

        Raises:
            InvalidArgumentError: Their number, dtype, layout or device does not fit, or their rows
                lie at different distances. Nothing was changed.
        """
        device = self.pointers.device
        _check_block_tables(tables, len(self.pointers), device)
        whole = [_all_rows(table) for table in tables]
        addresses = [table.data_ptr() for table in whole]
        if addresses != [table.data_ptr() for table in self.tensors]:
            self.pointers = to_device(torch.from_numpy(np.array(addresses, dtype=np.int64)), device)
        self.stride = whole[0].stride(0)
        self.tensors = whole


class StateTable:
    """Where every state of a model lies, and the block tables that say which block is meant.

    A block of each state is cut into *chunks* of ``tiles_per_chunk`` tiles: so the table is small
    although the tiles are.

    Args:
        num_states: State tensors, over all layers and kinds.
        num_groups: Mamba groups.
        block_size: Tokens of one column.
        device: Where the states and block tables live.

    Attributes:
        chunks: [num_chunks, len(CHUNK_FIELDS)] int64 on the device; an empty one if there are none.
        tiles_per_chunk: Tiles of a chunk, a power of two; some are empty at the end of a state.
        word_bytes: The widest word, up to 8 bytes, that fits all addresses and sizes.
        counters: [NUM_COUNTERS, ...] int32 on the device. Zeros between launches, so launches that
            use one table belong on one stream.
        block_tables: Those of each group.
        is_by_slot: Whether their rows are request slots, else rows of the batch.
        block_size: Tokens of one column.
        memories: The states, for who reads them by tensor.
    """

    @outside_inference_mode
    def __init__(
        self, num_states: int, num_groups: int, block_size: int, device: torch.device
    ) -> None:
        self._num_states = num_states
        self.chunks = torch.zeros((1, len(CHUNK_FIELDS)), dtype=torch.int64, device=device)
        self.tiles_per_chunk = 1
        self.word_bytes = 1
        self.counters = torch.zeros((NUM_COUNTERS, _LINE_INTS), dtype=torch.int32, device=device)
        self.block_tables = BlockTables(num_groups, device)
        self.is_by_slot = True
        self.block_size = block_size
        self.memories: Sequence[StateMemory] = ()

    @property
    def device(self) -> torch.device:
        """Where the states live."""
        return self.chunks.device

    @property
    def num_tiles(self) -> int:
        """Tiles of all states of one request, empty ones included."""
        return len(self.chunks) * self.tiles_per_chunk

    def bind(self, memories: Sequence[StateMemory], block_tables: Sequence[torch.Tensor]) -> None:
        """Fill the table, without waiting for the device.

        Args:
            memories: Every state, in order.
            block_tables: As in ``BlockTables.bind``.

        Raises:
            InvalidArgumentError: The number of states is not that of the table, or the block tables
                do not fit. Nothing was changed.
        """
        if len(memories) != self._num_states:
            raise InvalidArgumentError(
                f"the table has {self._num_states} states, one for each layer and kind, "
                f"got {len(memories)}"
            )
        self.block_tables.bind(block_tables)
        most_tiles = max((_num_tiles(memory) for memory in memories), default=1)
        self.tiles_per_chunk = min(_MOST_TILES_PER_CHUNK, 1 << max(most_tiles - 1, 0).bit_length())
        rows = [row for memory in memories for row in _chunks(memory, self.tiles_per_chunk)]
        if rows:
            self.chunks = to_device(torch.from_numpy(np.array(rows, dtype=np.int64)), self.device)
        self.word_bytes = math.gcd(_WIDEST_WORD_BYTES, *map(_alignment, memories))
        self.memories = memories


def _num_tiles(memory: StateMemory) -> int:
    return -(-memory.block_bytes // TILE_BYTES)


def _chunks(memory: StateMemory, tiles_per_chunk: int) -> list[tuple[int, ...]]:
    """Return the rows of ``StateTable.chunks`` of one state."""
    num_tiles = _num_tiles(memory)
    state = (
        memory.blocks.data_ptr(),
        memory.blocks.stride(0),
        memory.block_bytes,
        memory.token_bytes,
        memory.conv_width,
        memory.group,
    )
    return [(*state, first, num_tiles) for first in range(0, num_tiles, tiles_per_chunk)]


def _alignment(memory: StateMemory) -> int:
    return math.gcd(memory.blocks.data_ptr(), memory.blocks.stride(0), memory.token_bytes)


def _check_block_tables(
    block_tables: Sequence[torch.Tensor], num_groups: int, device: torch.device
) -> None:
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


def _all_rows(table: torch.Tensor) -> torch.Tensor:
    """Return the table with all rows that its storage holds."""
    num_columns, stride = table.shape[1], table.stride(0)
    if not num_columns or not stride:
        return table
    room = table.untyped_storage().nbytes() // table.element_size() - table.storage_offset()
    return table.as_strided(((room - num_columns) // stride + 1, num_columns), table.stride())
