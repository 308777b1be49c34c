"""What an embedder's context says about itself, in the words of older embedders too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.protocols import SlotContext

__all__ = [
    "as_host_array",
    "check_model",
    "checkpoint_alignment",
    "live_rows",
    "num_kv_blocks",
    "num_scratch_rows",
    "state_device",
]


def num_kv_blocks(kv_blocks: Any) -> int:
    """Reads the size of the KV pool: ``pool_size``, or ``total_count`` as it was called before."""
    size: int = kv_blocks.pool_size if hasattr(kv_blocks, "pool_size") else kv_blocks.total_count
    return size


def as_host_array(values: Any) -> npt.NDArray[Any]:
    """Reads an embedder's array or tensor as numpy, sharing its memory where that is the host's.

    Megatron Core 0.17 keeps its bookkeeping on the device, and waits for it wherever it reads it;
    so does this then.
    """
    return np.asarray(values.cpu() if getattr(values, "is_cuda", False) else values)


def num_scratch_rows(context: SlotContext, per_request: int) -> int:
    """Reads how many states the forward may write into the scratch in one step.

    Megatron Core before 0.19 does not say, and its forward writes ``per_request`` rows for each of
    ``max_requests``, whether a state belongs there or not.
    """
    rows: int | None = getattr(context, "max_mamba_intermediate_states_per_step", None)
    return per_request * context.max_requests if rows is None else rows


def checkpoint_alignment(context: SlotContext) -> int:
    """Reads the tokens between positions where states can be saved: by default an SSM chunk's.

    Raises:
        InvalidArgumentError: Not every such position ends an SSM chunk.
    """
    chunk: int = getattr(context, "mamba_chunk_size", 1)
    alignment: int = getattr(context, "ssm_chunk_alignment", chunk)
    if alignment % chunk:
        raise InvalidArgumentError(
            f"ssm_chunk_alignment must be a multiple of mamba_chunk_size ({chunk}), got {alignment}"
        )
    return alignment


def check_model(context: SlotContext) -> None:
    """Checks that the context's model is of a kind whose states can be saved.

    Raises:
        InvalidArgumentError: It is not, or ``checkpoint_alignment`` refuses.
    """
    num_householder = getattr(context, "gdp_num_householder", 0)
    if num_householder > 0:
        raise InvalidArgumentError(
            f"gdp_num_householder must be 0, got {num_householder}: states of Gated Delta Product "
            "layers are not supported"
        )
    checkpoint_alignment(context)


def live_rows(context: SlotContext, requests: Sequence[int]) -> list[int]:
    """Looks up the rows of requests in the live states.

    Raises:
        InvalidArgumentError: There is no such request row, or it has no live state.
    """
    table = as_host_array(context.mamba_metadata.request_to_mamba_state_idx)
    rows = [int(table[request]) if 0 <= request < len(table) else -1 for request in requests]
    if min(rows) < 0:
        raise InvalidArgumentError(
            f"requests must be in [0, {len(table)}) and have a live state; "
            f"of {list(requests)} the rows of live state are {rows}"
        )
    return rows


def state_device(context: SlotContext) -> torch.device:
    """Returns the context's own ``device``, or the current CUDA device if it names none."""
    device = getattr(context, "device", None)
    return torch.device(torch.cuda.current_device() if device is None else device)
