"""Checksums of entries where they lie, as a Triton kernel."""

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
        "sums_start",
        "num_programs",
    ]
)
def _entries_kernel(  # type: ignore[no-untyped-def]
    chunks,
    entries,
    changed,
    first_entry,
    num_entries,
    first_chunk,
    num_chunks,
    sums_start,
    num_programs,
    COMPARES: tl.constexpr,
) -> None:
    # Each program walks through all chunks by steps: as many run as are launched, whatever there
    # is to do, so that the rest of the GPU is the forward's.
    for work in range(tl.program_id(0), num_entries * num_chunks, num_programs):
        entry = entries + (first_entry + work // num_chunks).to(tl.int64) * 2
        number = (first_chunk + work % num_chunks).to(tl.int64)
        chunk = chunks + number * 4
        row = tl.load(entry + 1)
        address = tl.load(chunk) + tl.load(entry) * tl.load(chunk + 1)
        num_bytes, is_wide = tl.load(chunk + 2), tl.load(chunk + 3)
        where = (row + sums_start + 8 * number).to(tl.pointer_type(tl.int64))
        if COMPARES:
            expected = tl.load(where)  # across the link, while the bytes are read
            if chunk_sum(address, num_bytes, is_wide) != expected:
                tl.store(changed + first_entry + work // num_chunks, 1)
        else:
            tl.store(where, chunk_sum(address, num_bytes, is_wide))


_launch = Launcher(_entries_kernel)


def entry_checksums(
    plan: EntryPlan,
    compares: bool,
    entries: torch.Tensor,
    changed: torch.Tensor,
    which: slice,
    chunks: slice,
    programs: int,
) -> None:
    """Write checksums of entries to their rows, or compare with those there. It does not wait.

    Args:
        plan: Where their chunks lie.
        compares: Whether to compare.
        entries: [n, 2] int64. The place of each, and the address of its row, which the device can
            read and write.
        changed: [n] int32; becomes 1 for each that has another checksum than stands in its row.
            Any tensor of the device if they are written.
        which: Which of the n.
        chunks: Which chunks of each.
        programs: At most so many are launched.
    """
    num_entries, num_chunks = which.stop - which.start, chunks.stop - chunks.start
    programs = min(programs, num_entries * num_chunks)
    if not programs:
        return
    _launch(
        entries.get_device(),
        compares,
        (programs, 1, 1),
        plan.chunks,
        entries,
        changed,
        which.start,
        num_entries,
        chunks.start,
        num_chunks,
        plan.sums_start,
        programs,
        compares,
        num_warps=NUM_WARPS,
    )
