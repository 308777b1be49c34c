"""What engines before vLLM 0.32 call besides, and those that were made like them.

In 0.32 the decision after a step moved to the device for good, and 0.33 has no mode "all". An
engine of that generation gives ``preprocess_mamba`` and the rest of this package one sequence of
copy functions where later ones give a dict by kind of layer; both are taken everywhere.
"""

# An engine gives these functions all that it has, by position.
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm.align_on_gpu import check_known, stage
from mamba_cache.integrations.vllm.align_on_host import copy_on_host, plan_copies
from mamba_cache.integrations.vllm.column_moves import StateMove, plan_alignment
from mamba_cache.integrations.vllm.copy_buffers import MambaCopyBuffers
from mamba_cache.integrations.vllm.copy_specs import CopyFuncs
from mamba_cache.integrations.vllm.counters import AFTER
from mamba_cache.integrations.vllm.mamba_spec import shared_schedule
from mamba_cache.integrations.vllm.protocols import (
    CacheSettings,
    HostDeviceBuffer,
    InputBatch,
    KVCacheConfig,
    SchedulerOutput,
    StateSpecView,
)

__all__ = [
    "get_mamba_groups",
    "postprocess_mamba",
    "postprocess_mamba_all",
    "stage_mamba_state_idx_to_gpu",
    "stage_postprocess_metadata_to_gpu",
]


def get_mamba_groups(kv_cache_config: KVCacheConfig) -> tuple[list[int], StateSpecView]:
    """Return the ids of all Mamba groups, and the spec of the first.

    Raises:
        InvalidArgumentError: There is no Mamba group, or two differ in ``block_size``,
            ``num_speculative_blocks`` or ``mamba_cache_mode``.
    """
    return shared_schedule(kv_cache_config)


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
    copies = plan_copies(moves, copy_bufs, states, input_batch, requests)
    for index, move in moves.items():
        if move.stays:
            input_batch.num_accepted_tokens_cpu[index] = 1
    num_moves = sum(not move.is_empty for move in moves.values())
    copy_on_host(copies, num_moves, AFTER, copy_bufs)


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
