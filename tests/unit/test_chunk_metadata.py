"""Chunk metadata: the largest numbers, bad input, and its cost.

tests/property/test_chunk_metadata.py compares drawn batches with loops over their tokens.
"""

import numpy as np
import pytest
import torch
from work import lines_executed

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.metadata import compute_chunk_metadata, compute_varlen_chunk_metadata

INT32_MAX = 2**31 - 1
NONE = np.zeros(1, dtype=np.int64)


@pytest.mark.parametrize(
    ("starts", "computed", "chunk_size", "cut"),
    [
        # 3 tokens precede the sequence: one more ends the chunk, then 4, then the rest.
        ([0, 7], [3], 4, ([0, 1, 5, 7], [0, 0, 0], [2])),
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


BAD_STARTS = [
    np.array([], dtype=np.int64), np.array([1, 4]), np.array([0, 4, 3]), np.array([False, True]),
    np.array([0.0, 4.0]), np.array([[0, 4]]), [0, 4],
]  # fmt: skip
REFUSED = [
    *[(compute_chunk_metadata, (starts, NONE, 4), "query_start_loc") for starts in BAD_STARTS],
    (compute_chunk_metadata, (np.array([0, 4, 3], np.uint32), NONE, 4), "query_start_loc"),
    (
        compute_chunk_metadata,
        (np.array([[0.0, 4.0]]), NONE, 4),
        r"query_start_loc .*got float64, shape \(1, 2\)$",
    ),
    (compute_chunk_metadata, ([0, 4], NONE, 4), r"query_start_loc .*got list, shape \(\)$"),
    (compute_chunk_metadata, (np.array([0, 2**31]), NONE, 4), "2147483647 tokens, got 2147483648"),
    *[
        (compute_chunk_metadata, (np.array([0, 4]), computed, 4), "num_computed_tokens")
        for computed in (
            np.array([]), np.array([1, 2]), np.array([-1]), np.array([0.5]), [1],
        )
    ],
    *[
        (compute_varlen_chunk_metadata, (torch.from_numpy(starts), 4), "query_start_loc")
        for starts in BAD_STARTS[:-1]
    ],
    *[
        (compute_varlen_chunk_metadata, (starts, 4), "query_start_loc must be a 1-D")
        for starts in (*BAD_STARTS[-2:], torch.tensor(0), torch.tensor([0.0, 4.0]).bfloat16())
    ],
    *[
        (compute, (*starts, chunk_size), r"chunk_size must be an int in \[1, .*, got")
        for chunk_size in (0, -1, 2.0, True, None, 2**31, 10**30)
        for compute, starts in (
            (compute_chunk_metadata, (np.array([0, 4]), NONE)),
            (compute_varlen_chunk_metadata, (torch.tensor([0, 4]),)),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("call", "arguments", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_batches_are_refused(call, arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        call(*arguments)


def test_a_thousand_long_sequences_take_no_more_steps_than_ten_short_ones(rng):
    def cut(count, length):
        starts, computed = np.arange(count + 1) * length, rng.integers(0, 10_000, count)
        return lines_executed(lambda: compute_chunk_metadata(starts, computed, 256))

    assert 0 < cut(10, 300) == cut(1024, 32_768)
    assert cut(2, 300) == cut(2, 32_768)
