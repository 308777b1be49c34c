"""The states and block tables of a model, as numbers that a kernel finds its way by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from mamba_cache.align.memory import StateMemory
from mamba_cache.errors import InvalidArgumentError

__all__ = ["STATE_FIELDS", "TILE_BYTES", "StateTable", "to_device"]

TILE_BYTES = 8192
"""Bytes of a state that a program of the fused kernels copies at a time. A power of two."""

STATE_FIELDS = (
    "base_address",
    "block_stride",
    "element_size",
    "inner_size",
    "conv_width",
    "group",
    "block_bytes",
    "token_bytes",
    "num_parts",
)
"""What is known of each state, in the order of a row of ``StateTable.states``."""

_WIDEST_WORD_BYTES = 8


class StateTable:
    """Where every state of a model lies, and the block tables that say which block is meant.

    Args:
        num_states: State tensors, over all layers and kinds.
        num_groups: Mamba groups.
        block_size: Tokens of one column.
        device: Where the states and block tables live.

    Attributes:
        states: [num_states, len(STATE_FIELDS)] int64 on the device.
        tiles: [num_tiles, 2] int32 on the device: state and part of each tile of one request.
        word_bytes: The widest word, up to 8 bytes, that fits all addresses and sizes.
        block_table_ptrs: [num_groups] int64 on the device.
        block_table_stride: Elements from row to row of every block table.
        block_size: Tokens of one column.
        memories: The states, for who reads them by tensor.
        block_tables: [rows, columns] int32 of each group.
    """

    def __init__(
        self, num_states: int, num_groups: int, block_size: int, device: torch.device
    ) -> None:
        shape = num_states, len(STATE_FIELDS)
        self.states = torch.zeros(shape, dtype=torch.int64, device=device)
        self.tiles = torch.zeros((0, 2), dtype=torch.int32, device=device)
        self.word_bytes = 1
        self.block_table_ptrs = torch.zeros(num_groups, dtype=torch.int64, device=device)
        self.block_table_stride = 0
        self.block_size = block_size
        self.memories: Sequence[StateMemory] = ()
        self.block_tables: Sequence[torch.Tensor] = ()

    @property
    def device(self) -> torch.device:
        """Where the states live."""
        return self.states.device

    def field(self, name: str) -> torch.Tensor:
        """Returns one of ``STATE_FIELDS`` of every state: [num_states] int64, a view."""
        return self.states[:, STATE_FIELDS.index(name)]

    def bind(self, memories: Sequence[StateMemory], block_tables: Sequence[torch.Tensor]) -> None:
        """Fills the table, without waiting for the device.

        Args:
            memories: Every state, in order.
            block_tables: As in ``bind_block_tables``.

        Raises:
            InvalidArgumentError: The number of states is not that of the table, or the block tables
                do not fit. Nothing was changed.
        """
        if len(memories) != len(self.states):
            raise InvalidArgumentError(
                f"the table has {len(self.states)} states, one for each layer and kind, "
                f"got {len(memories)}"
            )
        self.bind_block_tables(block_tables)
        rows = [_fields(memory) for memory in memories]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(STATE_FIELDS))
        parts = table[:, STATE_FIELDS.index("num_parts")]
        state = np.repeat(np.arange(len(rows)), parts)
        part = np.arange(len(state)) - np.repeat(np.cumsum(parts) - parts, parts)
        self.tiles = to_device(np.stack([state, part], axis=1).astype(np.int32), self.device)
        self.states.copy_(to_device(table, self.device))
        self.word_bytes = math.gcd(_WIDEST_WORD_BYTES, *map(_alignment, memories))
        self.memories = memories

    def bind_block_tables(self, block_tables: Sequence[torch.Tensor]) -> None:
        """Takes the block tables to be used from now on, without waiting for the device.

        Args:
            block_tables: [rows, columns] int32 of each Mamba group. A table that is the first rows
                of a larger one stands for all of it. They are read at each copy, so they must keep
                their storage, or be bound again.

        Raises:
            InvalidArgumentError: Their number, dtype, layout or device does not fit, or their rows
                lie at different distances. Nothing was changed.
        """
        _check_block_tables(block_tables, len(self.block_table_ptrs), self.device)
        whole = [_all_rows(table) for table in block_tables]
        addresses = [table.data_ptr() for table in whole]
        if addresses != [table.data_ptr() for table in self.block_tables]:
            self.block_table_ptrs = to_device(np.array(addresses, dtype=np.int64), self.device)
        self.block_table_stride = whole[0].stride(0)
        self.block_tables = whole


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns the array on the device, without waiting for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def _fields(memory: StateMemory) -> tuple[int, ...]:
    return (
        memory.blocks.data_ptr(),
        memory.blocks.stride(0),
        memory.element_size,
        memory.inner_size,
        memory.conv_width,
        memory.group,
        memory.block_bytes,
        memory.token_bytes,
        -(-memory.block_bytes // TILE_BYTES),
    )


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
    """Returns the table with all rows that its storage holds."""
    num_columns, stride = table.shape[1], table.stride(0)
    if not num_columns or not stride:
        return table
    room = table.untyped_storage().nbytes() // table.element_size() - table.storage_offset()
    return table.as_strided(((room - num_columns) // stride + 1, num_columns), table.stride())
