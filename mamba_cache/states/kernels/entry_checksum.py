"""Checksums of entries where they lie, as one Triton kernel on few multiprocessors."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mamba_cache.states.kernels._launch import Launcher
from mamba_cache.states.kernels.checksum import NUM_WARPS, chunk_sum
from mamba_cache.states.kernels.checksum_plan import EntryPlan

__all__ = ["entry_checksums"]


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "first_entry",
        "num_entries",
        "first_chunk",
        "num_chunks",
        "num_sums",
        "num_programs",
    ]
)
def _entries_kernel(  # type: ignore[no-untyped-def]
    chunks,
    places,
    sums,
    changed,
    first_entry,
    num_entries,
    first_chunk,
    num_chunks,
    num_sums,
    num_programs,
    COMPARES: tl.constexpr,
) -> None:
    # Each program walks through all chunks by steps: as many run as are launched, whatever there
    # is to do, so that the rest of the GPU is the forward's.
    for work in range(tl.program_id(0), num_entries * num_chunks, num_programs):
        entry = first_entry + work // num_chunks
        number = first_chunk + work % num_chunks
        chunk = chunks + number.to(tl.int64) * 4
        place = tl.load(places + entry).to(tl.int64)
        address = tl.load(chunk) + place * tl.load(chunk + 1)
        total = chunk_sum(address, tl.load(chunk + 2), tl.load(chunk + 3))
        where = sums + entry.to(tl.int64) * num_sums + number
        if COMPARES:
            if total != tl.load(where):
                tl.store(changed + entry, 1)
        else:
            tl.store(where, total)


_launch = Launcher(_entries_kernel)


def entry_checksums(
    plan: EntryPlan,
    places: torch.Tensor,
    sums: torch.Tensor,
    changed: torch.Tensor | None,
    entries: slice,
    chunks: slice,
    programs: int,
) -> None:
    """Write checksums of entries, or compare them with what is there. It does not wait.

    Args:
        plan: Where their chunks lie.
        places: [n] int32. Where they lie.
        sums: [n, num_chunks] int64, contiguous as the others. Written, or compared.
        changed: [n] int32; becomes 1 for each that has another one than is there. None: write.
        entries: Which of the n.
        chunks: Which chunks of each.
        programs: At most so many are launched.
    """
    num_entries, num_chunks = entries.stop - entries.start, chunks.stop - chunks.start
    programs = min(programs, num_entries * num_chunks)
    if not programs:
        return
    _launch(
        sums.get_device(),
        changed is not None,
        (programs, 1, 1),
        plan.chunks,
        places,
        sums,
        places if changed is None else changed,
        entries.start,
        num_entries,
        chunks.start,
        num_chunks,
        plan.chunks.shape[0],
        programs,
        changed is not None,
        num_warps=NUM_WARPS,
    )
