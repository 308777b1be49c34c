"""What was copied: counted where it is decided, and read when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mamba_cache._inference_mode import outside_inference_mode

__all__ = ["AFTER", "BEFORE", "AlignStats", "CopyCounts", "stats"]

BEFORE, AFTER = 0, 1
"""Entries of ``CopyCounts``: moves before a forward, and those after it."""

_all_counts: list[CopyCounts] = []
"""Those of every engine that this process has had: counters do not go back when one ends."""


@dataclass(frozen=True, slots=True)
class AlignStats:
    """What states in block tables were moved in this process so far.

    Attributes:
        steps: Calls of ``preprocess_mamba`` or ``preprocess_state`` for a batch with requests.
        moved_before: Requests whose states were copied to another column before a forward.
        moved_after: Requests whose states were saved at a column's end after one.
        copied_states: State tensors copied, over all layers of these requests.
    """

    steps: int
    moved_before: int
    moved_after: int
    copied_states: int


class CopyCounts:
    """Moves of one engine: those that the host decided, and those that the device did.

    Args:
        num_states: States of one request.
        device: Where moves are decided.

    Attributes:
        steps: Batches.
        on_host: Moves that the host decided, by ``BEFORE`` and ``AFTER``.
        on_device: [2] int64 on the device: the same of those that kernels decided.
        views: Each entry of ``on_device`` by itself, as kernels take it.
    """

    @outside_inference_mode
    def __init__(self, num_states: int, device: torch.device | str = "cpu") -> None:
        self._num_states = num_states
        self.steps = 0
        self.on_host = [0, 0]
        self.on_device = torch.zeros(2, dtype=torch.int64, device=device)
        self.views = self.on_device[:1], self.on_device[1:]
        _all_counts.append(self)

    def forget(self) -> None:
        """Leave these out of ``stats``: they are no engine's."""
        _all_counts.remove(self)

    @property
    def moves(self) -> tuple[int, int]:
        """Moves before and after forwards; waits for the device."""
        before, after = self.on_device.tolist()
        return self.on_host[BEFORE] + before, self.on_host[AFTER] + after

    @property
    def copied_states(self) -> int:
        """States that were copied; waits for the device."""
        return sum(self.moves) * self._num_states


def stats() -> AlignStats:
    """Return what was moved in this process so far; waits for the devices."""
    moves = [counts.moves for counts in _all_counts]
    return AlignStats(
        steps=sum(counts.steps for counts in _all_counts),
        moved_before=sum(before for before, _ in moves),
        moved_after=sum(after for _, after in moves),
        copied_states=sum(counts.copied_states for counts in _all_counts),
    )
