"""Align mode on the GPU, without waiting for it: ``MambaSpecDecodeGPUContext``, and its inputs."""

# An engine gives these functions all that it has, by position.
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mamba_cache._inference_mode import outside_inference_mode
from mamba_cache.errors import InvalidArgumentError, UnknownRequestError
from mamba_cache.integrations.vllm.copy_buffers import MambaCopyBuffers, wait_until_sent
from mamba_cache.integrations.vllm.copy_specs import CopyFuncs, count_states, describe_states
from mamba_cache.integrations.vllm.kernels import kernels_for, plain
from mamba_cache.integrations.vllm.mamba_spec import shared_schedule
from mamba_cache.integrations.vllm.protocols import (
    HostDeviceBuffer,
    KVCacheConfig,
    MakeBuffer,
    SchedulerOutput,
)
from mamba_cache.integrations.vllm.state_table import BlockTables, StateTable
from mamba_cache.states import CopyBackend

__all__ = [
    "MambaBuffers",
    "MambaSpecDecodeGPUContext",
    "check_known",
    "stage",
    "stage_mamba_state_idx_to_gpu",
    "stage_postprocess_inputs_to_gpu",
    "stage_postprocess_metadata_to_gpu",
]


@dataclass(slots=True)
class MambaSpecDecodeGPUContext:
    """Copies states between columns of block tables; what is copied is decided on the device.

    All calls that copy belong on one stream.

    Attributes:
        table: Where every state and block table lies.
        mamba_group_ids: The Mamba groups.
        num_accepted_tokens_out: [max_num_reqs] int32 on the device: accepted counts after
            ``run_fused_postprocess``.
        index_tables: The block tables that ``compute_aligned_state_indices`` reads, in batch order.
        aligned_state_indices: [groups, max_num_reqs, 1 + drafts] int32 on the device: what it found
            last. Its place does not change, so that CUDA graphs may read it.
        mamba_state_idx_buf: Staged running columns, [max_num_reqs] int32.
        num_scheduled_tokens_buf: Staged scheduled tokens, [max_num_reqs] int32.
        num_computed_tokens_buf: Staged computed tokens, [max_num_reqs] int32.
        num_draft_tokens_buf: Staged drafts, [max_num_reqs] int32.
        precopy_src_col_buf: Staged columns to copy from, [max_num_reqs] int32.
        precopy_token_bias_buf: Staged drafts accepted in the last step, [max_num_reqs] int32.
        backend: "torch", "triton", or "auto": the kernels on CUDA, plain Python elsewhere.
        check_columns: Decide on the host as well, and refuse columns and blocks out of range. This
            waits for the device, so it is for debugging. Where it is off, kernels trust the tables.
        is_initialized: Whether the states and block tables are known.
    """

    table: StateTable
    mamba_group_ids: list[int]
    num_accepted_tokens_out: torch.Tensor
    index_tables: BlockTables
    aligned_state_indices: torch.Tensor
    mamba_state_idx_buf: HostDeviceBuffer
    num_scheduled_tokens_buf: HostDeviceBuffer
    num_computed_tokens_buf: HostDeviceBuffer
    num_draft_tokens_buf: HostDeviceBuffer
    precopy_src_col_buf: HostDeviceBuffer
    precopy_token_bias_buf: HostDeviceBuffer
    backend: CopyBackend = "auto"
    check_columns: bool = False
    is_initialized: bool = False

    @classmethod
    @outside_inference_mode
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: KVCacheConfig,
        copy_funcs: CopyFuncs | int,
        device: torch.device | str,
        make_buffer: MakeBuffer,
        *,
        backend: CopyBackend = "auto",
        check_columns: bool = False,
    ) -> MambaSpecDecodeGPUContext:
        """Make a context that does nothing until it knows the states.

        Args:
            max_num_reqs: The most requests of a batch.
            kv_cache_config: Names the layers of each group.
            copy_funcs: One for each kind of state, by kind of layer. Engines before vLLM 0.32 say
                how many kinds of state every layer has.
            device: Where the states live.
            make_buffer: Called as ``make_buffer(n, dtype=...)``.
            backend: Who copies.
            check_columns: Whether columns are checked.

        Raises:
            InvalidArgumentError: There is no Mamba group, two are scheduled differently, a kind of
                layer has no copy functions, or the backend is unknown or not for the device.
            MissingExtraError: The kernels are asked for and Triton is not installed.
        """
        group_ids, spec = shared_schedule(kv_cache_config)
        num_states = count_states(kv_cache_config, group_ids, copy_funcs)
        device = torch.device(device)
        kernels_for(backend, device)
        indices = (len(group_ids), max_num_reqs, 1 + spec.num_speculative_blocks)
        return cls(
            StateTable(num_states, len(group_ids), spec.block_size, device),
            group_ids,
            torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
            BlockTables(len(group_ids), device),
            torch.zeros(indices, dtype=torch.int32, device=device),
            make_buffer(max_num_reqs, dtype=torch.int32),
            make_buffer(max_num_reqs, dtype=torch.int32),
            make_buffer(max_num_reqs, dtype=torch.int32),
            make_buffer(max_num_reqs, dtype=torch.int32),
            make_buffer(max_num_reqs, dtype=torch.int32),
            make_buffer(max_num_reqs, dtype=torch.int32),
            backend=backend,
            check_columns=check_columns,
        )

    def initialize_from_forward_context(
        self,
        kv_cache_config: KVCacheConfig,
        forward_context: Mapping[str, Any],
        mamba_state_copy_funcs: CopyFuncs,
        block_tables: Sequence[torch.Tensor],
        aligned_index_block_tables: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Learn where the states and block tables lie; every later call does nothing.

        Args:
            kv_cache_config: Names the layers of each group.
            forward_context: The layers by name, each with its state tensors in ``kv_cache``. These
                must keep their storage.
            mamba_state_copy_funcs: What each kind of state is, by kind of layer.
            block_tables: [slots, columns] int32 of each Mamba group, by request slot where calls
                give an ``idx_mapping``. They must keep their storage.
            aligned_index_block_tables: The same in batch order, for
                ``compute_aligned_state_indices``. Default: the same tables.

        Raises:
            InvalidArgumentError: States, functions or block tables do not fit. Nothing was changed.
        """
        if self.is_initialized:
            return
        memories = describe_states(
            kv_cache_config, self.mamba_group_ids, forward_context, mamba_state_copy_funcs
        )
        index_tables = BlockTables(len(self.mamba_group_ids), self.table.device)
        index_tables.bind(aligned_index_block_tables or block_tables)
        self.table.bind(memories, block_tables)
        self.index_tables = index_tables
        self.is_initialized = True

    def compute_aligned_state_indices(self, seq_lens: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """Look up the blocks that the forward reads and writes, of all groups in one launch.

        Args:
            seq_lens: [num_reqs or more] int on the device: tokens of each row after the step.
            num_reqs: Rows of the batch.

        Returns:
            [groups, num_reqs, 1 + drafts] int32: the blocks of each row's running column and of the
            columns of its drafts; a view of ``aligned_state_indices``.

        Raises:
            InvalidArgumentError: The states are not known yet, or there are not as many rows.
        """
        room = min(len(seq_lens), self.aligned_state_indices.shape[1])
        if not self.is_initialized or not 0 <= num_reqs <= room:
            raise InvalidArgumentError(
                f"num_reqs must be in [0, {room}] of an initialised context, got {num_reqs} and "
                f"is_initialized={self.is_initialized}"
            )
        found = self.aligned_state_indices[:, :num_reqs]
        if num_reqs:
            kernels = kernels_for(self.backend, self.table.device)
            kernels.aligned_blocks(
                self.index_tables, num_reqs, seq_lens, self.table.block_size, found
            )
        return found

    def run_fused_postprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: torch.Tensor,
        mamba_state_idx_gpu: torch.Tensor,
        num_scheduled_tokens_gpu: torch.Tensor,
        num_computed_tokens_gpu: torch.Tensor,
        num_draft_tokens_gpu: torch.Tensor,
    ) -> None:
        """Save the states of requests that have crossed a block boundary, in one launch.

        ``num_accepted_tokens_out`` becomes a copy of the accepted counts, and 1 where a state was
        shifted in its column. Nothing is done for no requests or before the initialisation.

        Args:
            num_reqs: Requests, in the order of the block tables' rows.
            num_accepted_tokens_gpu: [num_reqs or more] int, as all of these: accepted tokens.
            mamba_state_idx_gpu: Running columns.
            num_scheduled_tokens_gpu: Tokens that the step computed, drafts included.
            num_computed_tokens_gpu: Tokens before the step.
            num_draft_tokens_gpu: Drafts among the scheduled tokens.

        Raises:
            InvalidArgumentError: Columns are checked, and one is out of range. Nothing was copied.
        """
        self._run(
            "postcopy_columns",
            num_reqs,
            num_accepted_tokens_gpu,
            mamba_state_idx_gpu,
            num_scheduled_tokens_gpu,
            num_computed_tokens_gpu,
            num_draft_tokens_gpu,
            self.num_accepted_tokens_out,
        )

    def run_fused_precopy(
        self,
        num_reqs: int,
        state_idx_gpu: torch.Tensor,
        src_col_gpu: torch.Tensor,
        token_bias_gpu: torch.Tensor,
        idx_mapping: torch.Tensor | None = None,
    ) -> None:
        """Copy states to the columns that the step will read, in one launch.

        Args:
            num_reqs: Requests.
            state_idx_gpu: [slots] int: running column of this step.
            src_col_gpu: [slots] int: that of the last step, negative for none.
            token_bias_gpu: [slots] int: drafts accepted in the last step.
            idx_mapping: [num_reqs] int: the slot of each row of the batch, which is its row of the
                block tables too; -1 to skip it. None: rows are slots.

        Raises:
            InvalidArgumentError: Columns are checked, and one is out of range. Nothing was copied.
        """
        columns = state_idx_gpu, src_col_gpu
        self._run("precopy_columns", num_reqs, *columns, token_bias_gpu, idx_mapping)

    def run_resident_precopy(
        self,
        num_reqs: int,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_computed_tokens_gpu: torch.Tensor,
        num_accepted_tokens_gpu: torch.Tensor,
        state_idx_gpu: torch.Tensor,
        src_col_gpu: torch.Tensor,
        token_bias_gpu: torch.Tensor,
        accepted_by_row: torch.Tensor | None,
    ) -> None:
        """Move the running columns to a step, and copy states there, in one launch.

        Args:
            num_reqs: Requests.
            idx_mapping: As in ``run_fused_precopy``.
            query_start_loc: [num_reqs + 1] int: the first token of each row, then their number.
            num_computed_tokens_gpu: [slots] int: tokens before the step.
            num_accepted_tokens_gpu: [slots] int, written: 1 where a state changes its column.
            state_idx_gpu: [slots] int, written: the running column.
            src_col_gpu: [slots] int, written: that of the last step.
            token_bias_gpu: [slots] int, written: drafts accepted in the last step.
            accepted_by_row: [num_reqs or more] int, written: accepted tokens of each row, and 1
                where there is no request. None if nobody asks.

        Raises:
            InvalidArgumentError: Columns are checked, and one is out of range. Nothing was changed.
        """
        self._run(
            "precopy_resident",
            num_reqs,
            idx_mapping,
            query_start_loc,
            num_computed_tokens_gpu,
            num_accepted_tokens_gpu,
            state_idx_gpu,
            src_col_gpu,
            token_bias_gpu,
            accepted_by_row,
        )

    def run_resident_postprocess(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_accepted_tokens_gpu: torch.Tensor,
        state_idx_gpu: torch.Tensor,
        num_computed_tokens_gpu: torch.Tensor,
    ) -> None:
        """Take the accepted counts of a step, and save states as above, in one launch.

        Args:
            idx_mapping: As in ``run_fused_precopy``.
            num_sampled: [num_reqs] int: tokens that each row sampled.
            num_accepted_tokens_gpu: [slots] int, written: at least 1, and 1 where a state was
                shifted in its column.
            state_idx_gpu: [slots] int: running columns.
            num_computed_tokens_gpu: [slots] int: tokens after the step.

        Raises:
            InvalidArgumentError: Columns are checked, and one is out of range. Nothing was changed.
        """
        accepted, columns = num_accepted_tokens_gpu, state_idx_gpu
        inputs = idx_mapping, num_sampled, accepted, columns, num_computed_tokens_gpu
        self._run("postcopy_resident", len(idx_mapping), *inputs)

    def run_fused_postprocess_align(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: torch.Tensor,
        state_idx_gpu: torch.Tensor,
        new_num_computed_tokens_gpu: torch.Tensor,
        idx_mapping: torch.Tensor,
    ) -> None:
        """Save states as ``run_fused_postprocess``, all inputs by request slot, in one launch.

        Args:
            num_reqs: Requests.
            num_accepted_tokens_gpu: [slots] int, written: accepted tokens, and 1 where a state was
                shifted in its column. All programs decide before one writes.
            state_idx_gpu: [slots] int: running columns.
            new_num_computed_tokens_gpu: [slots] int: tokens after the step.
            idx_mapping: As in ``run_fused_precopy``.

        Raises:
            InvalidArgumentError: Columns are checked, and one is out of range. Nothing was changed.
        """
        accepted, columns = num_accepted_tokens_gpu, state_idx_gpu
        inputs = idx_mapping, None, accepted, columns, new_num_computed_tokens_gpu
        self._run("postcopy_resident", num_reqs, *inputs)

    def _run(self, name: str, num_reqs: int, *inputs: Any) -> None:
        if not num_reqs or not self.is_initialized:
            return
        if self.check_columns:
            getattr(plain, name)(self.table, num_reqs, *inputs, only_checks=True)
        getattr(kernels_for(self.backend, self.table.device), name)(self.table, num_reqs, *inputs)


@dataclass(slots=True)
class MambaBuffers:
    """All buffers that states in block tables need.

    Attributes:
        preprocess: Copies that the host decides.
        postprocess_align: Copies that the device decides, or None.
    """

    preprocess: MambaCopyBuffers
    postprocess_align: MambaSpecDecodeGPUContext | None

    @classmethod
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: KVCacheConfig,
        copy_funcs: CopyFuncs,
        make_buffer: MakeBuffer,
        device: torch.device | str,
        with_postprocess_align: bool,
    ) -> MambaBuffers:
        """Make the buffers.

        Args:
            max_num_reqs: The most requests of a batch.
            kv_cache_config: Names the layers of each group.
            copy_funcs: One for each kind of state, by kind of layer.
            make_buffer: Called as ``make_buffer(n, dtype=...)``.
            device: Where the states live.
            with_postprocess_align: Whether the device decides after a step.

        Raises:
            InvalidArgumentError: There is no Mamba group, two are scheduled differently, or a kind
                of layer has no copy functions.
        """
        preprocess = MambaCopyBuffers.create(max_num_reqs, kv_cache_config, copy_funcs, make_buffer)
        if not with_postprocess_align:
            return cls(preprocess, None)
        context = MambaSpecDecodeGPUContext.create(
            max_num_reqs, kv_cache_config, copy_funcs, device, make_buffer
        )
        return cls(preprocess, context)


def stage_postprocess_inputs_to_gpu(
    ctx: MambaSpecDecodeGPUContext,
    scheduler_output: SchedulerOutput,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, Any],
    mamba_state_idx: Mapping[str, int],
) -> None:
    """Bring all that ``run_fused_postprocess`` reads of the first requests to ``ctx``'s buffers.

    Args:
        ctx: Whose buffers are written: one entry for each request.
        scheduler_output: What the step computes.
        req_ids: Requests in batch order.
        num_reqs: How many of them.
        requests: The running requests by id.
        mamba_state_idx: Running column of each request, as ``preprocess_mamba`` leaves it.

    Raises:
        UnknownRequestError: A request has no running column, is not scheduled or not known. Nothing
            was written.
        InvalidArgumentError: A buffer is too small. Nothing was written.
    """
    staged = req_ids[:num_reqs]
    scheduled = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens
    check_known(staged, mamba_state_idx, scheduled, requests)
    for buffer, values in (
        (ctx.mamba_state_idx_buf, [mamba_state_idx[req_id] for req_id in staged]),
        (ctx.num_scheduled_tokens_buf, [scheduled[req_id] for req_id in staged]),
        (ctx.num_computed_tokens_buf, [requests[req_id].num_computed_tokens for req_id in staged]),
        (ctx.num_draft_tokens_buf, [len(drafts.get(req_id, ())) for req_id in staged]),
    ):
        stage(buffer, values)


def stage_mamba_state_idx_to_gpu(
    mamba_state_idx: Mapping[str, int],
    req_ids: Sequence[str],
    num_reqs: int,
    gpu_buf: HostDeviceBuffer,
) -> None:
    """Bring the running columns of the first ``num_reqs`` requests to the device.

    Args:
        mamba_state_idx: Running column of each request, as ``preprocess_mamba`` leaves it.
        req_ids: Requests in batch order.
        num_reqs: How many of them.
        gpu_buf: Written: one entry for each request.

    Raises:
        UnknownRequestError: A request has no running column. Nothing was written.
        InvalidArgumentError: The buffer is too small. Nothing was written.
    """
    staged = req_ids[:num_reqs]
    check_known(staged, mamba_state_idx)
    stage(gpu_buf, [mamba_state_idx[req_id] for req_id in staged])


def stage_postprocess_metadata_to_gpu(
    scheduler_output: SchedulerOutput,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, Any],
    num_scheduled_tokens_buf: HostDeviceBuffer,
    num_computed_tokens_buf: HostDeviceBuffer,
    num_draft_tokens_buf: HostDeviceBuffer,
) -> None:
    """Bring scheduled, computed and draft tokens of the first ``num_reqs`` requests to the device.

    Args:
        scheduler_output: What the step computes.
        req_ids: Requests in batch order.
        num_reqs: How many of them.
        requests: The running requests by id.
        num_scheduled_tokens_buf: Written.
        num_computed_tokens_buf: Written.
        num_draft_tokens_buf: Written.

    Raises:
        UnknownRequestError: A request is not scheduled or not known. Nothing was written.
        InvalidArgumentError: A buffer is too small.
    """
    staged = req_ids[:num_reqs]
    scheduled = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens
    check_known(staged, staged, scheduled, requests)
    stage(num_scheduled_tokens_buf, [scheduled[req_id] for req_id in staged])
    stage(num_computed_tokens_buf, [requests[req_id].num_computed_tokens for req_id in staged])
    stage(num_draft_tokens_buf, [len(drafts.get(req_id, ())) for req_id in staged])


def check_known(
    req_ids: Sequence[str], mamba_state_idx: Container[str], *others: Container[str]
) -> None:
    """Check that all requests of a batch are known.

    Args:
        req_ids: The requests.
        mamba_state_idx: Those that have a running column.
        others: Those that are scheduled, and those that run.

    Raises:
        UnknownRequestError: One is missing.
    """
    missing = [req_id for req_id in req_ids if req_id not in mamba_state_idx]
    if missing:
        raise UnknownRequestError(
            f"mamba_state_idx must have every request of the batch, but has none of {missing}: "
            "preprocess_mamba comes first"
        )
    unknown = [req_id for req_id in req_ids if any(req_id not in known for known in others)]
    if unknown:
        raise UnknownRequestError(f"every request must be scheduled and known, got {unknown}")


def stage(buffer: HostDeviceBuffer, values: Sequence[int]) -> None:
    """Bring values to the device, without waiting for it.

    Args:
        buffer: Written, from its first entry on.
        values: What is written.

    Raises:
        InvalidArgumentError: The buffer is too small. Nothing was written.
    """
    if len(values) > len(buffer.np):
        raise InvalidArgumentError(f"the buffer holds {len(buffer.np)} requests, got {len(values)}")
    wait_until_sent(buffer)
    buffer.np[: len(values)] = values
    buffer.copy_to_gpu(len(values))
