"""Chunk metadata: worked examples, bad input, and the work it is.

tests/property/test_chunk_metadata.py compares drawn batches with loops over their tokens.
"""

import numpy as np
import pytest
import torch
from work import lines_executed

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.metadata import compute_chunk_metadata, compute_varlen_chunk_metadata

INT32_MAX = 2**31 - 1


@pytest.mark.parametrize(
    ("starts", "computed", "chunk_size", "cut"),
    [
        ([0], [], 4, ([0], [], [])),
        ([0, INT32_MAX], [0], INT32_MAX, ([0, INT32_MAX], [0], [0])),
        ([0, 9], [INT32_MAX - 2], INT32_MAX, ([0, 2, 9], [0, 0], [1])),
    ],
)
def test_sequences_are_cut_from_their_own_starts(starts, computed, chunk_size, cut):
    given = np.array(starts), np.array(computed, dtype=np.int64)
    parts = compute_chunk_metadata(*given, chunk_size)
    assert tuple(part.tolist() for part in parts) == cut
    assert {part.dtype.name for part in parts} == {"int32"}
    assert [array.tolist() for array in given] == [starts, computed]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (np.array([], dtype=np.int64), "query_start_loc"),
        (np.array([1, 4]), "query_start_loc"),
        (np.array([0, 4, 3]), "query_start_loc"),
        (np.array([0, 4, 3], np.uint32), "query_start_loc"),
        (np.array([0.0, 4.0]), "query_start_loc"),
        (np.array([[0, 4]]), "query_start_loc"),
        (np.array([[0.0, 4.0]]), r"query_start_loc .*got float64, shape \(1, 2\)$"),
        (np.array([0, 2**31]), "at most 2147483647 tokens, got 2147483648"),
        (np.array([False, True]), "query_start_loc"),
        ([0, 4], r"query_start_loc .*got list, shape \(\)$"),
    ],
)
def test_bad_query_start_loc(starts, message):
    with pytest.raises(InvalidArgumentError, match=message):
        compute_chunk_metadata(starts, np.zeros(max(len(starts) - 1, 0), dtype=np.int64), 4)


@pytest.mark.parametrize(
    "computed", [np.array([]), np.array([1, 2]), np.array([-1]), np.array([0.5]), [1]]
)
def test_bad_num_computed_tokens(computed):
    with pytest.raises(InvalidArgumentError, match="num_computed_tokens"):
        compute_chunk_metadata(np.array([0, 4]), computed, 4)


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, True, None, 2**31, 10**30])
def test_bad_chunk_size(chunk_size):
    with pytest.raises(InvalidArgumentError, match=r"chunk_size must be an int in \[1, .*, got"):
        compute_chunk_metadata(np.array([0, 4]), np.array([0]), chunk_size)
    with pytest.raises(InvalidArgumentError, match=r"chunk_size must be an int in \[1, .*, got"):
        compute_varlen_chunk_metadata(torch.tensor([0, 4]), chunk_size)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.tensor([1, 4]), "query_start_loc"),
        (torch.tensor([0, 4, 3]), "query_start_loc"),
        (torch.tensor([0.0, 4.0], dtype=torch.bfloat16), "query_start_loc"),
        (torch.tensor([False, True]), "query_start_loc"),
        (torch.tensor(0), "query_start_loc"),
        (torch.tensor([], dtype=torch.int32), "query_start_loc"),
        (torch.tensor([[0, 4]]), r"query_start_loc .*got torch.int64, shape \(1, 2\)$"),
        (np.array([0, 4]), "query_start_loc"),
        ([0, 4], "query_start_loc"),
    ],
)
def test_bad_varlen_query_start_loc(starts, message):
    with pytest.raises(InvalidArgumentError, match=message):
        compute_varlen_chunk_metadata(starts, 4)


def test_a_thousand_long_sequences_take_no_more_steps_than_ten_short_ones(rng):
    def cut(count, length):
        starts, computed = np.arange(count + 1) * length, rng.integers(0, 10_000, count)
        return lines_executed(lambda: compute_chunk_metadata(starts, computed, 256))

    assert 0 < cut(10, 300) == cut(1024, 32_768)
    assert cut(2, 300) == cut(2, 32_768)
