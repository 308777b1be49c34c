"""Verified tokens equal those sampled one by one."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_steps import PlainCaches, Sequence, Work, build_metadata

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import (
    HybridModelConfig,
    SamplingParams,
    sample,
    verify,
    verify_greedy_on_device,
)

CONFIG = HybridModelConfig(vocab_size=5)
SEEDS = st.integers(0, 2**32 - 1)


def draw_logits(seed, num_rows):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, CONFIG.vocab_size, generator=generator)


@given(
    drafts=st.lists(st.integers(0, 4), max_size=5),
    is_right=st.lists(st.booleans(), min_size=5, max_size=5),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.3]),
        seed=st.integers(0, 9),
        stop_tokens=st.lists(st.integers(0, 4), max_size=2),
    ),
    num_generated=st.integers(0, 3),
    seed=SEEDS,
)
def test_tokens_are_sampled_until_a_draft_is_wrong(drafts, is_right, params, num_generated, seed):
    logits = draw_logits(seed, len(drafts) + 1)
    sampled = [sample(row, params, num_generated + i) for i, row in enumerate(logits)]
    drafts = [
        right if good else draft
        for right, draft, good in zip(sampled, drafts, is_right, strict=False)
    ]
    found = verify(logits, drafts, params, num_generated)
    end = len(found)
    assert found == sampled[:end]
    assert found[:-1] == drafts[: end - 1]
    assert not set(found[:-1]) & set(params.stop_tokens)
    if end <= len(drafts):
        assert found[-1] != drafts[end - 1] or found[-1] in params.stop_tokens


def test_logits_after_a_wrong_draft_are_not_looked_at():
    logits = draw_logits(1, 3)
    logits[1:] = torch.nan
    right = int(logits[0].argmax())
    assert verify(logits, [(right + 1) % 5, 0], SamplingParams(), 0) == [right]
    with pytest.raises(InvalidArgumentError, match="nan"):
        verify(logits, [right, 0], SamplingParams(), 0)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_verify_wants_a_row_for_each_token(num_rows):
    with pytest.raises(InvalidArgumentError, match=f"2 rows, one more than drafts, got {num_rows}"):
        verify(draw_logits(0, num_rows), [1], SamplingParams(), 0)


def make_step(decode_lengths, num_prefills, rows):
    """Return only a step's metadata, without computing."""
    num_requests = len(decode_lengths) + num_prefills
    caches = PlainCaches(CONFIG, torch.float32, num_blocks=num_requests, block_size=8, num_rows=0)
    lengths = [*decode_lengths, *[3] * num_prefills]
    works = [
        Work(Sequence([0] * 8, row, [index]), length)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]
    split = len(decode_lengths)
    return build_metadata(CONFIG, caches, works[:split], works[split:])


@given(
    decode_lengths=st.lists(st.integers(1, 5), max_size=5),
    num_prefills=st.integers(0, 2),
    seed=SEEDS,
)
def test_the_device_counts_the_drafts_that_stand(decode_lengths, num_prefills, seed):
    """Ragged requests in rows of any order, drafts that are right, wrong and missing (-1)."""
    num_decodes = len(decode_lengths)
    num_requests = num_decodes + max(num_prefills, not num_decodes)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(num_requests, generator=generator).tolist()
    metadata = make_step(decode_lengths, num_requests - num_decodes, rows)
    logits = draw_logits(seed, sum(decode_lengths) + num_requests - num_decodes)
    per_request = logits.split([*decode_lengths, *[1] * (num_requests - num_decodes)])
    drafts = torch.randint(-1, 5, (num_requests, 4), generator=generator)
    for row, its_logits in zip(rows, per_request, strict=True):
        right = its_logits.argmax(1)[:4]
        keep = torch.rand(len(right), generator=generator) < 0.7
        drafts[row, : len(right)] = torch.where(keep, right, drafts[row, : len(right)])

    found = verify_greedy_on_device(logits, metadata, drafts)
    assert (found.tokens.dtype, found.tokens.shape) == (torch.int64, (num_requests, 5))
    assert (found.counts.dtype, found.counts.shape) == (torch.int32, (num_requests,))
    for index, its_logits in enumerate(per_request):
        its_drafts = drafts[rows[index], : len(its_logits) - 1].tolist()
        expected = verify(its_logits, its_drafts, SamplingParams(), 0)
        assert found.tokens[index, : found.counts[index]].tolist() == expected


def test_verification_on_the_device_reads_nothing_back():
    """Tensors on the meta device have no values: reading one on the host raises."""
    metadata = make_step([3, 1], 1, [2, 0, 1])
    on_meta = {
        field.name: getattr(metadata, field.name).to("meta")
        for field in dataclasses.fields(metadata)
        if isinstance(getattr(metadata, field.name), torch.Tensor)
    }
    logits, drafts = torch.empty(5, 5, device="meta"), torch.empty(3, 2, device="meta").long()
    found = verify_greedy_on_device(logits, dataclasses.replace(metadata, **on_meta), drafts)
    assert (found.tokens.shape, found.counts.shape) == ((3, 3), (3,))


@pytest.mark.parametrize(
    ("logits", "drafts", "message"),
    [
        ((4, 5), (3, 2), r"logits must be \[5, vocab_size\].*\[4, 5\]"),
        ((5,), (3, 2), r"logits must be \[5, vocab_size\].*\[5\]"),
        ((5, 5), (3, 1), r"drafts.*up to 2.*\[3, 1\]"),
        ((5, 5), (3,), r"drafts.*\[3\]"),
    ],
)
def test_tensors_that_do_not_fit_the_step_are_refused(logits, drafts, message):
    metadata = make_step([3, 1], 1, [2, 0, 1])
    with pytest.raises(InvalidArgumentError, match=message):
        verify_greedy_on_device(torch.zeros(logits), metadata, torch.zeros(drafts).long())
