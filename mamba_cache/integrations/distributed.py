"""Agreement of ranks that hold shards of the same states.

Tensor-parallel ranks keep different heads and channels of the same states, so each must decide
alike: the same slots for the same blocks, the same evictions. On the GPU nothing is exchanged to
bring that about: decisions depend on the calls alone, so ranks that make the same calls decide
alike. What lies in tiers below the GPU differs, so ranks agree on what they resume from there, by
``GroupAgreement``.
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
    """Find the number of slots that every rank has room for; every rank of the group calls it.

    Pipeline stages have different layers, so one budget holds different numbers of slots. All take
    the smallest, or a block would keep its state in one stage and lose it in another.

    Args:
        num_slots: Slots that this rank's budget holds.
        group: The ranks; default: all.

    Raises:
        InvalidArgumentError: ``num_slots`` is not an int >= 0. The other ranks wait then.
        StepOrderError: ``torch.distributed`` is not initialised.
    """
    check_int("num_slots", num_slots, minimum=0)
    _check_initialised()
    smallest = torch.tensor(num_slots, dtype=torch.int64, device=_device(group))
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    return int(smallest)


class GroupAgreement:
    """How the ranks of a group agree on what they resume from tiers: one small ``all_reduce`` each.

    Given to the context of each rank. A call waits until all ranks have made it, for as long as
    the process group's timeout says, and for nothing else: no work of the model, provided that
    the group is not the one that the model's own collectives use.

    Args:
        group: The ranks that must decide alike: a tensor-parallel or pipeline-parallel group, not
            the replicas of data parallelism. Best a group of gloo of their own
            (``new_group(ranks, backend="gloo")``), so that the GPU takes no part. It may
            be of NCCL. Default: all.

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
        """Return the largest of what the ranks give, value by value."""
        if self._is_alone:
            return list(values)
        with torch.cuda.stream(self._stream):  # without one it does nothing
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
    """Return where the group's collectives take their tensors from."""
    if dist.get_backend(group) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
