"""The kernels' twins in plain Python: a plan decides, checks and lists; ``copy_listed`` copies.

They read the inputs of decisions on the host, so they serve the CPU, and as a reference.
"""

# The launchers of the kernels take the same arguments in the same order.
# ruff: noqa: PLR0917

from __future__ import annotations

import numpy as np
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.copies import (
    BLOCKS_PER_GROUP,
    IntArray,
    Moves,
    StateTable,
    plan_alignment,
    plan_migration,
    running_columns,
)

__all__ = ["copy_listed", "plan_postcopy", "plan_precopy"]


def plan_precopy(
    table: StateTable,
    num_reqs: int,
    idx_mapping: torch.Tensor | None,
    state_idx: torch.Tensor,
    source_columns: torch.Tensor,
    token_bias: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    num_computed: torch.Tensor | None,
    num_accepted: torch.Tensor | None,
) -> None:
    """Move states to the columns that a step will read, as ``plan_migration`` decides.

    With the last three inputs the columns are still those of the last step: they and the accepted
    counts are brought up to the step. All but ``query_start_loc`` are by slot.
    """
    rows, slots = _rows(num_reqs, idx_mapping)
    columns = state_idx.numpy()
    if query_start_loc is None or num_computed is None or num_accepted is None:
        biases = token_bias.numpy()[slots]
        moves = plan_migration(source_columns.numpy()[slots], columns[slots], biases + 1)
        _list(table, moves, rows, slots)
        return
    previous, accepted = columns[slots], num_accepted.numpy()
    num_tokens = num_computed.numpy()[slots] + np.diff(query_start_loc.numpy())[rows]
    current = running_columns(num_tokens, table.block_size)
    biases = np.maximum(accepted[slots] - 1, 0)
    moves = plan_migration(previous, current, biases + 1)
    _list(table, moves, rows, slots)
    columns[slots] = current
    source_columns.numpy()[slots] = previous
    token_bias.numpy()[slots] = biases
    accepted[slots[moves.rows]] = 1


def plan_postcopy(
    table: StateTable,
    num_reqs: int,
    idx_mapping: torch.Tensor | None,
    num_accepted: torch.Tensor,
    num_accepted_out: torch.Tensor,
    state_idx: torch.Tensor,
    num_computed: torch.Tensor,
    num_scheduled: torch.Tensor | None,
    num_drafts: torch.Tensor | None,
    num_sampled: torch.Tensor | None,
) -> None:
    """Save states at boundaries that were crossed, as ``plan_alignment`` decides.

    Without scheduled tokens and drafts, ``num_computed`` is that after the step. Sampled tokens, by
    row of the batch, take the place of the accepted ones.
    """
    rows, slots = _rows(num_reqs, idx_mapping)
    accepted = num_accepted.numpy()[slots]
    if num_sampled is not None:
        accepted = np.maximum(num_sampled.numpy()[rows], 1)
    num_running = num_computed.numpy()[slots]
    if num_scheduled is None or num_drafts is None:
        num_running = num_running - accepted + 1
    else:
        num_running = num_running + num_scheduled.numpy()[slots] - num_drafts.numpy()[slots]
    columns = state_idx.numpy()[slots]
    moves = plan_alignment(num_running, accepted, columns, table.block_size)
    _list(table, moves, rows, slots)
    out = num_accepted_out.numpy()
    out[slots] = accepted
    out[slots[moves.staying_rows]] = 1


def copy_listed(table: StateTable, max_copies: int) -> None:
    """Carry out the list of copies, which has at most ``max_copies``."""
    count = int(table.copies[0, 0])
    for bias, *blocks in table.copies[1 : count + 1].tolist():
        for memory in table.memories:
            shift, first = memory.shift(bias), memory.group * BLOCKS_PER_GROUP
            source = blocks[first + (memory.conv_width == 0)]
            destination = blocks[first + 2]
            if min(source, destination) >= 0 and (shift or source != destination):
                kept = memory.blocks[source, :, shift:].clone()
                memory.blocks[destination, :, : memory.blocks.shape[2] - shift] = kept


def _rows(num_reqs: int, idx_mapping: torch.Tensor | None) -> tuple[IntArray, IntArray]:
    """Return the rows of the batch that are not skipped, and the slot of each."""
    if idx_mapping is None:
        return np.arange(num_reqs), np.arange(num_reqs)
    slots = idx_mapping[:num_reqs].numpy()
    (rows,) = (slots >= 0).nonzero()
    return rows, slots[rows]


def _list(table: StateTable, moves: Moves, rows: IntArray, slots: IntArray) -> None:
    """Check and list the moves of requests, which are numbered as ``rows`` and ``slots`` are."""
    places = slots if table.is_by_slot else rows

    def blocks_of(index: int, group: int) -> list[int]:
        blocks = table.block_tables[group]
        place = int(places[index])
        found: list[int] = blocks[place].tolist() if place < len(blocks) else []
        return found

    if len(moves.rows) >= len(table.copies):
        raise InvalidArgumentError(
            f"the list holds {len(table.copies) - 1} copies, got {len(moves.rows)}"
        )
    listed = table.list_copies(moves, blocks_of, lambda index: f"row {places[index]}")
    table.copies.view(-1)[: len(listed)] = torch.tensor(listed, dtype=torch.int32)
