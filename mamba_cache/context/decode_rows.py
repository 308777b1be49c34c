"""The device's record of requests that have drafts: how far each is, and its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mamba_cache.metadata import StepMetadata

__all__ = ["DecodeRows"]

_PROGRESS = ("num_computed", "cursors", "last_tokens")
_OF_A_STEP = (
    "request_rows", "state_rows", "decode_state_rows", "query_start_loc", "num_computed_tokens",
    "seq_lens", "token_ids", "positions", "kv_slot_mapping", "block_tables", "boundary_rows",
    "boundary_slots", "boundary_entries", "boundary_positions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Progress by request row, kept by the device alone.

    A request has a ring of ``ring`` live-state rows. Its cursor is the row of the ring that holds
    the state after ``num_computed`` tokens; a step writes the state after its j-th token to the
    row j after the cursor. So any number of them can be accepted, none included, by moving the
    cursor.
    """

    ring: int  # live-state rows of one request
    num_computed: torch.Tensor  # [max_requests] int32
    cursors: torch.Tensor  # [max_requests] int32
    last_tokens: torch.Tensor  # [max_requests] int64
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def arrays(self, metadata: StepMetadata) -> dict[str, np.ndarray[Any, Any]]:
        """Return the memory of these tensors and of a step's by their names; all are on the CPU."""
        if self._kept.get("of") is not metadata.request_rows:
            own, given = _PROGRESS, _OF_A_STEP
            tensors = {n: getattr(self, n) for n in own} | {n: getattr(metadata, n) for n in given}
            self._kept["arrays"] = {name: tensor.numpy() for name, tensor in tensors.items()}
            self._kept["of"] = metadata.request_rows
        arrays: dict[str, np.ndarray[Any, Any]] = self._kept["arrays"]
        return arrays

    @classmethod
    def make(cls, max_requests: int, ring: int, device: torch.device) -> DecodeRows:
        """Allocate the rows; each is written when its request's first step is committed."""

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_requests, dtype=dtype, device=device)

        return cls(ring, zeros(torch.int32), zeros(torch.int32), zeros(torch.int64))
