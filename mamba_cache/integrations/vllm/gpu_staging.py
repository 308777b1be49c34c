"""The ``stage_*_to_gpu`` functions: inputs of the kernels, sent to the device without waiting."""

# An engine gives these functions all that it has, by position.
# ruff: noqa: PLR0917

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamba_cache.errors import InvalidArgumentError, UnknownRequestError
from mamba_cache.integrations.vllm.align_on_gpu import MambaSpecDecodeGPUContext
from mamba_cache.integrations.vllm.copy_buffers import wait_until_sent
from mamba_cache.integrations.vllm.protocols import HostDeviceBuffer, SchedulerOutput

__all__ = [
    "stage_mamba_state_idx_to_gpu",
    "stage_postprocess_inputs_to_gpu",
    "stage_postprocess_metadata_to_gpu",
]


def stage_mamba_state_idx_to_gpu(
    mamba_state_idx: Mapping[str, int],
    req_ids: Sequence[str],
    num_reqs: int,
    gpu_buf: HostDeviceBuffer,
) -> None:
    """Brings the running columns of the first ``num_reqs`` requests to the device.

    Args:
        mamba_state_idx: Running column of each request, as ``preprocess_mamba`` leaves it.
        req_ids: Requests in batch order.
        num_reqs: How many of them.
        gpu_buf: Written: one entry for each request.

    Raises:
        UnknownRequestError: A request has no running column. Nothing was written.
        InvalidArgumentError: The buffer is too small.
    """
    staged = req_ids[:num_reqs]
    missing = [req_id for req_id in staged if req_id not in mamba_state_idx]
    if missing:
        raise UnknownRequestError(
            f"mamba_state_idx must have every request of the batch, but has none of {missing}: "
            "preprocess_mamba comes first"
        )
    _stage(gpu_buf, [mamba_state_idx[req_id] for req_id in staged])


def stage_postprocess_metadata_to_gpu(
    scheduler_output: SchedulerOutput,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, Any],
    num_scheduled_tokens_buf: HostDeviceBuffer,
    num_computed_tokens_buf: HostDeviceBuffer,
    num_draft_tokens_buf: HostDeviceBuffer,
) -> None:
    """Brings scheduled, computed and draft tokens of the first ``num_reqs`` requests to the device.

    Args:
        scheduler_output: What the step computes.
        req_ids: Requests in batch order.
        num_reqs: How many of them.
        requests: ``RequestState`` by id.
        num_scheduled_tokens_buf: Written.
        num_computed_tokens_buf: Written.
        num_draft_tokens_buf: Written.

    Raises:
        UnknownRequestError: A request is not scheduled or not known. Nothing was written.
        InvalidArgumentError: A buffer is too small.
    """
    staged = req_ids[:num_reqs]
    scheduled, drafts = (
        scheduler_output.num_scheduled_tokens,
        scheduler_output.scheduled_spec_decode_tokens,
    )
    unknown = [req_id for req_id in staged if req_id not in scheduled or req_id not in requests]
    if unknown:
        raise UnknownRequestError(f"every request must be scheduled and known, got {unknown}")
    _stage(num_scheduled_tokens_buf, [scheduled[req_id] for req_id in staged])
    _stage(num_computed_tokens_buf, [requests[req_id].num_computed_tokens for req_id in staged])
    _stage(num_draft_tokens_buf, [len(drafts.get(req_id, ())) for req_id in staged])


def stage_postprocess_inputs_to_gpu(
    ctx: MambaSpecDecodeGPUContext,
    scheduler_output: SchedulerOutput,
    req_ids: Sequence[str],
    num_reqs: int,
    requests: Mapping[str, Any],
    mamba_state_idx: Mapping[str, int],
) -> None:
    """Brings all that ``run_fused_postprocess`` reads to the buffers of ``ctx``.

    Raises:
        UnknownRequestError: As in the two functions above.
        InvalidArgumentError: As in the two functions above.
    """
    stage_mamba_state_idx_to_gpu(mamba_state_idx, req_ids, num_reqs, ctx.mamba_state_idx_buf)
    stage_postprocess_metadata_to_gpu(
        scheduler_output,
        req_ids,
        num_reqs,
        requests,
        ctx.num_scheduled_tokens_buf,
        ctx.num_computed_tokens_buf,
        ctx.num_draft_tokens_buf,
    )


def _stage(buffer: HostDeviceBuffer, values: Sequence[int]) -> None:
    if len(values) > len(buffer.np):
        raise InvalidArgumentError(f"the buffer holds {len(buffer.np)} requests, got {len(values)}")
    wait_until_sent(buffer)
    buffer.np[: len(values)] = values
    buffer.copy_to_gpu(len(values))
