"""Chunk metadata compared with plain-Python oracles that walk the tokens one by one."""

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mamba_cache.metadata import compute_chunk_metadata, compute_varlen_chunk_metadata

CHUNK_SIZES = st.integers(1, 20)
INT_DTYPES = st.sampled_from(["int32", "int64"])
SEQUENCES = st.tuples(st.integers(0, 60), st.integers(0, 60))
# Each sequence: preceding tokens, own tokens. Few sequences are cut in a loop, many as arrays.
BATCHES = st.lists(SEQUENCES, max_size=8) | st.lists(SEQUENCES, min_size=9, max_size=12)


def walk(query_start_loc, phases, chunk_size):
    """Open a chunk at each sequence's start and at each multiple of the chunk size."""
    starts, sequences, last = [], [], []
    for sequence, phase in enumerate(phases):
        first, end = query_start_loc[sequence], query_start_loc[sequence + 1]
        for token in range(first, end):
            if token == first or (phase + token - first) % chunk_size == 0:
                starts.append(token)
                sequences.append(sequence)
        last.append(len(starts) - 1 if end > first else -1)
    return [*starts, query_start_loc[-1]], sequences, last


def prefix_sums(lengths):
    return [sum(lengths[:count]) for count in range(len(lengths) + 1)]


@given(BATCHES, CHUNK_SIZES, INT_DTYPES)
@example([(3, 1), (0, 0), (5, 4), (4, 4)], 4, "int32")
def test_own_grid_equals_walk(batch, chunk_size, dtype):
    computed = [before for before, _ in batch]
    starts = prefix_sums([length for _, length in batch])
    parts = compute_chunk_metadata(np.array(starts, dtype), np.array(computed, dtype), chunk_size)
    assert tuple(part.tolist() for part in parts) == walk(starts, computed, chunk_size)


@given(BATCHES, CHUNK_SIZES, INT_DTYPES)
@example([(0, 4), (0, 0), (0, 1), (0, 11)], 4, "int32")
def test_packed_grid_equals_walk(batch, chunk_size, dtype):
    starts = prefix_sums([length for _, length in batch])
    cu_chunk_seqlens, last_chunk_indices, seq_idx_chunks = compute_varlen_chunk_metadata(
        torch.tensor(starts, dtype=getattr(torch, dtype)), chunk_size
    )
    expected = walk(starts, starts[:-1], chunk_size)
    given_parts = (cu_chunk_seqlens, seq_idx_chunks, last_chunk_indices)
    assert tuple(part.tolist() for part in given_parts) == expected


@given(st.integers(0, 200), st.integers(0, 200), CHUNK_SIZES)
def test_stopping_at_a_chunk_boundary_changes_no_chunk(computed, length, chunk_size):
    """A hit computes the same chunks as a miss; exact restores depend on this."""
    whole, _, _ = compute_chunk_metadata(
        np.array([0, computed + length]), np.array([0]), chunk_size
    )
    resumed_at = computed // chunk_size * chunk_size
    resumed, _, _ = compute_chunk_metadata(
        np.array([0, computed + length - resumed_at]), np.array([resumed_at]), chunk_size
    )
    assert [cut for cut in whole.tolist() if cut >= resumed_at] == (resumed + resumed_at).tolist()
