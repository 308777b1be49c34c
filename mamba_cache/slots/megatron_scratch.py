"""Megatron Core's scratch protocol: where a forward saves states, and which of them fit.

Its kernels write checkpoint states into a scratch, at offsets that are planned before the forward;
after it, those states and the live ones at prompts' ends are copied into slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mamba_cache.cache.placement import (
    CheckpointPlacement,
    PlacementFacts,
    checkpoint_offsets,
    placed_positions,
)
from mamba_cache.config import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.protocols import SlotContext
from mamba_cache.states import StateSpec

__all__ = [
    "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST",
    "CheckpointPlan",
    "checkpoint_alignment",
    "num_scratch_rows",
    "plan_checkpoints",
]


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Where states are saved in one prefill chunk of one request."""

    offsets: list[int]  # at most three intermediate offsets, in tokens, ascending
    block_ids: list[int]  # the block that each of them ends
    eos_block_id: int  # the block that ends with the prompt, if this chunk does too; else -1
    num_skipped: int  # checkpoints that were wanted beyond those


def plan_checkpoints(
    placement: CheckpointPlacement,
    request: Any,
    *,
    skip_tokens: int,
    prefill_chunk_length: int,
    num_matched_blocks: int,
    num_required_blocks: int,
    block_ids: Any,
    block_size_tokens: int,
    alignment: int,
    max_offsets: int = MAX_INTERMEDIATE_OFFSETS_PER_REQUEST,
) -> CheckpointPlan:
    """Plan the checkpoints of a prefill chunk; of more than ``max_offsets`` the last are kept."""
    prompt_tokens = len(request.prompt_tokens)
    chunk_start = request.finished_chunk_token_count + skip_tokens
    facts = PlacementFacts(
        prompt_tokens, block_size_tokens, num_matched_blocks, num_required_blocks
    )
    wanted = checkpoint_offsets(
        placed_positions(placement, facts),
        chunk_start=chunk_start,
        num_tokens=prefill_chunk_length - skip_tokens,
        alignment=alignment,
    )
    num_skipped = max(len(wanted) - max_offsets, 0)
    offsets = wanted[num_skipped:]
    ends_prompt = request.finished_chunk_token_count + prefill_chunk_length >= prompt_tokens
    fills_block = prompt_tokens > 0 and prompt_tokens % block_size_tokens == 0
    eos = (
        int(block_ids[prompt_tokens // block_size_tokens - 1])
        if ends_prompt and fills_block
        else -1
    )
    return CheckpointPlan(
        offsets=offsets,
        block_ids=[int(block_ids[(chunk_start + o) // block_size_tokens - 1]) for o in offsets],
        eos_block_id=eos,
        num_skipped=num_skipped,
    )


def num_scratch_rows(context: SlotContext, spec: StateSpec) -> int:
    """Read how many states the forward may write into the scratch in one step.

    Megatron Core before 0.19 does not say, and its forward writes three rows for each of
    ``max_requests``, whether a state belongs there or not.
    """
    rows: int | None = getattr(context, "max_mamba_intermediate_states_per_step", None)
    if not spec.is_mamba:
        if rows:
            raise InvalidArgumentError(
                "a scratch holds conv and SSM states (StateSpec.mamba) alone: with states of "
                f"{[tensor.name for tensor in spec.tensors]} "
                f"max_mamba_intermediate_states_per_step must be 0, got {rows}"
            )
        return 0
    if rows is None:
        return MAX_INTERMEDIATE_OFFSETS_PER_REQUEST * context.max_requests
    return rows


def checkpoint_alignment(context: SlotContext) -> int:
    """Read the tokens between positions where states can be saved: by default an SSM chunk's."""
    chunk: int = getattr(context, "mamba_chunk_size", 1)
    alignment: int = getattr(context, "ssm_chunk_alignment", chunk)
    if alignment % chunk:
        raise InvalidArgumentError(
            f"ssm_chunk_alignment must be a multiple of mamba_chunk_size ({chunk}), got {alignment}"
        )
    return alignment
