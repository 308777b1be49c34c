"""Calls of ``generate`` and ``generate_batch`` in any order: each finds what the others cached.

That each answer is the model's own tests/property/test_conversations.py shows.
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
def test_with_room_each_turn_goes_on_from_the_last_whoever_answered_it(name, length, turns, seed):
    """What either answered is found to the last block boundary."""
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
