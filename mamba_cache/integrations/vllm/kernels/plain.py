"""The kernels' twins in plain Python: each function decides, checks, then copies.

They read the inputs of decisions on the host, so they serve the CPU, and as a reference. Where a
GPU is to copy, ``only_checks`` leaves it at the first two.
"""

# The launchers of the kernels take the same arguments in the same order.
# ruff: noqa: PLR0917

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.column_moves import (
    StateMove,
    plan_alignment,
    plan_migration,
    running_column,
)
from mamba_cache.integrations.vllm.copy_buffers import MambaCopyBuffers
from mamba_cache.integrations.vllm.state_table import BlockTables, StateTable

__all__ = [
    "accept_tokens",
    "aligned_blocks",
    "copy_regions",
    "gather_accepted",
    "postcopy_columns",
    "postcopy_resident",
    "precopy_columns",
    "precopy_resident",
]


class _RowMove(NamedTuple):
    """A move of the request in one row of the block tables, and the request's slot."""

    row: int
    slot: int
    move: StateMove


def copy_regions(buffers: MambaCopyBuffers) -> None:
    """Copy the first ``offset`` regions of ``buffers``, which lie in memory of the CPU."""
    columns = [buffer.np[: buffers.offset].tolist() for buffer in buffers.columns]
    for source, destination, size, num_rows, row_stride, _ in zip(*columns, strict=True):
        for row in range(num_rows):
            ctypes.memmove(destination + row * row_stride, source + row * row_stride, size)


def precopy_columns(
    table: StateTable,
    num_reqs: int,
    state_idx: torch.Tensor,
    source_columns: torch.Tensor,
    token_bias: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    *,
    only_checks: bool = False,
) -> None:
    """Copy as ``MambaSpecDecodeGPUContext.run_fused_precopy`` describes."""
    sources, columns, bias = (t.tolist() for t in (source_columns, state_idx, token_bias))
    planned = (
        (row, slot, plan_migration(sources[slot], columns[slot], bias[slot] + 1))
        for row, slot in _rows(num_reqs, idx_mapping)
    )
    moves = [_RowMove(row, slot, move) for row, slot, move in planned if move]
    _check_moves(table, moves)
    if not only_checks:
        _copy(table, moves)


def precopy_resident(
    table: StateTable,
    num_reqs: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed: torch.Tensor,
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    source_columns: torch.Tensor,
    token_bias: torch.Tensor,
    accepted_by_row: torch.Tensor | None,
    *,
    only_checks: bool = False,
) -> None:
    """Copy as ``MambaSpecDecodeGPUContext.run_resident_precopy`` describes."""
    starts, computed = query_start_loc.tolist(), num_computed.tolist()
    steps = []
    for row, slot in _rows(num_reqs, idx_mapping):
        column = running_column(computed[slot], starts[row + 1] - starts[row], table.block_size)
        bias = max(int(num_accepted[slot]) - 1, 0)
        steps.append(_RowMove(row, slot, StateMove(int(state_idx[slot]), column, bias)))
    moves = [step for step in steps if step.move.source >= 0 and not step.move.stays]
    _check_moves(table, moves)
    if only_checks:
        return
    for _, slot, move in steps:
        source_columns[slot] = move.source
        token_bias[slot] = move.bias
        state_idx[slot] = move.destination
    for _, slot, _ in moves:
        num_accepted[slot] = 1
    if accepted_by_row is not None:
        gather_accepted(idx_mapping[:num_reqs], num_accepted, accepted_by_row)
    _copy(table, moves)


def postcopy_columns(
    table: StateTable,
    num_reqs: int,
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    num_scheduled: torch.Tensor,
    num_computed: torch.Tensor,
    num_drafts: torch.Tensor,
    num_accepted_out: torch.Tensor,
    *,
    only_checks: bool = False,
) -> None:
    """Copy as ``MambaSpecDecodeGPUContext.run_fused_postprocess`` describes."""
    inputs = (num_accepted, state_idx, num_scheduled, num_computed, num_drafts)
    planned = (
        (row, plan_alignment(computed + scheduled - drafts, accepted, column, table.block_size))
        for row, (accepted, column, scheduled, computed, drafts) in enumerate(
            zip(*(tensor[:num_reqs].tolist() for tensor in inputs), strict=True)
        )
    )
    moves = [_RowMove(row, row, move) for row, move in planned if move]
    _check_moves(table, moves)
    if only_checks:
        return
    num_accepted_out[:num_reqs] = num_accepted[:num_reqs]
    _accept_one_where_it_stays(num_accepted_out, moves)
    _copy(table, moves)


def postcopy_resident(
    table: StateTable,
    num_reqs: int,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor | None,
    num_accepted: torch.Tensor,
    state_idx: torch.Tensor,
    num_computed: torch.Tensor,
    *,
    only_checks: bool = False,
) -> None:
    """Copy as ``MambaSpecDecodeGPUContext.run_resident_postprocess`` describes."""
    columns, computed = state_idx.tolist(), num_computed.tolist()
    sampled = None if num_sampled is None else num_sampled.tolist()
    moves = []
    for row, slot in _rows(num_reqs, idx_mapping):
        accepted = int(num_accepted[slot]) if sampled is None else max(sampled[row], 1)
        num_running = computed[slot] - accepted + 1
        move = plan_alignment(num_running, accepted, columns[slot], table.block_size)
        if move:
            moves.append(_RowMove(row, slot, move))
    _check_moves(table, moves)
    if only_checks:
        return
    if num_sampled is not None:
        accept_tokens(idx_mapping[:num_reqs], num_sampled, num_accepted)
    _accept_one_where_it_stays(num_accepted, moves)
    _copy(table, moves)


def accept_tokens(
    idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    """Write ``max(num_sampled, 1)`` of each row to its slot of ``num_accepted``."""
    sampled = num_sampled.tolist()
    for row, slot in _rows(len(idx_mapping), idx_mapping):
        num_accepted[slot] = max(sampled[row], 1)


def gather_accepted(
    idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_accepted_by_row: torch.Tensor
) -> None:
    """Fill the rows with the counts of their slots, and with 1 where there is no request."""
    num_accepted_by_row.fill_(1)
    for row, slot in _rows(len(idx_mapping), idx_mapping):
        num_accepted_by_row[row] = num_accepted[slot]


def aligned_blocks(
    tables: BlockTables, num_reqs: int, num_tokens: torch.Tensor, block_size: int, out: torch.Tensor
) -> None:
    """Look up as ``MambaSpecDecodeGPUContext.compute_aligned_state_indices`` describes."""
    first = ((num_tokens[:num_reqs].long() - 1) // block_size).clamp(min=0)
    columns = first[:, None] + torch.arange(out.shape[2], device=out.device)
    for group, table in enumerate(tables.tensors):
        out[group, :num_reqs] = table[:num_reqs].gather(1, columns)


def _check_moves(table: StateTable, moves: Iterable[_RowMove]) -> None:
    """Check that every move stays within the block tables and the states."""
    for index, slot, move in moves:
        row = slot if table.is_by_slot else index
        for memory in table.memories:
            blocks = table.block_tables.tensors[memory.group]
            for column in (memory.source_column(move.source, move.bias), move.destination):
                if not (0 <= row < blocks.shape[0] and 0 <= column < blocks.shape[1]):
                    raise InvalidArgumentError(
                        f"the block table of Mamba group {memory.group} has shape "
                        f"{tuple(blocks.shape)}, but row {row} copies {move}"
                    )
                block, num_blocks = int(blocks[row, column]), len(memory.blocks)
                if block >= num_blocks:
                    raise InvalidArgumentError(
                        f"the states of Mamba group {memory.group} have {num_blocks} blocks, but "
                        f"row {row} has block {block} in column {column}"
                    )


def _rows(num_reqs: int, idx_mapping: torch.Tensor | None) -> list[tuple[int, int]]:
    """Return row and slot of every request that is not skipped."""
    slots: Sequence[int] = range(num_reqs)
    if idx_mapping is not None:
        slots = idx_mapping[:num_reqs].tolist()
    return [(row, slot) for row, slot in enumerate(slots) if slot >= 0]


def _accept_one_where_it_stays(num_accepted: torch.Tensor, moves: Iterable[_RowMove]) -> None:
    for _, slot, move in moves:
        if move.stays:
            num_accepted[slot] = 1


def _copy(table: StateTable, moves: Iterable[_RowMove]) -> None:
    for index, slot, move in moves:
        if move.is_empty:
            continue
        row = slot if table.is_by_slot else index
        for memory in table.memories:
            blocks = table.block_tables.tensors[memory.group][row]
            source = int(blocks[memory.source_column(move.source, move.bias)])
            destination = int(blocks[move.destination])
            shift = memory.shift(move.bias)
            if source >= 0 and destination >= 0:
                kept = memory.blocks[source, :, shift:].clone()
                memory.blocks[destination, :, : memory.blocks.shape[2] - shift] = kept
