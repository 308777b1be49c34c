"""Ranks that hold shards of the same states: they agree at the start, and prove it on the way.

Tensor-parallel ranks keep different heads and channels of the same states, so each must decide
alike: the same slots for the same blocks, the same evictions. On the GPU nothing is exchanged to
bring that about: decisions depend on the calls alone, so ranks that make the same calls decide
alike. What lies in tiers below the GPU differs, so ranks agree on what they resume from there, by
``GroupAgreement``. ``DivergenceGuard`` notices if they have diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mamba_cache._checks import check_int
from mamba_cache.errors import DivergenceError, InvalidArgumentError, StepOrderError

__all__ = ["DivergenceGuard", "Fingerprinted", "GroupAgreement", "agree_on_num_slots"]


class Fingerprinted(Protocol):
    """What can be compared between ranks: a context or a slot allocator."""

    def fingerprint(self) -> int:
        """Digests all that decides what happens next, from 0 to 2**63 - 1."""
        ...


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
        group: The ranks that must decide alike, as in ``DivergenceGuard``; best a group of gloo of
            their own (``new_group(ranks, backend="gloo")``), so that the GPU takes no part. It may
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


class DivergenceGuard:
    """Raises on every rank once the ranks have decided differently.

    Every rank of the group calls ``check`` at the same point of each step. Fingerprints are sent
    at one call and compared at the next, so neither the CPU nor the GPU waits for the exchange. If
    a rank does not call, the others wait in their next comparison until the process group's own
    timeout, which ``torch.distributed.init_process_group`` or ``new_group`` sets.

    Args:
        watched: The rank's context, or its slot allocator.
        group: The ranks that must decide alike: a tensor-parallel or pipeline-parallel group, not
            the replicas of data parallelism. Default: all. It may be of gloo or of NCCL.
        every: A divergence raises at the latest in this many steps, that of its cause included.
            With 1 each call waits for the exchange.

    Raises:
        InvalidArgumentError: ``every`` is not an int >= 1, or ``watched`` is a context with tiers
            below the GPU, there are several ranks, and it was made without ``agreement``: what
            has arrived in a tier is not the same on all ranks at a time, so they would resume at
            different boundaries.
        StepOrderError: ``torch.distributed`` is not initialised.
    """

    def __init__(
        self, watched: Fingerprinted, group: dist.ProcessGroup | None = None, *, every: int = 16
    ) -> None:
        check_int("every", every, minimum=1)
        _check_initialised()
        # Slot allocators have no tiers.
        tier_stats: Sequence[Any] = getattr(watched, "tier_stats", tuple)()
        is_alone = dist.get_world_size(group) == 1
        if tier_stats and not is_alone and getattr(watched, "agreement", None) is None:
            names = ", ".join(stats.name for stats in tier_stats)
            raise InvalidArgumentError(
                f"several ranks have tiers ({names}) and do not agree on what has arrived in them, "
                "so they would resume at different boundaries: make each rank's context with "
                "agreement=GroupAgreement(group)"
            )
        self._watched = watched
        self._group = group
        self._waits = every == 1
        # One step less between two exchanges than it may take: the comparison is one step later.
        self._period = max(every - 1, 1)
        self._num_steps = 0
        self._under_way: tuple[Callable[[], object], torch.Tensor] | None = None

    def check(self) -> None:
        """End a step: send this rank's fingerprint or compare those sent before, as is due.

        Raises:
            DivergenceError: The ranks' fingerprints differed. Every rank raises it in the same
                step, and what they hold should not be used any more.
        """
        self._compare()
        self._num_steps += 1
        if self._num_steps % self._period == 0:
            self._under_way = _start_gather(self._watched.fingerprint(), self._group)
            if self._waits:
                self._compare()

    def _compare(self) -> None:
        """Wait for fingerprints under way, which were sent in the latest step."""
        if self._under_way is None:
            return
        wait, received = self._under_way
        self._under_way = None
        wait()
        fingerprints = received.tolist()
        if len(set(fingerprints)) > 1:
            raise DivergenceError(self._num_steps, fingerprints)


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


def _start_gather(
    value: int, group: dist.ProcessGroup | None
) -> tuple[Callable[[], object], torch.Tensor]:
    """Start to send a value to all ranks.

    Returns:
        A function that waits until the values of all ranks have come, and [num_ranks] int64 on
        the CPU, where they are then.
    """
    sent = torch.tensor([value], dtype=torch.int64, device="cpu")
    received = torch.empty(dist.get_world_size(group), dtype=torch.int64, device="cpu")
    device = _device(group)
    if device.type == "cuda":
        return _start_gather_on_gpu(sent.pin_memory(), received.pin_memory(), device, group)
    parts = list(received.chunk(len(received)))
    work = dist.all_gather(parts, sent, group=group, async_op=True)
    return work.wait, received


def _start_gather_on_gpu(
    sent: torch.Tensor,
    received: torch.Tensor,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[Callable[[], object], torch.Tensor]:
    """Do the same through a GPU, on a stream that waits for no work of the model."""
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        gathered = torch.empty_like(received, device=device)
        on_gpu = sent.to(device, non_blocking=True)
        work = dist.all_gather(
            list(gathered.chunk(len(gathered))), on_gpu, group=group, async_op=True
        )
        work.wait()  # makes the stream wait, not this thread
        received.copy_(gathered, non_blocking=True)
        arrived.record()
    return arrived.synchronize, received
