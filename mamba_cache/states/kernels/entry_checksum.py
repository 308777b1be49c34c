"""Checksums of entries where they lie, and entries brought from host memory, as Triton kernels."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mamba_cache.states.kernels._launch import Launcher
from mamba_cache.states.kernels.checksum import (
    NUM_WARPS,
    chunk_sum,
    ended,
    mixed,
    narrow_words,
    seeds,
    store_narrow,
    store_wide,
    whole_rounds,
    wide_words,
)
from mamba_cache.states.kernels.checksum_plan import ROUND_BYTES, EntryPlan, EntryWork

__all__ = ["entry_checksums"]

_ROUND_BYTES = tl.constexpr(ROUND_BYTES)
_R1, _R2, _R3 = (tl.constexpr(number * ROUND_BYTES) for number in (1, 2, 3))
_WRITES = tl.constexpr(int(EntryWork.WRITE))
_BRINGS = tl.constexpr(int(EntryWork.BRING))


@triton.jit
def _brought_sum(source, target, num_bytes, is_wide):  # type: ignore[no-untyped-def]
    """Bring one chunk and measure it, each word as it came: nothing is read twice."""
    lanes = seeds()
    if is_wide != 0:
        for start in range(0, num_bytes, 4 * _ROUND_BYTES):
            one, two, three, four = start, start + _R1, start + _R2, start + _R3
            # All loads before the first store: what crosses the link is in flight together.
            words_1 = wide_words(source + one, num_bytes - one)
            words_2 = wide_words(source + two, num_bytes - two)
            words_3 = wide_words(source + three, num_bytes - three)
            words_4 = wide_words(source + four, num_bytes - four)
            store_wide(target + one, num_bytes - one, words_1)
            store_wide(target + two, num_bytes - two, words_2)
            store_wide(target + three, num_bytes - three, words_3)
            store_wide(target + four, num_bytes - four, words_4)
            lanes = mixed(mixed(mixed(mixed(lanes, words_1), words_2), words_3), words_4)
    else:
        for start in range(0, whole_rounds(num_bytes), _ROUND_BYTES):
            words = narrow_words(source + start, num_bytes - start)
            store_narrow(target + start, num_bytes - start, words)
            lanes = mixed(lanes, words)
    return ended(lanes)


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
    WORK: tl.constexpr,
) -> None:
    # Each program walks through all chunks by steps: as many run as are launched, whatever there
    # is to do, so that the rest of the GPU is the forward's.
    for work in range(tl.program_id(0), num_entries * num_chunks, num_programs):
        entry = entries + (first_entry + work // num_chunks).to(tl.int64) * 2
        number = (first_chunk + work % num_chunks).to(tl.int64)
        chunk = chunks + number * 5
        row = tl.load(entry + 1)
        address = tl.load(chunk) + tl.load(entry) * tl.load(chunk + 1)
        num_bytes, is_wide = tl.load(chunk + 2), tl.load(chunk + 3)
        where = (row + sums_start + 8 * number).to(tl.pointer_type(tl.int64))
        if WORK == _WRITES:
            tl.store(where, chunk_sum(address, num_bytes, is_wide))
        else:
            expected = tl.load(where)  # across the link, while the bytes are read
            if WORK == _BRINGS:
                total = _brought_sum(row + tl.load(chunk + 4), address, num_bytes, is_wide)
            else:
                total = chunk_sum(address, num_bytes, is_wide)
            if total != expected:
                tl.store(changed + first_entry + work // num_chunks, 1)


_launch = Launcher(_entries_kernel)


def entry_checksums(
    plan: EntryPlan,
    work: EntryWork,
    entries: torch.Tensor,
    changed: torch.Tensor,
    which: slice,
    chunks: slice,
    programs: int,
) -> None:
    """Write checksums of entries, compare them, or bring entries and compare. It does not wait.

    Args:
        plan: Where their chunks lie.
        work: What to do.
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
        work,
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
        int(work),
        num_warps=NUM_WARPS,
    )
