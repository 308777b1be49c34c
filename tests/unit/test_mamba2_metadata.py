"""Metadata of Mamba2 layers from an engine's batch.

``compute_chunk_metadata`` cuts the chunks; tests/property/test_chunk_metadata.py compares it with
loops.
"""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.integrations.vllm import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
    MambaSpec,
)
from mamba_cache.metadata import compute_chunk_metadata

CHUNK, COLUMN, NUM_COLUMNS = 8, 6, 20


def make_builder(chunk_size=CHUNK, *, mode="none", num_drafts=0, column=COLUMN, device="cpu"):
    spec = MambaSpec(
        block_size=column,
        num_speculative_blocks=num_drafts,
        shapes=(),
        dtypes=(),
        mamba_cache_mode=mode,
    )
    config = SimpleNamespace(model_config=SimpleNamespace(get_mamba_chunk_size=lambda: chunk_size))
    builder = Mamba2AttentionBackend.get_builder_cls()
    assert builder is Mamba2AttentionMetadataBuilder
    return builder(spec, ["mamba.0"], config, device)


def make_batch(computed, lengths, rng):
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    computed = torch.tensor(computed, dtype=torch.int32)
    table = rng.permutation(len(lengths) * NUM_COLUMNS).reshape(-1, NUM_COLUMNS)
    return SimpleNamespace(
        num_reqs=len(lengths),
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        num_computed_tokens_cpu=computed,
        seq_lens=computed + starts.diff(),
        block_table_tensor=torch.from_numpy(table).int(),
    )


def cut(computed, lengths, chunk_size):
    starts = np.array([0, *np.cumsum(lengths)], dtype=np.int64)
    parts = compute_chunk_metadata(starts, np.array(computed, dtype=np.int64), chunk_size)
    return tuple(part.tolist() for part in parts)


SEQUENCES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(SEQUENCES, st.integers(1, 9))
def test_chunks_of_resumed_and_empty_sequences(sequences, chunk_size):
    """An engine's buffers have room for more prefills; entries past the batch are unused."""
    computed, lengths = [[s[i] for s in sequences] for i in (0, 1)]
    got = make_builder(chunk_size)._compute_chunk_metadata(
        len(sequences),
        torch.tensor([*computed, -7]).int(),
        torch.tensor([0, *np.cumsum(lengths), 5]).int(),
    )
    assert all(type(values) is list for values in got)
    assert got == cut(computed, lengths, chunk_size)


@given(
    st.lists(st.integers(1, 60), max_size=4),
    st.lists(st.tuples(st.integers(0, 40), st.integers(2, 30)), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_prefills_come_after_decodes(decodes, prefills, seed):
    """SGLang 31833: chunks are numbered over the packed batch."""
    computed = [*decodes, *(first for first, _ in prefills)]
    lengths = [*([1] * len(decodes)), *(length for _, length in prefills)]
    batch = make_batch(computed, lengths, np.random.default_rng(seed))
    metadata = make_builder().build(0, batch)
    assert type(metadata) is Mamba2AttentionMetadata
    counts = (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_reqs)
    assert counts == (len(decodes), len(decodes), len(lengths))
    assert metadata.num_prefills == len(prefills)
    assert metadata.num_prefill_tokens == sum(length for _, length in prefills)
    assert metadata.prep_initial_states == any(first for first, _ in prefills)
    assert metadata.chunk_size == CHUNK
    assert torch.equal(metadata.state_indices_tensor, batch.block_table_tensor[:, 0])
    if not prefills:
        assert metadata.query_start_loc_p is metadata.cu_chunk_seqlen_p is None
        return
    of_prefills = computed[len(decodes) :], lengths[len(decodes) :]
    cu_chunk_seqlen, seq_idx, last_chunk_indices = cut(*of_prefills, CHUNK)
    for tensor, want in (
        (metadata.query_start_loc_p, [0, *np.cumsum(of_prefills[1])]),
        (metadata.num_computed_tokens_p, of_prefills[0]),
        (metadata.cu_chunk_seqlen_p, cu_chunk_seqlen),
        (metadata.seq_idx_p, seq_idx),
        (metadata.last_chunk_indices_p, last_chunk_indices),
    ):
        assert tensor.dtype == torch.int32
        assert tensor.tolist() == list(want)
    assert metadata.has_initial_states_p.tolist() == [first > 0 for first in of_prefills[0]]


@pytest.fixture
def mixed_batch(rng):
    """A decode, a fresh prefill, one resumed at a column's end, and one inside a column."""
    return make_batch([13, 0, 2 * COLUMN, 3 * COLUMN + 2], [1, 5, COLUMN, 2 * COLUMN], rng)


def test_tensors_lie_where_the_kernels_read(mixed_batch):
    """On the meta device, every copy to the host raises."""
    mixed_batch.block_table_tensor = mixed_batch.block_table_tensor.to("meta")
    mixed_batch.seq_lens = mixed_batch.seq_lens.to("meta")
    for mode in ("all", "align"):
        metadata = make_builder(mode=mode, num_drafts=1, device="meta").build(0, mixed_batch)
        values = [getattr(metadata, field.name) for field in fields(metadata)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert len(tensors) > 5
        assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_columns_in_all_mode(mixed_batch):
    mixed_batch.query_start_loc = mixed_batch.query_start_loc.long()
    metadata = make_builder(mode="all").build(0, mixed_batch)
    assert metadata.query_start_loc_p.dtype == torch.int32
    assert torch.equal(metadata.state_indices_tensor, mixed_batch.block_table_tensor)
    assert metadata.block_idx_last_computed_token.tolist() == [2, 0, 1, 3]
    assert metadata.block_idx_first_scheduled_token_p.tolist() == [0, 2, 3]
    assert metadata.block_idx_last_scheduled_token.tolist() == [2, 0, 2, 5]
    assert metadata.block_idx_last_scheduled_token.dtype == torch.int32


def test_columns_of_decodes_alone_in_all_mode(rng):
    metadata = make_builder(mode="all").build(0, make_batch([13, 4], [1, 1], rng))
    assert metadata.block_idx_last_computed_token.tolist() == [2, 0]
    assert metadata.block_idx_first_scheduled_token_p is None


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_running_columns_in_align_mode(mixed_batch, num_drafts):
    metadata = make_builder(mode="align", num_drafts=num_drafts).build(0, mixed_batch)
    table = mixed_batch.block_table_tensor
    running = [2, 0, 2, 5]
    wanted = [row[c : c + 1 + num_drafts] for row, c in zip(table, running, strict=True)]
    wanted = torch.stack(wanted)
    assert torch.equal(metadata.state_indices_tensor, wanted if num_drafts else wanted[:, 0])
    assert metadata.block_idx_last_scheduled_token is None


def test_computed_tokens_may_be_given_by_lengths(mixed_batch):
    wanted = make_builder(mode="all").build(0, mixed_batch)
    del mixed_batch.num_computed_tokens_cpu
    from_device = make_builder(mode="all").build(0, mixed_batch)
    mixed_batch.seq_lens_cpu = mixed_batch.seq_lens.clone()
    mixed_batch.seq_lens = mixed_batch.seq_lens + 1000
    for got in (from_device, make_builder(mode="all").build(0, mixed_batch)):
        assert torch.equal(got.num_computed_tokens_p, wanted.num_computed_tokens_p)


@pytest.mark.parametrize("chunk_size", [None, 0, -256, True, 2.5, 2**31])
def test_a_model_without_a_chunk_size_is_refused(chunk_size):
    with pytest.raises(InvalidArgumentError, match=f"chunk size .*must be .*got {chunk_size}$"):
        make_builder(chunk_size)


@pytest.mark.parametrize(
    ("computed", "lengths", "is_prefilling", "num_drafts", "num_decodes"),
    [
        # A decode with drafts.
        ([9, 9, 0], [3, 1, 4], None, 2, 2),
        # vLLM 32118: a decode's initial state was that of the block's last request.
        ([9, 0, 9, 0], [1, 1, 1, 5], None, 0, 1),
        # Rows of padding, also where earlier requests of the rows prefilled.
        ([9, 9, 0, 0], [1, 1, 0, 0], None, 0, 4),
        ([9, 9, 0, 0], [1, 1, 0, 0], [False, False, True, True], 0, 4),
        # After 3 prompt tokens, the state after the first was read, as if they were drafts.
        ([9, 9, 9, 0], [3, 1, 3, 1], [False, True, True, True], 2, 2),
        # An empty batch, as in a graph capture.
        ([9, 9, 9, 0], [3, 1, 3, 1], [False] * 4, 2, 4),
    ],
)
def test_decodes_and_prefills(rng, computed, lengths, is_prefilling, num_drafts, num_decodes):
    batch = make_batch(computed, lengths, rng)
    if is_prefilling:
        batch.is_prefilling = torch.tensor(is_prefilling)
    metadata = make_builder(num_drafts=num_drafts).build(0, batch)
    assert (metadata.num_decodes, metadata.num_prefills) == (
        num_decodes,
        len(lengths) - num_decodes,
    )
    assert metadata.num_decode_tokens == sum(lengths[:num_decodes])
