"""Megatron Core's scratch protocol: where a forward saves states, and which of them fit.

Its kernels write checkpoint states into a scratch, at offsets that are planned before the forward;
after it, those states and the live ones at prompts' ends are copied into slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mamba_cache._torch import outside_inference_mode
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
    "IntermediateTables",
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


class IntermediateTables:
    """One row for each request: its intermediate offsets and its EOS checkpoint.

    The tables on the CPU are the truth, and may be written by index from outside; those on the
    device are where ``upload`` puts a copy for kernels to read.
    """

    @outside_inference_mode
    def __init__(self, max_requests: int, device: torch.device) -> None:
        wide = (max_requests, MAX_INTERMEDIATE_OFFSETS_PER_REQUEST)
        self.offsets_cpu = torch.empty(wide, dtype=torch.int32, device="cpu")
        self.counts_cpu = torch.empty(max_requests, dtype=torch.int32, device="cpu")
        self.block_ids_cpu = torch.empty(wide, dtype=torch.int32, device="cpu")
        self.eos_block_ids_cpu = torch.empty(max_requests, dtype=torch.int32, device="cpu")
        self._offsets_device = torch.zeros(wide, dtype=torch.int32, device=device)
        self._counts_device = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.has_intermediates = False
        self.reset()

    def reset(self) -> None:
        """Empty every row."""
        self.clear(0, len(self.counts_cpu))

    def num_free(self, row: int, num_scratch_rows: int) -> int:
        """Return how many states a request may save: rows of the scratch that others leave."""
        counts = self.counts_cpu.numpy()
        num_others = int(counts.sum()) - int(counts[row])
        return min(max(num_scratch_rows - num_others, 0), MAX_INTERMEDIATE_OFFSETS_PER_REQUEST)

    def record(self, row: int, plan: CheckpointPlan) -> None:
        """Replace what a request's row holds."""
        num_offsets = len(plan.offsets)
        unused = MAX_INTERMEDIATE_OFFSETS_PER_REQUEST - num_offsets
        # Through numpy: one element of a tensor costs as much as a whole row of an array.
        self.offsets_cpu.numpy()[row] = plan.offsets + [0] * unused
        self.block_ids_cpu.numpy()[row] = plan.block_ids + [-1] * unused
        self.counts_cpu.numpy()[row] = num_offsets
        self.eos_block_ids_cpu.numpy()[row] = plan.eos_block_id
        if num_offsets or plan.eos_block_id >= 0:
            self.has_intermediates = True

    def clear(self, start: int, num_rows: int) -> None:
        """Empty the rows of the batch's prefill requests, and the flag."""
        stop = start + num_rows
        self.offsets_cpu[start:stop] = 0
        self.counts_cpu[start:stop] = 0
        self.block_ids_cpu[start:stop] = -1
        self.eos_block_ids_cpu[start:stop] = -1
        self.has_intermediates = False

    def rows(self, start: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of rows of ``offsets_cpu`` and ``counts_cpu``."""
        stop = start + num_rows
        return self.offsets_cpu[start:stop], self.counts_cpu[start:stop]

    def upload(self, start: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy rows to the device without waiting for it."""
        stop = start + num_rows
        on_device = self._offsets_device[start:stop], self._counts_device[start:stop]
        for target, source in zip(on_device, self.rows(start, num_rows), strict=True):
            # The device may read long after this call, when the rows have been cleared already, so
            # it gets a copy of its own: pinned, since from pageable memory it would be waited for.
            snapshot = source.pin_memory() if target.is_cuda else source
            target.copy_(snapshot, non_blocking=True)
        return on_device

    def reached(
        self, start: int, num_rows: int, num_written: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """List the checkpoints that a forward has reached."""
        num_written = num_written[:num_rows]
        table = self.block_ids_cpu.numpy()[start : start + len(num_written)]
        written = np.arange(table.shape[1]) < np.asarray(num_written, np.int64)[:, None]
        eos = self.eos_block_ids_cpu.numpy()[start : start + num_rows]
        eos_rows = np.flatnonzero(eos >= 0)
        return table[written].tolist(), eos[eos_rows].tolist(), (eos_rows + start).tolist()
