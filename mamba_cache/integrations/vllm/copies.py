"""Copies of states: a plan lists copies, on the host or on the device; an executor copies.

``plan_precopy``, ``plan_postcopy`` and ``copy_listed`` are the plain Python twins of the Triton
kernels in ``align_kernels``. They plan on the host.
"""

# The kernels' launchers take the same arguments in the same order.
# ruff: noqa: PLR0917

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from mamba_cache import states
from mamba_cache._checks import INT32_MAX
from mamba_cache._torch import outside_inference_mode, to_device
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.mamba_spec import (
    CopyFuncs,
    StateMemory,
    describe_states,
    list_layers,
    shared_schedule,
)
from mamba_cache.integrations.vllm.protocols import HostDeviceBuffer, KVCacheConfig
from mamba_cache.states import CopyBackend

__all__ = [
    "BLOCKS_PER_GROUP",
    "FACTS",
    "IntArray",
    "Moves",
    "StateTable",
    "align_kernels_for",
    "copy_listed",
    "plan_alignment",
    "plan_migration",
    "plan_postcopy",
    "plan_precopy",
    "running_columns",
    "stage",
]

IntArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

FACTS = ("base_address", "block_stride", "block_bytes", "token_bytes", "conv_width", "group")
"""Columns of ``StateTable.facts``, which has a row for each state tensor: address of block 0, bytes
from block to block, bytes of a block, bytes of one token in one row, tokens of a conv window (0 for
a temporal state), and the Mamba group."""

BLOCKS_PER_GROUP = 3
"""Block ids of one copy: the conv source, the temporal source and the destination."""

_KERNELS = "mamba_cache.integrations.vllm.align_kernels"
_MAX_WORD_BYTES = 8


class Moves(NamedTuple):
    """Copies of states between columns of block tables, one for each row whose states move.

    The temporal state is read from column ``source + bias``. The conv window is read from the
    source column and shifted left by ``bias`` tokens, the drafts accepted beyond the first token.
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
    """Return the column of the last of ``num_tokens`` tokens for each row, -1 without tokens.

    For the computed tokens, this column holds the state before the step. With the scheduled tokens
    added, it is the first column that the step writes.
    """
    return (num_tokens - 1) // block_size


def plan_migration(previous: IntArray, current: IntArray, num_accepted: IntArray) -> Moves:
    """Return the moves that bring states to the columns that the step will read.

    ``previous`` are the running columns of the last step, negative for none.
    """
    (rows,) = ((previous >= 0) & (previous != current)).nonzero()
    return Moves(rows, previous[rows], current[rows], np.maximum(num_accepted[rows] - 1, 0))


def plan_alignment(
    num_running: IntArray, num_accepted: IntArray, columns: IntArray, block_size: int
) -> Moves:
    """Return the moves that save states at the block boundaries that a step crossed.

    ``num_running`` counts the tokens in the running column's state: all but the step's drafts.
    """
    aligned = (num_running + num_accepted - 1) // block_size * block_size
    (rows,) = ((aligned >= num_running) & (aligned > 0)).nonzero()
    destinations = aligned[rows] // block_size - 1
    return Moves(rows, columns[rows], destinations, (aligned - num_running)[rows])


class StateTable:
    """Addresses of a model's states and block tables, and the list of copies.

    ``copies`` is [1 + max_num_reqs, 1 + BLOCKS_PER_GROUP * num_groups] int32 on the device. Entry 0
    begins with the number of copies; each further entry has the bias of a copy, then its blocks by
    group. Block tables are [rows, columns] int32 with one row stride.
    """

    @outside_inference_mode
    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_num_reqs: int,
        make_buffer: Callable[..., Any],
        backend: CopyBackend = "auto",
    ) -> None:
        self._layers = list_layers(kv_cache_config)
        self.group_ids, self.spec = shared_schedule(kv_cache_config)
        self.num_groups, self.block_size = len(self.group_ids), self.spec.block_size
        entry_ints = 1 + BLOCKS_PER_GROUP * self.num_groups
        self._listed = make_buffer((1 + max_num_reqs) * entry_ints, dtype=torch.int32)
        self.copies: torch.Tensor = self._listed.gpu.view(-1, entry_ints)
        self.device = device = self.copies.device
        self.backend: CopyBackend = backend
        align_kernels_for(backend, device)
        self.facts = torch.zeros((0, len(FACTS)), dtype=torch.int64, device=device)
        self.memories: Sequence[StateMemory] = ()
        self.num_blocks = [INT32_MAX] * self.num_groups  # in all states of a group
        self.max_block_bytes = 0
        self.word_bytes = 1  # widest word, up to 8, that divides all addresses and sizes
        self.pointers = torch.zeros(self.num_groups, dtype=torch.int64, device=device)
        self.row_stride = 0
        self.block_tables: Sequence[torch.Tensor] = ()
        self.is_by_slot = True  # rows of block tables are request slots, not batch rows
        self._bound: list[tuple[Any, ...]] = []

    def bind_states(self, forward_context: Mapping[str, Any], copy_funcs: CopyFuncs) -> None:
        """Record the states' addresses if they changed, without waiting for the device."""
        tensors = [
            state for _, name, _ in self._layers if name for state in forward_context[name].kv_cache
        ]
        found = [(state.data_ptr(), state.shape, state.stride()) for state in tensors]
        if found == self._bound:
            return
        memories = describe_states(self._layers, forward_context, copy_funcs)
        facts = np.zeros((len(memories), len(FACTS)), dtype=np.int64)
        for row, m in zip(facts, memories, strict=True):
            size, token_size = math.prod(m.blocks.shape[1:]), m.blocks.shape[3]
            row[:4] = m.blocks.data_ptr(), m.blocks.stride(0), size, token_size
            row[4:] = m.conv_width, m.group
        self.facts = to_device(torch.from_numpy(facts), self.device)
        for group in range(self.num_groups):
            self.num_blocks[group] = min(
                (len(m.blocks) for m in memories if m.group == group), default=INT32_MAX
            )
        self.max_block_bytes = int(facts[:, FACTS.index("block_bytes")].max(initial=0))
        # Divides all addresses, strides and sizes.
        self.word_bytes = math.gcd(_MAX_WORD_BYTES, int(np.gcd.reduce(facts[:, :4], axis=None)))
        self.memories, self._bound = memories, found

    def bind_block_tables(self, block_tables: Sequence[torch.Tensor]) -> None:
        """Use these block tables from now on; they must keep their storage."""
        whole = self.whole_tables(block_tables)
        addresses = [table.data_ptr() for table in whole]
        if addresses != [table.data_ptr() for table in self.block_tables]:
            pointers = torch.from_numpy(np.array(addresses, dtype=np.int64))
            self.pointers = to_device(pointers, self.device)
        self.row_stride = whole[0].stride(0)
        self.block_tables = whole

    def whole_tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Check block tables, and return them extended to all rows of their storage.

        An engine may pass the first rows of a larger table.
        """
        if len(block_tables) != self.num_groups:
            raise InvalidArgumentError(
                f"a block table is required for each of {self.num_groups} Mamba groups, "
                f"got {len(block_tables)}"
            )
        whole = []
        for table in block_tables:
            fits = table.dim() == 2 and table.dtype == torch.int32 and table.device == self.device
            if not fits or (table.shape[1] > 1 and table.stride(1) != 1):
                raise InvalidArgumentError(
                    f"a block table must be [rows, columns] int32 on {self.device} with contiguous "
                    f"rows, got shape {tuple(table.shape)}, strides {table.stride()}, "
                    f"{table.dtype} on {table.device}"
                )
            (_, num_columns), stride = table.shape, table.stride(0)
            if num_columns and stride:
                storage = table.untyped_storage().nbytes() // table.element_size()
                num_rows = (storage - table.storage_offset() - num_columns) // stride + 1
                table = table.as_strided((num_rows, num_columns), table.stride())  # noqa: PLW2901
            whole.append(table)
        strides = {table.stride(0) for table in block_tables}
        if len(strides) > 1:
            raise InvalidArgumentError(
                f"all block tables must have one row stride, got {sorted(strides)}"
            )
        return whole

    def run(
        self,
        plan: str,
        num_reqs: int,
        idx_mapping: torch.Tensor | None,
        *inputs: torch.Tensor | None,
    ) -> None:
        """Run the named plan, such as "plan_precopy", then the copies that it lists."""
        if not num_reqs or not self.block_tables:
            return
        max_num_reqs = len(self.copies) - 1
        # With an ``idx_mapping`` no slot occurs twice, so at most max_num_reqs rows move.
        if idx_mapping is None and num_reqs > max_num_reqs:
            raise InvalidArgumentError(f"num_reqs must be at most {max_num_reqs}, got {num_reqs}")
        kernels = align_kernels_for(self.backend, self.device)
        getattr(kernels, plan)(self, num_reqs, idx_mapping, *inputs)
        kernels.copy_listed(self, num_reqs)

    def copy(self, listed: Sequence[int]) -> None:
        """Execute a list of copies that was made on the host."""
        if listed:
            stage([self._listed], [listed])
            align_kernels_for(self.backend, self.device).copy_listed(self, listed[0])

    def list_copies(
        self,
        moves: Moves,
        blocks_of: Callable[[int, int], Sequence[int]],
        name_of: Callable[[int], str],
    ) -> list[int]:
        """Check moves, and return the ints to write at the start of ``copies``.

        ``blocks_of`` returns the block of each column for a row and a group.
        """
        if len(moves.rows) >= len(self.copies):
            raise InvalidArgumentError(
                f"the list holds the copies of {len(self.copies) - 1} requests, "
                f"got {len(moves.rows)}"
            )
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


def stage(buffers: Sequence[HostDeviceBuffer], arrays: Sequence[Sequence[int] | IntArray]) -> None:
    """Copy each array to the device through its buffer, without waiting for the copy."""
    for buffer, values in zip(buffers, arrays, strict=True):
        if len(values) > len(buffer.np):
            raise InvalidArgumentError(
                f"the buffer holds {len(buffer.np)} entries, got {len(values)}"
            )
    for buffer, values in zip(buffers, arrays, strict=True):
        wait = getattr(buffer, "wait", None)  # An engine's buffer class may have no ``wait``.
        if wait is not None:
            wait()
        buffer.np[: len(values)] = values
        buffer.copy_to_gpu(len(values))


def align_kernels_for(backend: CopyBackend, device: torch.device) -> Any:
    """Return the module that plans and copies on ``device``: this module or the kernels."""
    if backend == "torch" and device.type == "cuda":
        raise InvalidArgumentError(
            f"backend 'torch' decides on the CPU and needs tensors there, got {device}"
        )
    twins = sys.modules[__name__]
    return states.kernels_for(backend, device, kernels=_KERNELS, twins=twins)


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
    """List copies of states to the columns that a step will read, by ``plan_migration``.

    If the last three inputs are given, ``state_idx`` holds the last step's columns; the columns and
    accepted counts are then updated to this step. All but ``query_start_loc`` are by slot.
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
    """List copies that save states at crossed block boundaries, by ``plan_alignment``.

    Without scheduled tokens and drafts, ``num_computed`` counts the tokens after the step. Sampled
    tokens, by batch row, replace the accepted tokens if given.
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
    """Execute the list of copies, which has at most ``max_copies``."""
    count = int(table.copies[0, 0])
    for bias, *blocks in table.copies[1 : count + 1].tolist():
        for memory in table.memories:
            shift, first = bias * bool(memory.conv_width), memory.group * BLOCKS_PER_GROUP
            source = blocks[first + (memory.conv_width == 0)]
            destination = blocks[first + 2]
            if min(source, destination) >= 0 and (shift or source != destination):
                kept = memory.blocks[source, :, shift:].clone()
                memory.blocks[destination, :, : memory.blocks.shape[2] - shift] = kept


def _rows(num_reqs: int, idx_mapping: torch.Tensor | None) -> tuple[IntArray, IntArray]:
    """Return the batch rows that are not skipped, and the slot of each row."""
    if idx_mapping is None:
        return np.arange(num_reqs), np.arange(num_reqs)
    slots = idx_mapping[:num_reqs].numpy()
    (rows,) = (slots >= 0).nonzero()
    return rows, slots[rows]


def _list(table: StateTable, moves: Moves, rows: IntArray, slots: IntArray) -> None:
    """Write moves to the list of copies; ``moves.rows`` are indices into ``rows`` and ``slots``."""
    places = slots if table.is_by_slot else rows

    def blocks_of(index: int, group: int) -> list[int]:
        blocks = table.block_tables[group]
        place = int(places[index])
        found: list[int] = blocks[place].tolist() if place < len(blocks) else []
        return found

    listed = table.list_copies(moves, blocks_of, lambda index: f"row {places[index]}")
    table.copies.view(-1)[: len(listed)] = torch.tensor(listed, dtype=torch.int32)
