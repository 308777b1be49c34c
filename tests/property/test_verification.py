"""Verified hits of the reference engine: correct hits never differ, corrupted ones always do."""

from functools import partial

import torch
from engine_rig import BLOCK, MODEL, make_engine
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.reference import SamplingParams
from mamba_cache.reference.engine import compute_prefix

TOKENS = st.integers(0, 255)
BEGINNINGS = st.lists(st.lists(TOKENS, min_size=BLOCK, max_size=5 * BLOCK), min_size=1, max_size=3)
SETTINGS = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([11, 16, 64]),
        "num_speculative_tokens": st.sampled_from([0, 2]),
        "num_kv_blocks": st.sampled_from([24, 128]),
        "max_slots": st.sampled_from([3, 64]),
    }
)


@st.composite
def conversations(draw):
    """Draw rounds of prompts with common prefixes; an answer is often part of the next prompt."""
    beginnings = draw(BEGINNINGS)
    return [
        [
            [*draw(st.sampled_from(beginnings)), *draw(st.lists(TOKENS, max_size=12))]
            for _ in range(draw(st.integers(1, 3)))
        ]
        for _ in range(draw(st.integers(1, 3)))
    ]


def converse(engine, rounds):
    """Run all prompts, and the first of each round again with its answer."""
    sampling = SamplingParams(max_new_tokens=11)
    for prompts in rounds:
        ends = engine.generate(prompts, sampling)
        engine.generate([[*prompts[0], *ends[0].tokens, 7, 7, 7]], sampling)


def verify_pending(engine):
    context = engine.context
    return context.verify_pending(partial(compute_prefix, MODEL, context))


@given(conversations(), SETTINGS)
def test_clean_hits_never_differ(rounds, settings):
    engine = make_engine(verify_hits=1.0, **settings)
    converse(engine, rounds)
    verify_pending(engine)
    engine.context.check_invariants()
    stats, hits = engine.context.verification_stats(), engine.context.stats().hits
    assert stats.sampled == hits
    assert stats.verified + stats.skipped == hits
    assert stats.differences == {"state": 0, "kv": 0}


@given(conversations(), st.data())
def test_corrupted_hits_differ(rounds, data):
    engine = make_engine(verify_hits=1.0)
    context = engine.context
    converse(engine, rounds)
    hits = []
    while (hit := context._memory.verifier.take()) is not None:
        hits.append(hit)
    if not hits:
        return
    hit = data.draw(st.sampled_from(hits))
    blocks = context.kv_block_allocator.match_prefix(hit.hashes)
    slot = context.slot_allocator.get_slot(blocks[-1])
    saved = context.slot_allocator.states.tensors
    tensors = [saved[name][:, slot] for name in saved]
    tensors += [context.kv_cache[:, :, block] for block in blocks]
    place = data.draw(st.integers(0, len(tensors) - 1))
    values = tensors[place]
    index = tuple(data.draw(st.integers(0, size - 1)) for size in values.shape)
    size = torch.linalg.vector_norm(values).item()
    values[index] += 1e-3 * (size + 1e-3)
    context._memory.verifier._waiting.append(hit)
    assert verify_pending(engine) == 1
    is_state = place < len(saved)
    wanted = {"state": 1, "kv": 0} if is_state else {"state": 0, "kv": 1}
    assert context.verification_stats().differences == wanted
    context.check_invariants()
    if not is_state:
        depth = place - len(saved)
        assert len(context.kv_block_allocator.match_prefix(hit.hashes)) == depth
