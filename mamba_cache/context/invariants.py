"""Proofs that the requests of a context and the slots that they use agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from mamba_cache.context.requests import ActiveRequest, Checkpoint, RequestStatus
from mamba_cache.errors import InvariantError
from mamba_cache.slots import MambaSlotAllocator, SlotLease, SlotPool

__all__ = ["check_pinned", "check_requests", "check_states_of_blocks"]


def check_states_of_blocks(slots: SlotPool) -> None:
    """Prove that each state that is findable by a hash lies beside the block of that hash."""
    stale = slots.stale_blocks()
    if stale:
        raise InvariantError(f"blocks {stale[:8]} have states of what they held before")


def check_requests(
    requests: Iterable[ActiveRequest],
    in_step: Collection[ActiveRequest],
    slots: MambaSlotAllocator,
    pinned: Sequence[SlotLease] = (),
) -> None:
    """Prove that chunks are those of the requests to be computed, and slots those of chunks."""
    running = set(in_step)
    planned: list[Checkpoint] = []
    for active in requests:
        is_in_step = active in running
        if active.status is RequestStatus.DECODING:
            _check_decoding(active, is_in_step=is_in_step)
        else:
            _check_chunk(active, is_in_step=is_in_step)
        planned += active.checkpoints
    _check_reserved(planned, slots)
    chunks = [active.chunk for active in requests if active.chunk is not None]
    read = [chunk.lease for chunk in chunks if chunk.lease is not None]
    check_pinned([*read, *pinned], slots)


def _check_decoding(active: ActiveRequest, *, is_in_step: bool) -> None:
    # The first token after a prompt may be known to the device alone.
    if active.chunk is not None or active.num_tokens - active.num_computed not in (0, 1):
        raise InvariantError(
            f"request {active.request_id!r} decodes, with {active.num_tokens} tokens of which "
            f"{active.num_computed} are computed, and chunk {active.chunk}"
        )
    if active.checkpoint is not None and not (is_in_step or active.num_in_doubt):
        raise InvariantError(
            f"request {active.request_id!r} is in no step, but has {active.checkpoint}"
        )


def _check_chunk(active: ActiveRequest, *, is_in_step: bool) -> None:
    is_due = is_in_step or active.status is RequestStatus.SCHEDULED
    if (active.chunk is not None) != is_due:
        raise InvariantError(
            f"request {active.request_id!r} is {active.status.value} with chunk {active.chunk}"
        )
    if active.chunk is not None and active.chunk.start != active.num_computed:
        raise InvariantError(
            f"request {active.request_id!r} has computed {active.num_computed} tokens, but its "
            f"chunk begins at {active.chunk.start}"
        )


def _check_reserved(planned: Sequence[Checkpoint], slots: MambaSlotAllocator) -> None:
    current = [checkpoint.slot for checkpoint in planned]
    reserved = slots.reserved.keys()
    if len(set(current)) < len(current) or set(current) != reserved:
        raise InvariantError(
            f"slots {sorted(reserved)} are reserved, but chunks plan for {sorted(current)}"
        )


def check_pinned(leases: Sequence[SlotLease], slots: SlotPool) -> None:
    """Prove that slots are pinned by just these leases."""
    read = Counter(lease.slot for lease in leases if slots.is_current(lease))
    pins = slots.pin_counts
    pinned = [slot for slot in np.flatnonzero(pins).tolist() if slot not in slots.reserved]
    if read != {slot: pins.item(slot) for slot in pinned}:
        raise InvariantError(f"slots {pinned} are pinned, but {sorted(read)} are read")
