"""The device's record of requests that have drafts: how far each is, and its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mamba_cache.metadata import StepMetadata

__all__ = ["DecodeRows"]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Progress by request row, kept by the device alone.

    A request has a ring of ``ring`` live-state rows. Its cursor is the row of the ring that holds
    the state after ``num_computed`` tokens; a step writes the state after its j-th token to the
    row j after the cursor. So any number of them can be accepted, none included, by moving the
    cursor.

    Attributes:
        ring: Live-state rows of one request.
        num_computed: [max_requests] int32. Tokens whose effect is in the row at the cursor.
        cursors: [max_requests] int32. From 0 to ``ring`` - 1; 0 while a prompt is computed.
        last_tokens: [max_requests] int64. The last sampled token: the next step's first input.
    """

    ring: int
    num_computed: torch.Tensor
    cursors: torch.Tensor
    last_tokens: torch.Tensor
    _arrays: dict[str, tuple[torch.Tensor, np.ndarray[Any, Any]]] = field(
        default_factory=dict, repr=False
    )

    def array(self, owner: DecodeRows | StepMetadata, name: str) -> np.ndarray[Any, Any]:
        """Return the memory of a tensor on the CPU, which is looked up once.

        Args:
            owner: These rows, or a step's metadata, whose tensors are the same in all steps.
            name: Which of its tensors.
        """
        tensor: torch.Tensor = getattr(owner, name)
        kept = self._arrays.get(name)
        if kept is None or kept[0] is not tensor:
            kept = self._arrays[name] = tensor, tensor.numpy()
        return kept[1]

    @classmethod
    def make(cls, max_requests: int, ring: int, device: torch.device) -> DecodeRows:
        """Allocate the rows; each is written when its request's first step is committed."""

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_requests, dtype=dtype, device=device)

        return cls(ring, zeros(torch.int32), zeros(torch.int32), zeros(torch.int64))
