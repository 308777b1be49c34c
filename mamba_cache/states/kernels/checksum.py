"""Checksums of tensors and of entries, without copies, as one Triton kernel."""

# Triton takes no annotations but its own, and names constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mamba_cache.states.kernels._launch import Launcher
from mamba_cache.states.kernels.checksum_torch import (
    LANES,
    MULTIPLIER,
    ROUND_BYTES,
    SEED,
    UNROLLED_ROUNDS,
    ChecksumPlan,
)

__all__ = ["NUM_WARPS", "checksum", "fetch_checksums"]

NUM_WARPS = 4  # two 16-byte loads for each thread and round, as in the copy of states
_LANES = tl.constexpr(LANES)
_ROUND_BYTES = tl.constexpr(ROUND_BYTES)
_UNROLLED_ROUNDS = tl.constexpr(UNROLLED_ROUNDS)
_SEED = tl.constexpr(SEED)
_MULTIPLIER = tl.constexpr(MULTIPLIER)
_WIDE_BYTES = tl.constexpr(16)
_FETCHED_SUMS = 1024  # for one program: the number of reads of host memory in flight


@triton.jit  # type: ignore[untyped-decorator]
def _shifted(value, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Shift to the right, filling with zeros: the words are signed."""
    return (value >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mixed(lanes, words):  # type: ignore[no-untyped-def]
    """Mix a round into the lanes."""
    # The shift comes before the product: a change of the highest bit alone, the sign of a float,
    # would go through the product as it is, and a second one could undo it.
    lanes = lanes ^ words
    return (lanes ^ _shifted(lanes, 32)) * _MULTIPLIER


@triton.jit
def _wide_words(address, num_bytes):  # type: ignore[no-untyped-def]
    """Read one round: ``LANES`` words, zero where there are no bytes."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), _WIDE_BYTES)
    index = tl.arange(0, _LANES)
    return tl.load(pointer + index, mask=index < tl.multiple_of(num_bytes // 8, 2), other=0)


@triton.jit
def _narrow_words(address, num_bytes):  # type: ignore[no-untyped-def]
    """Put words together byte by byte, as far as there are any, so that any address will do."""
    pointer = address.to(tl.pointer_type(tl.uint8))
    first = tl.arange(0, _LANES) * 8
    words = tl.zeros([_LANES], dtype=tl.int64)
    for byte in tl.static_range(8):
        piece = tl.load(pointer + first + byte, mask=first + byte < num_bytes, other=0)
        words = words | (piece.to(tl.int64) << (8 * byte))
    return words


@triton.jit
def _chunk_sum(address, num_bytes, is_wide):  # type: ignore[no-untyped-def]
    """Measure one chunk; ``is_wide``: address and bytes are multiples of 16."""
    lanes = (tl.arange(0, _LANES) + 1).to(tl.int64) * _SEED
    if is_wide != 0:
        for start in range(0, num_bytes, _UNROLLED_ROUNDS * _ROUND_BYTES):
            for number in tl.static_range(_UNROLLED_ROUNDS):
                first = start + number * _ROUND_BYTES
                lanes = _mixed(lanes, _wide_words(address + first, num_bytes - first))
    else:
        # Not unrolled: it would take the registers that the rest of the GPU needs.
        group = _UNROLLED_ROUNDS * _ROUND_BYTES
        for start in range(0, (num_bytes + group - 1) // group * group, _ROUND_BYTES):
            lanes = _mixed(lanes, _narrow_words(address + start, num_bytes - start))
    # The final mix of MurmurHash3 (Appleby, public domain), with another pair of odd constants.
    lanes = (lanes ^ _shifted(lanes, 33)) * _MULTIPLIER
    lanes = (lanes ^ _shifted(lanes, 29)) * _SEED
    return tl.sum(lanes ^ _shifted(lanes, 32), axis=0)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "first_entry", "num_work", "num_heads", "first_chunk", "stride", "num_chunks",
        "sums_start", "num_programs",
    ]
)  # fmt: skip
def _checksum_kernel(  # type: ignore[no-untyped-def]
    chunks,
    entries,
    changed,
    first_entry,
    num_work,
    num_heads,
    first_chunk,
    stride,
    num_chunks,
    sums_start,
    num_programs,
) -> None:
    # Each program walks through all chunks by steps: as many run as are launched, whatever there
    # is to do, so that the rest of the GPU is the forward's.
    for work in range(tl.program_id(0), num_work, num_programs):
        entry = entries + (first_entry + work // num_chunks).to(tl.int64) * 2
        number = (work % num_chunks).to(tl.int64)
        if number >= num_heads:
            number = first_chunk + (number - num_heads) * stride
        chunk = chunks + number * 4
        row = tl.load(entry + 1)
        address = tl.load(chunk) + tl.load(entry) * tl.load(chunk + 1)
        num_bytes, is_wide = tl.load(chunk + 2), tl.load(chunk + 3)
        where = (row + sums_start + 8 * number).to(tl.pointer_type(tl.int64))
        if changed is not None:
            expected = tl.load(where)  # perhaps across the link, while the bytes are read
            if _chunk_sum(address, num_bytes, is_wide) != expected:
                tl.store(changed + first_entry + work // num_chunks, 1)
        else:
            tl.store(where, _chunk_sum(address, num_bytes, is_wide))


_launch = Launcher(_checksum_kernel, runs_beside=True)


def checksum(
    plan: ChecksumPlan,
    entries: torch.Tensor,
    changed: torch.Tensor | None,
    which: slice,
    num_heads: int,
    others: range,
    programs: int,
) -> None:
    """Compute the twin's function without waiting for the device.

    Any change of one word changes the sum of its chunk; other changes are missed with a probability
    of about 2**-64. The sum depends on the order of words, but not on the tensor's address.
    """
    num_chunks = num_heads + len(others)
    num_work = (which.stop - which.start) * num_chunks
    if not num_work:
        return
    programs = min(programs, num_work)
    _launch(
        entries.get_device(),
        changed is None,
        (programs, 1, 1),
        plan.chunks,
        entries,
        changed,
        which.start,
        num_work,
        num_heads,
        others.start,
        others.step,
        num_chunks,
        plan.sums_start,
        programs,
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["first_entry", "num_sums", "sums_start"])  # type: ignore[untyped-decorator]
def _fetch_kernel(  # type: ignore[no-untyped-def]
    entries, sums, first_entry, num_sums, sums_start, BLOCK: tl.constexpr
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(entries + (first_entry + entry) * 2 + 1)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_one = index < num_sums
    found = tl.load((row + sums_start).to(tl.pointer_type(tl.int64)) + index, mask=is_one)
    tl.store(sums + entry * num_sums + index, found, mask=is_one)


_launch_fetch = Launcher(_fetch_kernel)


def fetch_checksums(
    plan: ChecksumPlan, entries: torch.Tensor, sums: torch.Tensor, which: slice
) -> None:
    """Copy checksums of entries from their rows, without waiting."""
    num_entries, num_sums = sums.shape
    if not sums.numel():
        return
    _launch_fetch(
        entries.get_device(),
        sums.data_ptr() % 16,
        (num_entries, triton.cdiv(num_sums, _FETCHED_SUMS), 1),
        entries,
        sums,
        which.start,
        num_sums,
        plan.sums_start,
        _FETCHED_SUMS,
        num_warps=NUM_WARPS,
    )
