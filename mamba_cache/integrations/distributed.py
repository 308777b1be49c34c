"""Agreement of ranks that hold shards of the same states.

Tensor-parallel ranks hold different heads and channels of the same states, so all ranks must make
the same decisions: the same slots for the same blocks, the same evictions. On the GPU this needs no
communication: decisions depend only on the calls, and all ranks make the same calls. The contents
of lower tiers differ by rank, so ranks agree on the entries to resume from by ``GroupAgreement``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mamba_cache._checks import check_int
from mamba_cache.errors import StepOrderError

__all__ = ["GroupAgreement", "agree_on_num_slots"]


def agree_on_num_slots(num_slots: int, group: dist.ProcessGroup | None = None) -> int:
    """Return the smallest number of slots of all ranks; every rank of the group must call this.

    Pipeline stages have different layers, so one budget holds different numbers of slots. All ranks
    use the smallest number; else a block could keep its state in one stage and lose it in another.

    Args:
        num_slots: Slots that this rank's budget holds.
        group: The ranks; default: all.

    Raises:
        InvalidArgumentError: ``num_slots`` is not an int >= 0. The other ranks then wait.
        StepOrderError: ``torch.distributed`` is not initialised.
    """
    check_int("num_slots", num_slots, minimum=0)
    _check_initialised()
    smallest = torch.tensor(num_slots, dtype=torch.int64, device=_device(group))
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    return int(smallest)


class GroupAgreement:
    """Agreement of a group's ranks on the tier entries to resume from, by a small ``all_reduce``.

    Pass one to the context of each rank. A call waits for the same call of all ranks, up to the
    process group's timeout. It does not wait for the model's work if the model's collectives use
    another group.

    Args:
        group: The ranks that must make the same decisions: a tensor-parallel or pipeline-parallel
            group, not the replicas of data parallelism. A separate gloo group
            (``new_group(ranks, backend="gloo")``) is best, because it does not use the GPU; NCCL
            works too. Default: all ranks.

    Raises:
        StepOrderError: ``torch.distributed`` is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        _check_initialised()
        self._group, self._device = group, _device(group)
        self._is_alone = dist.get_world_size(group) == 1
        self._stream: Any = None
        if self._device.type == "cuda":  # pragma: no cover - tests/gpu run it
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise maximum of the ranks' values."""
        if self._is_alone:
            return list(values)
        with torch.cuda.stream(self._stream):  # no effect if None
            given = torch.tensor(values, dtype=torch.float64, device=self._device)
            dist.all_reduce(given, op=dist.ReduceOp.MAX, group=self._group)
            largest: list[float] = given.tolist()
        return largest


def _check_initialised() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise StepOrderError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of tensors for the group's collectives."""
    if dist.get_backend(group) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
