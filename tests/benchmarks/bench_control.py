"""Times the control plane: blocks, slots, hashes, admission. No state is copied, no model runs.

All of it is single-threaded Python, so each figure holds for one core.

    python tests/benchmarks/bench_control.py --json control.json
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from measuring import Measurement, median_us, parser_for, progress, report

from mamba_cache.cache import BlockHashes, KVBlockAllocator, compute_block_hashes
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.metadata import compute_chunk_metadata
from mamba_cache.reference.no_model import NoModel, count_as_computed
from mamba_cache.slots import MambaSlotAllocator

_POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000)
_CHAIN_TOKENS = 131_072
_CHAIN_BLOCKS = (256, 16)
_SEQUENCE_BLOCKS = 16


def measure_evict_and_allocate(
    pool_sizes: Sequence[int] = _POOL_SIZES, *, num_blocks: int = 4, runs: int = 2_000
) -> Iterator[Measurement]:
    """Time allocating and freeing blocks of a full cache, per number of cached blocks."""
    medians = []
    for size in pool_sizes:
        progress(f"evict and allocate {num_blocks} of {size:,} cached blocks")
        medians.append(_evict_and_allocate_us(size, num_blocks, runs))
        name = f"evict and allocate {num_blocks} of {size:,} cached KV blocks"
        yield Measurement(name, medians[-1], "us", runs=runs)
    ratio = medians[-1] / medians[0]
    name = f"the same, {pool_sizes[-1]:,} blocks over {pool_sizes[0]:,}"
    yield Measurement(name, ratio, "x", runs=runs)


def measure_hash_chain(
    num_tokens: int = _CHAIN_TOKENS, *, runs: int = 200
) -> Iterator[Measurement]:
    """Time ``compute_block_hashes`` against a plain SHA-256 chain over the same int32 tokens."""
    tokens = np.random.default_rng().integers(0, 2**31, num_tokens, dtype=np.int32)
    for block_size in _CHAIN_BLOCKS:
        progress(f"hash {num_tokens:,} tokens in blocks of {block_size}")
        own = median_us(partial(compute_block_hashes, tokens, block_size), runs=runs)
        plain = median_us(partial(_sha256_chain, tokens, block_size), runs=runs)
        yield Measurement(
            f"hash chain of {num_tokens:,} tokens, block {block_size}, time over SHA-256",
            own / plain,
            "x",
            runs=runs,
            detail=f"{own:,.0f} us, SHA-256 {plain:,.0f} us",
        )


def measure_allocate_slots(
    pool_sizes: Sequence[int] = _POOL_SIZES[1:], *, max_slots: int = 2_000, runs: int = 2_000
) -> Iterator[Measurement]:
    """Time assigning slots to three blocks when all slots are taken, per size of the KV pool."""
    for size in pool_sizes:
        progress(f"allocate 3 of {max_slots:,} slots over {size:,} KV blocks")
        yield Measurement(
            f"evict and allocate 3 of {max_slots:,} slots, {size:,} KV blocks",
            _allocate_slots_us(size, max_slots, runs),
            "us",
            runs=runs,
        )


def measure_admission(num_tokens: int = 32_768, *, runs: int = 500) -> Iterator[Measurement]:
    """Time ``add_request`` of a hashed prompt of which every block is cached."""
    progress(f"admit a cached prompt of {num_tokens:,} tokens")
    block_size = 256
    context = DynamicInferenceContext(
        CacheConfig(
            block_size_tokens=block_size,
            max_requests=2,
            max_tokens=num_tokens + 1,
            max_sequence_length=2 * num_tokens,
            num_kv_blocks=4 * num_tokens // block_size,
            max_slots=8,
        ),
        NoModel().state_spec(torch.float32),
    )
    tokens = np.random.default_rng().integers(0, 2**31, num_tokens + 1, dtype=np.int32)
    prepared = context.prepare(Request(request_id=0, prompt_tokens=tokens))
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        admission = context.add_request(prepared)
        seconds.append(time.perf_counter() - start)
        count_as_computed(context, context.begin_step().metadata)
        context.commit_step({0: 0})
        context.finish(0)
    assert admission.skip_tokens == num_tokens
    yield Measurement(
        f"add_request of a cached {num_tokens:,}-token prompt, block {block_size}, hashed before",
        statistics.median(seconds[1:]) * 1e6,
        "us",
        runs=runs,
    )


def measure_chunk_metadata(
    num_sequences: int = 1_024, length: int = 32_768, *, runs: int = 20
) -> Iterator[Measurement]:
    """Time cutting a batch of long sequences into the chunks of SSD kernels."""
    progress(f"chunks of {num_sequences:,} sequences of {length:,} tokens")
    starts = np.arange(num_sequences + 1) * length
    computed = np.random.default_rng().integers(0, length, num_sequences)
    yield Measurement(
        f"chunk metadata of {num_sequences:,} sequences of {length:,} tokens, chunks of 256",
        median_us(partial(compute_chunk_metadata, starts, computed, 256), runs=runs),
        "us",
        runs=runs,
    )


MEASUREMENTS: tuple[Callable[[], Iterator[Measurement]], ...] = (
    measure_evict_and_allocate,
    measure_allocate_slots,
    measure_hash_chain,
    measure_admission,
    measure_chunk_metadata,
)
"""The measurements of ``control``, in order."""


def _evict_and_allocate_us(pool_size: int, num_blocks: int, runs: int) -> float:
    pool = _full_cache(pool_size)
    seconds = []
    for _ in range(runs):
        hashes = _fresh_hashes(num_blocks)
        start = time.perf_counter()
        block_ids = pool.allocate_memory_blocks(num_blocks)
        allocated = time.perf_counter()
        pool.register_kv_block_hashes(block_ids, hashes)
        registered = time.perf_counter()
        pool.release_memory_blocks(block_ids)
        seconds.append(time.perf_counter() - registered + allocated - start)
    assert pool.evicted_blocks_total == runs * num_blocks
    return statistics.median(seconds) * 1e6


def _full_cache(num_blocks: int) -> KVBlockAllocator:
    """Return a pool in which every block is cached, in sequences of 16 blocks."""
    pool = KVBlockAllocator(num_blocks + 1)
    block_ids = pool.allocate_memory_blocks(num_blocks)
    for start in range(0, num_blocks, _SEQUENCE_BLOCKS):
        sequence = block_ids[start : start + _SEQUENCE_BLOCKS]
        pool.register_kv_block_hashes(sequence, _fresh_hashes(len(sequence)))
        pool.release_memory_blocks(sequence)
    return pool


def _allocate_slots_us(pool_size: int, max_slots: int, runs: int) -> float:
    rng = np.random.default_rng()
    kv_blocks = SimpleNamespace(
        pool_size=pool_size,
        block_ref_counts=np.zeros(pool_size, np.int32),
        block_timestamps=rng.permutation(pool_size),
        block_hashes=np.full(pool_size, -1),
    )
    slots = MambaSlotAllocator(
        # Any: only the fields that these calls read.
        cast(Any, SimpleNamespace(max_requests=1, kv_block_allocator=kv_blocks, device="cpu")),
        max_slots,
        1,
        (1,),
        (1,),
        torch.float32,
        torch.float32,
    )
    slots.allocate_slots_batch(range(max_slots))
    seconds = []
    for _ in range(runs):
        bare = np.flatnonzero(slots.block_to_slot[: 2 * max_slots] < 0)
        block_ids = rng.choice(bare, 3, replace=False).tolist()
        start = time.perf_counter()
        slots.allocate_slots_batch(block_ids)
        seconds.append(time.perf_counter() - start)
    assert slots.evicted_slots_total == 3 * runs
    return statistics.median(seconds) * 1e6


def _fresh_hashes(num_blocks: int) -> BlockHashes:
    return BlockHashes([os.urandom(16) for _ in range(num_blocks)])


def _sha256_chain(tokens: npt.NDArray[np.int32], block_size_tokens: int) -> list[bytes]:
    data = tokens.data.cast("B")
    step = block_size_tokens * tokens.itemsize
    parent = bytes(32)
    digests = []
    for start in range(0, len(data), step):
        parent = hashlib.sha256(parent + data[start : start + step]).digest()
        digests.append(parent)
    return digests


if __name__ == "__main__":
    options = parser_for(__doc__).parse_args()
    measured = [one for measure in MEASUREMENTS for one in measure()]
    report("control", measured, options.json)
