"""Calls of ``generate`` and ``generate_batch`` in any order: each answer is the model's own."""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from batch_rig import SERVED, answers, batch, subject, tokens
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers_rig import BLOCK, budgets

PROMPT = st.tuples(
    st.integers(0, 3),  # of which conversation
    st.integers(0, 5 * BLOCK),  # how much of it
    st.integers(0, BLOCK),  # and of its own
)
CALLS = st.lists(
    st.tuples(
        st.booleans(),  # a batch, or one after the other
        st.lists(PROMPT, min_size=1, max_size=3),
        st.integers(1, 2 * BLOCK),  # new tokens
    ),
    min_size=2,
    max_size=6,
)
ROOM = st.fixed_dictionaries({"blocks": st.integers(10, 60), "slots": st.integers(1, 20)})


@pytest.mark.parametrize("name", SERVED)
@examples(6)
@given(calls=CALLS, room=ROOM, seed=st.integers(0, 2**16))
def test_each_answer_is_the_models_own_whoever_cached_what(name, calls, room, seed):
    """Conversations go on by their answers; room is short, so that all is evicted at times."""
    one, generator = subject(name), torch.Generator().manual_seed(seed)
    sizes = budgets(one.cache(), **room)
    if name == "mamba2":
        sizes["kv_cache_gb"] = 0.01
    cache = one.cache(**sizes, max_requests=3)
    told = [tokens(generator, 2 * BLOCK) for _ in range(4)]
    requests = 0
    for is_batch, prompts, count in calls:
        given_prompts = []
        for which, start, own in prompts:
            prompt = told[which][:start] + tokens(generator, own)
            given_prompts.append(prompt or [5])
        wanted = [one.answer(prompt, count) for prompt in given_prompts]
        if is_batch:
            found = answers(batch(cache, given_prompts, max_new_tokens=count))
        else:
            options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
            found = [
                cache.generate([prompt], **options)[0, len(prompt) :].tolist()
                for prompt in given_prompts
            ]
            cache.check_invariants()
        assert found == wanted
        for (which, _, _), prompt, answer in zip(prompts, given_prompts, found, strict=True):
            told[which] = (prompt + answer)[: 5 * BLOCK]
        requests += len(prompts)
        stats = cache.stats()
        assert stats.hits + sum(stats.misses.values()) == stats.requests >= requests


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
        if is_batch:
            [answer] = answers(batch(cache, [told], max_new_tokens=count))
        else:
            options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
            answer = cache.generate([told], **options)[0, len(told) :].tolist()
        assert answer == one.answer(told, count)
        assert cache.stats().skipped_tokens - before >= least
        known = len(told) + count - 1  # the last token has not gone through the model
        least = known // BLOCK * BLOCK
        told = told + answer + tokens(generator, own)
