"""Align mode around a forward: what comes before it, and what follows on the host or device."""

# An engine gives these functions all that it has, by position.
# ruff: noqa: PLR0917

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from mamba_cache._indices import PAD_SLOT_ID
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.align_on_gpu import (
    MambaBuffers,
    MambaSpecDecodeGPUContext,
    check_known,
    stage,
)
from mamba_cache.integrations.vllm.column_moves import (
    StateMove,
    plan_alignment,
    plan_migration,
    previous_column,
    running_column,
)
from mamba_cache.integrations.vllm.copy_buffers import MambaCopyBuffers, Region
from mamba_cache.integrations.vllm.copy_specs import CopyFuncs, StateMemory, describe_states
from mamba_cache.integrations.vllm.kernels import kernels_for
from mamba_cache.integrations.vllm.mamba_spec import shared_schedule
from mamba_cache.integrations.vllm.protocols import (
    CacheSettings,
    InputBatch,
    KVCacheConfig,
    SchedulerOutput,
)

__all__ = [
    "cleanup_mamba_state_idx",
    "postprocess_mamba",
    "postprocess_mamba_align_gpu",
    "postprocess_mamba_all",
    "preprocess_mamba",
]


def cleanup_mamba_state_idx(
    scheduler_output: SchedulerOutput, mamba_state_idx: MutableMapping[str, int]
) -> None:
    """Forget the running columns of requests that are finished, preempted or resumed.

    A forced preemption shows up only among the resumed requests.

    Args:
        scheduler_output: What the step computes.
        mamba_state_idx: Running column of each request; entries are dropped.
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
    cache_config: CacheSettings,
    mamba_state_idx: MutableMapping[str, int],
    input_batch: InputBatch,
    requests: Mapping[str, Any],
    forward_context: Mapping[str, Any],
    mamba_state_copy_funcs: CopyFuncs,
    copy_bufs: MambaCopyBuffers,
    align_ctx: MambaSpecDecodeGPUContext | None = None,
) -> None:
    """Copy every state to the column that the forward will read, all in one launch.

    Args:
        scheduler_output: What the step computes.
        kv_cache_config: Names the layers of each group.
        cache_config: The engine's cache settings.
        mamba_state_idx: Running column of each request; brought up to this step.
        input_batch: The batch. Accepted counts become 1 where a state was copied.
        requests: The running requests by id.
        forward_context: The layers by name.
        mamba_state_copy_funcs: What each kind of state is, by kind of layer.
        copy_bufs: Where the copies are listed.
        align_ctx: What copies where the device decides after a step. It learns at its first call
            where states and block tables lie; without it the host lists every copy.

    Raises:
        InvalidArgumentError: Prefix caching is off, or a column or block is out of range; on a GPU
            with ``align_ctx`` kernels trust the block tables. Nothing was changed.
    """
    if not cache_config.enable_prefix_caching:
        raise InvalidArgumentError(
            "preprocess_mamba requires cache_config.enable_prefix_caching, got "
            f"{cache_config.enable_prefix_caching!r}"
        )
    spec = copy_bufs.mamba_spec
    running = dict(mamba_state_idx)
    cleanup_mamba_state_idx(scheduler_output, running)
    moves: dict[int, StateMove] = {}
    for index, req_id in enumerate(input_batch.req_ids):
        num_computed = requests[req_id].num_computed_tokens
        num_scheduled = scheduler_output.num_scheduled_tokens[req_id]
        previous = running.get(req_id, previous_column(num_computed, spec.block_size))
        running[req_id] = running_column(num_computed, num_scheduled, spec.block_size)
        num_accepted = int(input_batch.num_accepted_tokens_cpu[index])
        move = plan_migration(previous, running[req_id], num_accepted)
        if move:
            moves[index] = move
    states = (kv_cache_config, forward_context, mamba_state_copy_funcs)
    copies: list[Region] = []
    if align_ctx is None:
        copies = _plan_copies(moves, copy_bufs, states, input_batch, requests)
    elif moves:
        columns = [running[req_id] for req_id in input_batch.req_ids]
        _bind(align_ctx, input_batch, len(columns), states)
        _copy_on_device(align_ctx, columns, moves)
    mamba_state_idx.clear()
    mamba_state_idx.update(running)
    for index in moves:
        input_batch.num_accepted_tokens_cpu[index] = 1
    _copy_on_host(copies, copy_bufs)


def postprocess_mamba(
    scheduler_output: SchedulerOutput,
    kv_cache_config: KVCacheConfig,
    cache_config: CacheSettings,
    input_batch: InputBatch,
    requests: Mapping[str, Any],
    mamba_state_idx: MutableMapping[str, int],
    num_spec_tokens: int,
    num_reqs: int,
    *,
    forward_context: Mapping[str, Any] | None = None,
    mamba_state_copy_funcs: CopyFuncs | None = None,
    copy_bufs: MambaCopyBuffers | None = None,
) -> None:
    """Do what a step's accepted counts ask for, by ``cache_config.mamba_cache_mode``.

    Engines of the generation before vLLM 0.32 decide on the host with it.

    In "align" mode the states of requests that crossed a block boundary are saved, all in one
    launch; in "all" mode see ``postprocess_mamba_all``.

    Args:
        scheduler_output: What the step computed.
        kv_cache_config: Names the layers of each group.
        cache_config: The engine's cache settings.
        input_batch: The batch. Accepted counts become 1 where a state was shifted in its column.
        requests: The running requests by id, as before the step.
        mamba_state_idx: Running column of each request.
        num_spec_tokens: Drafts of a full step.
        num_reqs: Requests that "all" mode looks at.
        forward_context: The layers by name. Required in "align" mode, as all below.
        mamba_state_copy_funcs: What each kind of state is.
        copy_bufs: Where the copies are listed.

    Raises:
        InvalidArgumentError: A required argument is missing, or a column or block is out of range.
            Nothing was copied.
        UnknownRequestError: A request has no running column. Nothing was copied.
    """
    if cache_config.mamba_cache_mode == "all":
        batch = (input_batch, requests, mamba_state_idx, num_spec_tokens, num_reqs)
        postprocess_mamba_all(scheduler_output, kv_cache_config, *batch)
    if cache_config.mamba_cache_mode != "align":
        return
    if forward_context is None or mamba_state_copy_funcs is None or copy_bufs is None:
        raise InvalidArgumentError(
            "in 'align' mode postprocess_mamba requires forward_context, mamba_state_copy_funcs "
            "and copy_bufs"
        )
    block_size = copy_bufs.mamba_spec.block_size
    moves = _plan_alignments(scheduler_output, input_batch, requests, mamba_state_idx, block_size)
    states = (kv_cache_config, forward_context, mamba_state_copy_funcs)
    copies = _plan_copies(moves, copy_bufs, states, input_batch, requests)
    for index, move in moves.items():
        if move.stays:
            input_batch.num_accepted_tokens_cpu[index] = 1
    _copy_on_host(copies, copy_bufs)


def postprocess_mamba_all(
    scheduler_output: SchedulerOutput,
    kv_cache_config: KVCacheConfig,
    input_batch: InputBatch,
    requests: Mapping[str, Any],
    mamba_state_idx: MutableMapping[str, int],
    num_spec_tokens: int,
    num_reqs: int,
) -> None:
    """Remember the last column that each decoding request has written, in "all" mode.

    Kernels write all columns in place then, so nothing is copied. A request that did not verify a
    full set of drafts is forgotten.

    It takes what ``postprocess_mamba`` takes, and changes ``mamba_state_idx``: the last column of
    each request. Without ``num_spec_tokens`` nothing is done.

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
    """Save states as ``postprocess_mamba`` in "align" mode, decided and copied on the device.

    The inputs have been staged by ``stage_postprocess_inputs_to_gpu``. The first call learns where
    states and block tables lie.

    Args:
        bufs: Made with ``with_postprocess_align``.
        num_reqs: Requests of the batch.
        num_accepted_tokens_gpu: [num_reqs or more] int on the device: accepted tokens.
        num_accepted_tokens_cpu_tensor: [num_reqs or more] int on the CPU. The counts after the
            copies are enqueued to be written there; whoever reads them waits for the device.
        input_batch: Has the block tables.
        kv_cache_config: Names the layers of each group.
        forward_context: The layers by name.
        mamba_state_copy_funcs: What each kind of state is, by kind of layer.

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
    _bind(
        context, input_batch, num_reqs, (kv_cache_config, forward_context, mamba_state_copy_funcs)
    )
    context.run_fused_postprocess(
        num_reqs,
        num_accepted_tokens_gpu,
        context.mamba_state_idx_buf.gpu,
        context.num_scheduled_tokens_buf.gpu,
        context.num_computed_tokens_buf.gpu,
        context.num_draft_tokens_buf.gpu,
    )
    num_accepted_tokens_cpu_tensor[:num_reqs].copy_(
        context.num_accepted_tokens_out[:num_reqs], non_blocking=True
    )


def _bind(
    context: MambaSpecDecodeGPUContext,
    input_batch: InputBatch,
    num_reqs: int,
    states: tuple[KVCacheConfig, Mapping[str, Any], CopyFuncs],
) -> None:
    """Tell a context, once, where states and block tables lie."""
    if not context.is_initialized:
        tables = [
            input_batch.block_table[group_id].get_device_tensor(num_reqs)
            for group_id in context.mamba_group_ids
        ]
        context.initialize_from_forward_context(*states, tables)


def _copy_on_device(
    context: MambaSpecDecodeGPUContext, columns: Sequence[int], moves: Mapping[int, StateMove]
) -> None:
    """Send the columns of a batch to the device, and copy there."""
    indices = range(len(columns))
    stage(context.mamba_state_idx_buf, columns)
    sources = [moves[index].source if index in moves else PAD_SLOT_ID for index in indices]
    stage(context.precopy_src_col_buf, sources)
    biases = [moves[index].bias if index in moves else 0 for index in indices]
    stage(context.precopy_token_bias_buf, biases)
    context.run_fused_precopy(
        len(columns),
        context.mamba_state_idx_buf.gpu,
        context.precopy_src_col_buf.gpu,
        context.precopy_token_bias_buf.gpu,
    )


def _plan_copies(
    moves: Mapping[int, StateMove],
    copy_bufs: MambaCopyBuffers,
    states: tuple[KVCacheConfig, Mapping[str, Any], CopyFuncs],
    input_batch: InputBatch,
    requests: Mapping[str, Any],
) -> list[Region]:
    """Check the moves of requests, and return where their bytes go.

    Args:
        moves: By position in the batch.
        copy_bufs: What the copies must fit into.
        states: Names the layers of each group; the layers by name; what each kind of state is.
        input_batch: The batch.
        requests: The running requests by id.

    Raises:
        InvalidArgumentError: A column or block is out of range, or there are too many copies.
    """
    real = {index: move for index, move in moves.items() if not move.is_empty}
    if not real:
        return []
    kv_cache_config, forward_context, copy_funcs = states
    group_ids = copy_bufs.mamba_group_ids
    memories = describe_states(kv_cache_config, group_ids, forward_context, copy_funcs)
    regions: list[Region] = []
    for index, move in real.items():
        req_id = input_batch.req_ids[index]
        by_group = [requests[req_id].block_ids[group_id] for group_id in group_ids]
        for memory in memories:
            regions += _regions(memory, by_group[memory.group], move, req_id)
    copy_bufs.check_room(len(regions))
    return regions


def _regions(
    memory: StateMemory, block_ids: Sequence[int], move: StateMove, req_id: str
) -> Iterator[Region]:
    columns = memory.source_column(move.source, move.bias), move.destination
    if not all(0 <= column < len(block_ids) for column in columns):
        raise InvalidArgumentError(
            f"request {req_id!r} has {len(block_ids)} columns, but copies {move}"
        )
    source, destination = (block_ids[column] for column in columns)
    if max(source, destination) >= len(memory.blocks):
        raise InvalidArgumentError(
            f"block ids must be less than {len(memory.blocks)}, got {source} and {destination} of "
            f"request {req_id!r}"
        )
    if min(source, destination) > PAD_SLOT_ID:
        read = memory.copy_spec(source, move.bias)
        yield Region(
            source=read.start_addr,
            destination=memory.address(destination),
            size=read.num_elements * memory.element_size,
            num_rows=read.num_rows,
            row_stride=read.row_stride * memory.element_size,
            piece_bytes=memory.token_bytes if memory.shift(move.bias) else 0,
        )


def _copy_on_host(regions: list[Region], copy_bufs: MambaCopyBuffers) -> None:
    """Copy the regions in one launch."""
    if regions:
        copy_bufs.fill(regions)
        kernels_for(copy_bufs.backend, copy_bufs.sizes.gpu.device).copy_regions(copy_bufs)


def _plan_alignments(
    scheduler_output: SchedulerOutput,
    input_batch: InputBatch,
    requests: Mapping[str, Any],
    mamba_state_idx: Mapping[str, int],
    block_size: int,
) -> dict[int, StateMove]:
    """Return the move of each request in the batch that has crossed a block boundary."""
    check_known(input_batch.req_ids, mamba_state_idx)
    moves = {}
    for index, req_id in enumerate(input_batch.req_ids):
        num_drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(req_id, ()))
        num_scheduled = scheduler_output.num_scheduled_tokens[req_id]
        move = plan_alignment(
            requests[req_id].num_computed_tokens + num_scheduled - num_drafts,
            int(input_batch.num_accepted_tokens_cpu[index]),
            mamba_state_idx[req_id],
            block_size,
        )
        if move:
            moves[index] = move
    return moves
