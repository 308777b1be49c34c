"""Calls of ``generate`` and ``generate_batch`` in any order find each other's entries.

tests/property/test_conversations.py checks that each answer is the model's own.
"""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from batch_rig import SERVED, answer, subject, tokens
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers_rig import BLOCK


@pytest.mark.parametrize("name", SERVED)
@examples(3)
@given(
    length=st.integers(1, 4 * BLOCK),
    turns=st.lists(
        st.tuples(st.booleans(), st.integers(1, BLOCK), st.integers(2, BLOCK)),
        min_size=2,
        max_size=5,
    ),
    seed=st.integers(0, 2**16),
)
def test_with_room_each_turn_continues_the_last_one_of_either_call(name, length, turns, seed):
    """Answers of both calls are found up to the last block boundary."""
    one, generator = subject(name), torch.Generator().manual_seed(seed)
    cache, told, least = one.cache(), tokens(generator, length), 0
    for is_batch, count, own in turns:
        before = cache.stats().skipped_tokens
        found = answer(cache, told, is_batch=is_batch, count=count)
        assert found == one.answer(told, count)
        assert cache.stats().skipped_tokens - before >= least
        known = len(told) + count - 1  # the last token has not gone through the model
        least = known // BLOCK * BLOCK
        told = told + found + tokens(generator, own)
