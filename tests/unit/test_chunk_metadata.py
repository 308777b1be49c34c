"""Chunk metadata: worked examples, bad input, and the work it is."""

import numpy as np
import pytest
import torch
from work import lines_executed

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.metadata import compute_chunk_metadata, compute_varlen_chunk_metadata


def cut(query_start_loc, num_computed_tokens, chunk_size):
    starts = np.array(query_start_loc, dtype=np.int32)
    computed = np.array(num_computed_tokens, dtype=np.int32)
    return [part.tolist() for part in compute_chunk_metadata(starts, computed, chunk_size)]


def test_resumed_sequence_finishes_its_started_chunk_first():
    # 3 tokens are behind it: one more ends the chunk, then 4, then the rest.
    assert cut([0, 7], [3], 4) == [[0, 1, 5, 7], [0, 0, 0], [2]]


def test_started_chunk_may_stay_unfinished():
    assert cut([0, 2], [1], 8) == [[0, 2], [0], [0]]


def test_fresh_sequence_is_cut_from_its_own_start():
    assert cut([0, 3, 9], [0, 0], 4) == [[0, 3, 7, 9], [0, 1, 1], [0, 2]]


def test_chunks_are_numbered_over_the_packed_batch_not_per_request():
    _, chunk_seq_idx, last = cut([0, 8, 16, 21], [0, 4, 2], 4)
    assert last == [1, 3, 5]
    assert [chunk_seq_idx[index] for index in last] == [0, 1, 2]


def test_empty_sequence_has_no_chunk():
    assert cut([0, 0, 5, 5], [2, 0, 9], 4) == [[0, 4, 5], [1, 1], [-1, 1, -1]]


def test_no_sequences():
    assert cut([0], [], 4) == [[0], [], []]


def test_varlen_cuts_at_packed_positions():
    cu_chunk_seqlens, last_chunk_indices, seq_idx_chunks = compute_varlen_chunk_metadata(
        torch.tensor([0, 3, 3, 10]), 4
    )
    assert cu_chunk_seqlens.tolist() == [0, 3, 4, 8, 10]
    assert last_chunk_indices.tolist() == [0, -1, 3]
    assert seq_idx_chunks.tolist() == [0, 2, 2, 2]


def test_varlen_of_no_tokens():
    parts = compute_varlen_chunk_metadata(torch.tensor([0]), 4)
    assert [part.tolist() for part in parts] == [[0], [], []]


def test_results_are_int32():
    starts = np.array([0, 5, 9])
    assert {p.dtype.name for p in compute_chunk_metadata(starts, starts[:2], 4)} == {"int32"}
    parts = compute_varlen_chunk_metadata(torch.from_numpy(starts), 4)
    assert {(part.dtype, part.device.type) for part in parts} == {(torch.int32, "cpu")}


def test_inputs_are_not_changed():
    starts, computed = np.array([0, 5, 9]), np.array([3, 1])
    compute_chunk_metadata(starts, computed, 4)
    assert (starts.tolist(), computed.tolist()) == ([0, 5, 9], [3, 1])


def test_a_batch_may_have_as_many_tokens_as_int32_counts():
    most = 2**31 - 1
    assert cut([0, most], [0], most) == [[0, most], [0], [0]]


def test_position_in_a_sequence_may_pass_int32():
    assert cut([0, 9], [2**31 - 3], 2**31 - 1) == [[0, 2, 9], [0, 0], [1]]


@pytest.mark.parametrize(
    "starts",
    [
        np.array([], dtype=np.int64),
        np.array([1, 4]),
        np.array([0, 4, 3]),
        np.array([0, 4, 3], np.uint32),
        np.array([0.0, 4.0]),
        np.array([[0, 4]]),
        np.array([0, 2**31]),
        np.array([False, True]),
        [0, 4],
    ],
)
def test_bad_query_start_loc(starts):
    with pytest.raises(InvalidArgumentError):
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
    "starts",
    [
        torch.tensor([1, 4]),
        torch.tensor([0, 4, 3]),
        torch.tensor([0.0, 4.0], dtype=torch.bfloat16),
        torch.tensor([False, True]),
        torch.tensor(0),
        torch.tensor([], dtype=torch.int32),
        np.array([0, 4]),
        [0, 4],
    ],
)
def test_bad_varlen_query_start_loc(starts):
    with pytest.raises(InvalidArgumentError, match="query_start_loc"):
        compute_varlen_chunk_metadata(starts, 4)


def test_errors_name_the_dtype_and_the_shape_or_the_type():
    with pytest.raises(InvalidArgumentError, match=r"got float64, shape \(1, 2\)$"):
        compute_chunk_metadata(np.array([[0.0, 4.0]]), np.array([0]), 4)
    with pytest.raises(InvalidArgumentError, match=r"got list, shape \(\)$"):
        compute_chunk_metadata([0, 4], np.array([0]), 4)
    with pytest.raises(InvalidArgumentError, match=r"got torch.int64, shape \(1, 2\)$"):
        compute_varlen_chunk_metadata(torch.tensor([[0, 4]]), 4)
    with pytest.raises(InvalidArgumentError, match=r"got list, shape \(\)$"):
        compute_varlen_chunk_metadata([0, 4], 4)


def test_a_thousand_long_sequences_take_no_more_steps_than_ten_short_ones(rng):
    def cut(count, length):
        starts, computed = np.arange(count + 1) * length, rng.integers(0, 10_000, count)
        return lines_executed(lambda: compute_chunk_metadata(starts, computed, 256))

    assert 0 < cut(10, 300) == cut(1024, 32_768)
    assert cut(2, 300) == cut(2, 32_768)
