"""What an embedder's context says about itself, in the words of older embedders too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.protocols import SlotContext

__all__ = ["check_model", "checkpoint_alignment", "live_rows", "num_kv_blocks", "state_device"]


def num_kv_blocks(kv_blocks: Any) -> int:
    """Reads the size of the KV pool: ``pool_size``, or ``total_count`` as it was called before."""
    size: int = kv_blocks.pool_size if hasattr(kv_blocks, "pool_size") else kv_blocks.total_count
    return size


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
    table = np.asarray(context.mamba_metadata.request_to_mamba_state_idx)
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
