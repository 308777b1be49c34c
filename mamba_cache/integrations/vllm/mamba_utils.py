"""Align mode: state copies before and after a forward, planned on the host or on the device."""

# These signatures are vLLM's, which passes all arguments by position.
# ruff: noqa: PLR0917

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mamba_cache._torch import PAD_SLOT_ID, outside_inference_mode
from mamba_cache.errors import InvalidArgumentError, UnknownRequestError
from mamba_cache.integrations.vllm.copies import (
    IntArray,
    Moves,
    StateTable,
    plan_alignment,
    plan_migration,
    running_columns,
    stage,
)
from mamba_cache.integrations.vllm.mamba_spec import (
    CopyFuncs,
    shared_schedule,
)
from mamba_cache.integrations.vllm.protocols import (
    HostDeviceBuffer,
    InputBatch,
    KVCacheConfig,
    RequestState,
    SchedulerOutput,
)
from mamba_cache.states import CopyBackend

__all__ = [
    "CpuGpuBuffer",
    "MambaBuffers",
    "MambaCopyBuffers",
    "MambaSpecDecodeGPUContext",
    "cleanup_mamba_state_idx",
    "postprocess_mamba",
    "postprocess_mamba_align_gpu",
    "postprocess_mamba_all",
    "preprocess_mamba",
    "stage_mamba_state_idx_to_gpu",
    "stage_postprocess_inputs_to_gpu",
    "stage_postprocess_metadata_to_gpu",
]


class CpuGpuBuffer:
    """An array on the host and its copy on the device.

    Args:
        n: Number of elements.
        dtype: Dtype of the elements.
        device: Device of ``gpu``. On the CPU, ``cpu`` and ``gpu`` are still separate memory, so
            that code behaves there as on a GPU.

    Attributes:
        np: [n] numpy view of ``cpu``.
        cpu: [n], pinned if the device is a GPU.
        gpu: [n] on the device.
    """

    @outside_inference_mode
    def __init__(self, n: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        device = torch.device(device)
        on_cuda = device.type == "cuda"
        self.cpu = torch.zeros(n, dtype=dtype, device="cpu", pin_memory=on_cuda)
        self.gpu = torch.zeros(n, dtype=dtype, device=device)
        self.np: Any = self.cpu.numpy()
        self._sent = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Enqueue a copy of the first ``n`` elements (default: all); return them on the device.

        Do not change ``cpu`` before the copy is done: see ``wait``.
        """
        copied = self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)
        if self._sent:
            self._sent.record()
        return copied

    def wait(self) -> None:
        """Wait for the last enqueued copy; after it ``cpu`` may change.

        The wait is short unless the host runs more than a step ahead of the device.
        """
        if self._sent:
            self._sent.synchronize()


class MambaCopyBuffers(StateTable):
    """Copies planned on the host, one entry for each request whose states move."""

    @classmethod
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: KVCacheConfig,
        copy_funcs: CopyFuncs,
        make_buffer: Callable[..., Any],
    ) -> MambaCopyBuffers:
        """Create buffers for the copies of up to ``max_num_reqs`` requests.

        Raises:
            InvalidArgumentError: There is no Mamba group, or two are scheduled differently.
        """
        return cls(kv_cache_config, max_num_reqs, make_buffer)

    def list_copies_of(
        self,
        moves: Moves,
        req_ids: Sequence[str],
        requests: Mapping[str, RequestState],
        forward_context: Mapping[str, Any],
        copy_funcs: CopyFuncs,
    ) -> list[int]:
        """Check the moves of a batch and return their list of copies; empty without moves.

        Raises:
            InvalidArgumentError: States do not fit, a column or block is out of range, or there are
                too many copies. Nothing was written.
        """
        if not len(moves.rows):
            return []
        self.bind_states(forward_context, copy_funcs)
        return self.list_copies(
            moves,
            lambda row, group: requests[req_ids[row]].block_ids[self.group_ids[group]],
            lambda row: f"request {req_ids[row]!r}",
        )


class MambaSpecDecodeGPUContext(StateTable):
    """Copies states between columns of block tables, as planned on the device.

    Each ``run_`` method makes two launches: one lists the copies, the other executes the list. The
    kernels trust columns and blocks; the plain Python backend checks them before any change.
    All calls must use one stream.

    Attributes:
        num_accepted_tokens_out: [max_num_reqs] int32 on the device: accepted counts after
            ``run_fused_postprocess``.
        index_tables: The block tables that ``compute_aligned_state_indices`` reads, in batch order.
        aligned_state_indices: [groups, max_num_reqs, 1 + drafts] int32 on the device: last result
            of ``compute_aligned_state_indices``. Its address is fixed, for CUDA graphs.
        postcopy_bufs: Staged inputs of ``run_fused_postprocess``, [max_num_reqs] int32 each:
            running columns, scheduled and computed tokens, and drafts.
        precopy_bufs: Staged inputs of ``run_fused_precopy``: running columns, columns to copy
            from, and drafts accepted in the last step.
        is_initialized: Whether the states and block tables are bound.
    """

    @outside_inference_mode
    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_num_reqs: int,
        make_buffer: Callable[..., Any],
        backend: CopyBackend,
    ) -> None:
        super().__init__(kv_cache_config, max_num_reqs, make_buffer, backend)
        shape = self.num_groups, max_num_reqs, 1 + self.spec.num_speculative_blocks
        self.num_accepted_tokens_out = self.copies.new_zeros(max_num_reqs)
        self.index_tables: Sequence[torch.Tensor] = ()
        self.aligned_state_indices = self.copies.new_zeros(shape)
        buffers = [make_buffer(max_num_reqs, dtype=torch.int32) for _ in range(6)]
        self.postcopy_bufs: list[HostDeviceBuffer] = buffers[:4]
        self.precopy_bufs: list[HostDeviceBuffer] = [buffers[0], *buffers[4:]]
        self.is_initialized = False

    @classmethod
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: KVCacheConfig,
        copy_funcs: CopyFuncs | int,
        device: torch.device | str,
        make_buffer: Callable[..., Any],
        *,
        backend: CopyBackend = "auto",
    ) -> MambaSpecDecodeGPUContext:
        """Create a context that does nothing before ``initialize_from_forward_context``.

        Raises:
            InvalidArgumentError: There is no Mamba group, two are scheduled differently, or the
                backend is unknown or not for the device.
            MissingExtraError: The kernels are requested and Triton is not installed.
        """
        return cls(kv_cache_config, max_num_reqs, make_buffer, backend)

    def initialize_from_forward_context(
        self,
        kv_cache_config: KVCacheConfig,
        forward_context: Mapping[str, Any],
        mamba_state_copy_funcs: CopyFuncs,
        block_tables: Sequence[torch.Tensor],
        aligned_index_block_tables: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Bind the states and block tables at the first call; later calls do nothing.

        ``block_tables``, [rows, columns] int32 for each Mamba group, must keep their storage. Rows
        are request slots if calls pass an ``idx_mapping``. ``aligned_index_block_tables`` are block
        tables in batch order for ``compute_aligned_state_indices``; default: ``block_tables``.

        Raises:
            InvalidArgumentError: States, functions or block tables do not fit. Nothing was changed.
        """
        if self.is_initialized:
            return
        index_tables = self.whole_tables(aligned_index_block_tables or block_tables)
        self.whole_tables(block_tables)
        self.bind_states(forward_context, mamba_state_copy_funcs)
        self.bind_block_tables(block_tables)
        self.index_tables = index_tables
        self.is_initialized = True

    def compute_aligned_state_indices(self, seq_lens: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """Look up the blocks that the forward reads and writes.

        ``seq_lens`` are [num_reqs or more] int on the device: tokens of each row after the step.

        Returns:
            [groups, num_reqs, 1 + drafts] int32: the blocks of each row's running column and of the
            columns of its drafts; a view of ``aligned_state_indices``.

        Raises:
            InvalidArgumentError: The context is not initialised, or has fewer rows.
        """
        room = min(len(seq_lens), self.aligned_state_indices.shape[1])
        if not self.is_initialized or not 0 <= num_reqs <= room:
            raise InvalidArgumentError(
                f"num_reqs must be in [0, {room}] of an initialised context, got {num_reqs} and "
                f"is_initialized={self.is_initialized}"
            )
        found = self.aligned_state_indices[:, :num_reqs]
        running = (seq_lens[:num_reqs].long() - 1).clamp(min=0) // self.block_size
        columns = running[:, None] + torch.arange(found.shape[2], device=running.device)
        for blocks, table in zip(found, self.index_tables, strict=True):
            blocks.copy_(table[:num_reqs].gather(1, columns))
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
        """Save the states of requests that have crossed a block boundary.

        ``num_accepted_tokens_out`` becomes a copy of the accepted counts, with 1 where a state was
        shifted within its column. Without requests or before the initialisation nothing is done.

        All inputs are [num_reqs or more] int, in the order of the block tables' rows. Scheduled
        tokens include the drafts; computed tokens are counted before the step.

        Raises:
            InvalidArgumentError: There are too many requests, or without a GPU a column or block is
                out of range. Nothing was changed.
        """
        rows = num_computed_tokens_gpu, num_scheduled_tokens_gpu, num_draft_tokens_gpu
        counts = num_accepted_tokens_gpu, self.num_accepted_tokens_out
        self.run("plan_postcopy", num_reqs, None, *counts, mamba_state_idx_gpu, *rows, None)

    def run_fused_postprocess_align(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: torch.Tensor,
        state_idx_gpu: torch.Tensor,
        new_num_computed_tokens_gpu: torch.Tensor,
        idx_mapping: torch.Tensor,
    ) -> None:
        """Save states as ``run_fused_postprocess``, with all inputs by request slot: [slots] int.

        The accepted counts are written in place. Computed tokens are counted after the step.
        ``idx_mapping`` is as in ``run_fused_precopy``.

        Raises:
            InvalidArgumentError: As in ``run_fused_postprocess``. Nothing was changed.
        """
        accepted, computed = num_accepted_tokens_gpu, new_num_computed_tokens_gpu
        inputs = idx_mapping, accepted, accepted, state_idx_gpu, computed, None, None, None
        self.run("plan_postcopy", num_reqs, *inputs)

    def run_fused_precopy(
        self,
        num_reqs: int,
        state_idx_gpu: torch.Tensor,
        src_col_gpu: torch.Tensor,
        token_bias_gpu: torch.Tensor,
        idx_mapping: torch.Tensor | None = None,
    ) -> None:
        """Copy states to the columns that the step will read.

        Inputs are [slots] int by request slot: running columns of this step, running columns of
        the last step (negative for none), and drafts accepted in the last step. ``idx_mapping``,
        [num_reqs] int, has the slot of each batch row; this slot is also the row in the block
        tables. No slot occurs twice, and -1 skips a row. Without ``idx_mapping`` rows are slots.

        Raises:
            InvalidArgumentError: As in ``run_fused_postprocess``. Nothing was copied.
        """
        inputs = state_idx_gpu, src_col_gpu, token_bias_gpu, None, None, None
        self.run("plan_precopy", num_reqs, idx_mapping, *inputs)


@dataclass(slots=True)
class MambaBuffers:
    """All buffers of align mode.

    Attributes:
        preprocess: Copies planned on the host.
        postprocess_align: Copies planned on the device, or None.
    """

    preprocess: MambaCopyBuffers
    postprocess_align: MambaSpecDecodeGPUContext | None

    @classmethod
    def create(
        cls,
        max_num_reqs: int,
        kv_cache_config: KVCacheConfig,
        copy_funcs: CopyFuncs,
        make_buffer: Callable[..., Any],
        device: torch.device | str,
        with_postprocess_align: bool,
    ) -> MambaBuffers:
        """Create the buffers; ``with_postprocess_align`` adds those of the device's plans.

        Raises:
            InvalidArgumentError: There is no Mamba group, or two are scheduled differently.
        """
        options = max_num_reqs, kv_cache_config, copy_funcs
        preprocess = MambaCopyBuffers.create(*options, make_buffer)
        context = None
        if with_postprocess_align:
            context = MambaSpecDecodeGPUContext.create(*options, device, make_buffer)
        return cls(preprocess, context)


def stage_postprocess_inputs_to_gpu(
    ctx: MambaSpecDecodeGPUContext,
    scheduler_output: SchedulerOutput,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, RequestState],
    mamba_state_idx: Mapping[str, int],
) -> None:
    """Stage the inputs of ``run_fused_postprocess`` for the first ``num_reqs`` requests in ``ctx``.

    Raises:
        UnknownRequestError: A request has no running column, is not scheduled or is unknown.
            Nothing was written.
        InvalidArgumentError: The buffers are too small. Nothing was written.
    """
    columns = _columns_of(req_ids[:num_reqs], mamba_state_idx)
    tokens = _tokens_of(req_ids[:num_reqs], scheduler_output, requests)
    stage(ctx.postcopy_bufs, [columns, *tokens])


def stage_mamba_state_idx_to_gpu(
    mamba_state_idx: Mapping[str, int],
    req_ids: Sequence[str],
    num_reqs: int,
    gpu_buf: HostDeviceBuffer,
) -> None:
    """Copy the running columns of the first ``num_reqs`` requests to the device.

    Raises:
        UnknownRequestError: A request has no running column. Nothing was written.
        InvalidArgumentError: The buffer is too small. Nothing was written.
    """
    stage([gpu_buf], [_columns_of(req_ids[:num_reqs], mamba_state_idx)])


def stage_postprocess_metadata_to_gpu(
    scheduler_output: SchedulerOutput,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, RequestState],
    num_scheduled_tokens_buf: HostDeviceBuffer,
    num_computed_tokens_buf: HostDeviceBuffer,
    num_draft_tokens_buf: HostDeviceBuffer,
) -> None:
    """Copy scheduled, computed and draft tokens of the first ``num_reqs`` requests to the device.

    Raises:
        UnknownRequestError: A request is not scheduled or is unknown. Nothing was written.
        InvalidArgumentError: A buffer is too small. Nothing was written.
    """
    buffers = num_scheduled_tokens_buf, num_computed_tokens_buf, num_draft_tokens_buf
    stage(buffers, [*_tokens_of(req_ids[:num_reqs], scheduler_output, requests)])


def _tokens_of(
    req_ids: Sequence[str], scheduler_output: SchedulerOutput, requests: Mapping[str, RequestState]
) -> IntArray:
    """Return scheduled, computed and draft tokens of requests, [3, requests]."""
    scheduled = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens
    unknown = [i for i in req_ids if i not in scheduled or i not in requests]
    if unknown:
        raise UnknownRequestError(f"every request must be scheduled and known, got {unknown}")
    computed = [requests[req_id].num_computed_tokens for req_id in req_ids]
    num_drafts = [len(drafts.get(req_id, ())) for req_id in req_ids]
    return np.array([[scheduled[i] for i in req_ids], computed, num_drafts], dtype=np.int64)


def _columns_of(req_ids: Sequence[str], mamba_state_idx: Mapping[str, int]) -> list[int]:
    missing = [req_id for req_id in req_ids if req_id not in mamba_state_idx]
    if missing:
        raise UnknownRequestError(
            f"mamba_state_idx must have every request of the batch, but has none of {missing}: "
            "call preprocess_mamba first"
        )
    return [mamba_state_idx[req_id] for req_id in req_ids]


def cleanup_mamba_state_idx(
    scheduler_output: SchedulerOutput, mamba_state_idx: MutableMapping[str, int]
) -> None:
    """Remove the running columns of requests that are finished, preempted or resumed.

    A forced preemption shows up only among the resumed requests.
    """
    for req_id in itertools.chain(
        scheduler_output.finished_req_ids,
        scheduler_output.preempted_req_ids or (),
        scheduler_output.scheduled_cached_reqs.resumed_req_ids,
    ):
        mamba_state_idx.pop(req_id, None)


def preprocess_mamba(
    scheduler_output: SchedulerOutput,
    kv_cache_config: KVCacheConfig,
    cache_config: Any,
    mamba_state_idx: MutableMapping[str, int],
    input_batch: InputBatch,
    requests: Mapping[str, RequestState],
    forward_context: Mapping[str, Any],
    mamba_state_copy_funcs: CopyFuncs,
    copy_bufs: MambaCopyBuffers,
    align_ctx: MambaSpecDecodeGPUContext | None = None,
) -> None:
    """Copy every state to the column that the forward will read, in one launch.

    ``mamba_state_idx`` is updated to this step. Accepted counts become 1 where a state was copied.
    With ``align_ctx`` the device lists the copies from its block tables; the first call initialises
    ``align_ctx``. Without ``align_ctx`` the host lists the copies in ``copy_bufs``.

    Raises:
        InvalidArgumentError: Prefix caching is off, or a column or block is out of range; on a GPU
            with ``align_ctx`` kernels trust the block tables. Nothing was changed.
        UnknownRequestError: A request is not scheduled or is unknown. Nothing was changed.
    """
    if not cache_config.enable_prefix_caching:
        raise InvalidArgumentError(
            "preprocess_mamba requires cache_config.enable_prefix_caching, got "
            f"{cache_config.enable_prefix_caching!r}"
        )
    ids, counts = input_batch.req_ids, input_batch.num_accepted_tokens_cpu
    block_size, states = copy_bufs.block_size, (forward_context, mamba_state_copy_funcs)
    columns = dict(mamba_state_idx)
    cleanup_mamba_state_idx(scheduler_output, columns)
    num_scheduled, num_computed, _ = _tokens_of(ids, scheduler_output, requests)
    started = running_columns(num_computed, block_size).tolist()
    current = running_columns(num_computed + num_scheduled, block_size)
    previous = _int_array([*map(columns.get, ids, started)])
    moves = plan_migration(previous, current, _int_array(counts[: len(ids)]))
    copies: list[int] = []
    if align_ctx is None:
        copies = copy_bufs.list_copies_of(moves, ids, requests, *states)
    elif len(moves.rows):
        _bind(align_ctx, input_batch, len(ids), kv_cache_config, *states)
        sources, biases = np.full_like(current, PAD_SLOT_ID), np.zeros_like(current)
        sources[moves.rows], biases[moves.rows] = moves.sources, moves.biases
        stage(align_ctx.precopy_bufs, [current, sources, biases])
        align_ctx.run_fused_precopy(len(ids), *(buffer.gpu for buffer in align_ctx.precopy_bufs))
    columns.update(zip(ids, current.tolist(), strict=True))
    mamba_state_idx.clear()
    mamba_state_idx.update(columns)
    for row in moves.rows.tolist():
        counts[row] = 1
    copy_bufs.copy(copies)


def postprocess_mamba(
    scheduler_output: SchedulerOutput,
    kv_cache_config: KVCacheConfig,
    cache_config: Any,
    input_batch: InputBatch,
    requests: Mapping[str, RequestState],
    mamba_state_idx: MutableMapping[str, int],
    num_spec_tokens: int,
    num_reqs: int,
    *,
    forward_context: Mapping[str, Any] | None = None,
    mamba_state_copy_funcs: CopyFuncs | None = None,
    copy_bufs: MambaCopyBuffers | None = None,
) -> None:
    """Finish a step on the host, according to ``cache_config.mamba_cache_mode``.

    Engines before vLLM 0.32 call this function.

    Mode "align" saves the states of requests that crossed a block boundary, in one launch. Mode
    "all" calls ``postprocess_mamba_all``.

    Accepted counts become 1 where a state was shifted within its column. ``requests`` are as before
    the step. Mode "align" requires the last three arguments. Mode "all" reads ``num_reqs``, and
    ``num_spec_tokens``: the number of drafts of a full step.

    Raises:
        InvalidArgumentError: A required argument is missing, or a column or block is out of range.
            Nothing was copied.
        UnknownRequestError: A request has no running column, is not scheduled or is unknown.
            Nothing was copied.
    """
    if cache_config.mamba_cache_mode == "all":
        counted = input_batch, requests, mamba_state_idx, num_spec_tokens, num_reqs
        postprocess_mamba_all(scheduler_output, kv_cache_config, *counted)
    if cache_config.mamba_cache_mode != "align":
        return
    if forward_context is None or mamba_state_copy_funcs is None or copy_bufs is None:
        raise InvalidArgumentError(
            "in 'align' mode postprocess_mamba requires forward_context, mamba_state_copy_funcs "
            "and copy_bufs"
        )
    ids, counts = input_batch.req_ids, input_batch.num_accepted_tokens_cpu
    columns = _int_array(_columns_of(ids, mamba_state_idx))
    num_scheduled, num_computed, num_drafts = _tokens_of(ids, scheduler_output, requests)
    num_running = num_computed + num_scheduled - num_drafts
    accepted = _int_array(counts[: len(ids)])
    moves = plan_alignment(num_running, accepted, columns, copy_bufs.block_size)
    states = forward_context, mamba_state_copy_funcs
    copies = copy_bufs.list_copies_of(moves, ids, requests, *states)
    for row in moves.staying_rows.tolist():
        counts[row] = 1
    copy_bufs.copy(copies)


def postprocess_mamba_all(
    scheduler_output: SchedulerOutput,
    kv_cache_config: KVCacheConfig,
    input_batch: InputBatch,
    requests: Mapping[str, RequestState],
    mamba_state_idx: MutableMapping[str, int],
    num_spec_tokens: int,
    num_reqs: int,
) -> None:
    """Record in ``mamba_state_idx`` the last column that each decoding request wrote ("all" mode).

    In this mode kernels write all columns in place, so nothing is copied. The entry of a request
    that did not verify a full set of drafts is removed.

    The arguments are those of ``postprocess_mamba``. Without ``num_spec_tokens`` nothing is done.

    Raises:
        InvalidArgumentError: There is no Mamba group, or two are scheduled differently.
    """
    if num_spec_tokens < 1:
        return
    _, spec = shared_schedule(kv_cache_config)
    for req_id in input_batch.req_ids[:num_reqs]:
        num_scheduled = scheduler_output.num_scheduled_tokens.get(req_id, 0)
        if num_scheduled == 1 + num_spec_tokens:
            num_tokens = requests[req_id].num_computed_tokens + num_scheduled
            mamba_state_idx[req_id] = max(0, (num_tokens - 1) // spec.block_size)
        else:
            mamba_state_idx.pop(req_id, None)


def postprocess_mamba_align_gpu(
    *,
    bufs: MambaBuffers,
    num_reqs: int,
    num_accepted_tokens_gpu: torch.Tensor,
    num_accepted_tokens_cpu_tensor: torch.Tensor,
    input_batch: InputBatch,
    kv_cache_config: KVCacheConfig,
    forward_context: Mapping[str, Any],
    mamba_state_copy_funcs: CopyFuncs,
) -> None:
    """Save states as ``postprocess_mamba`` in "align" mode, planned and copied on the device.

    Call ``stage_postprocess_inputs_to_gpu`` first. The first call initialises the context of
    ``bufs``.

    The accepted counts are [num_reqs or more] int. The updated counts are copied asynchronously to
    ``num_accepted_tokens_cpu_tensor``: wait for the device before reading this tensor.

    Raises:
        InvalidArgumentError: ``bufs`` have no ``postprocess_align``, or states or block tables do
            not fit.
    """
    context = bufs.postprocess_align
    if context is None:
        raise InvalidArgumentError(
            "bufs must be created with with_postprocess_align=True, got no postprocess_align"
        )
    if not num_reqs:
        return
    states = kv_cache_config, forward_context, mamba_state_copy_funcs
    _bind(context, input_batch, num_reqs, *states)
    inputs = [buffer.gpu for buffer in context.postcopy_bufs]
    context.run_fused_postprocess(num_reqs, num_accepted_tokens_gpu, *inputs)
    num_accepted_tokens_cpu_tensor[:num_reqs].copy_(
        context.num_accepted_tokens_out[:num_reqs], non_blocking=True
    )


def _bind(
    context: MambaSpecDecodeGPUContext,
    input_batch: InputBatch,
    num_reqs: int,
    kv_cache_config: KVCacheConfig,
    forward_context: Mapping[str, Any],
    copy_funcs: CopyFuncs,
) -> None:
    """Bind states and block tables to a context at its first use."""
    if not context.is_initialized:
        tables = [
            input_batch.block_table[group_id].get_device_tensor(num_reqs)
            for group_id in context.group_ids
        ]
        states = kv_cache_config, forward_context, copy_funcs
        context.initialize_from_forward_context(*states, tables)


def _int_array(values: Any) -> IntArray:
    return np.array(values, dtype=np.int64)
