"""One forward over tokens and drafts computes what a forward for each of the tokens does."""

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_steps import CONFIG, PlainCaches, Sequence, Work, build_metadata, run_step

from mamba_cache.reference import HybridModel

MODEL = HybridModel(CONFIG, dtype=torch.float64, seed=12)
BLOCK_SIZE = 8
BLOCKS = 4


@st.composite
def steps(draw):
    """How many drafts there can be, and (tokens before, tokens computed) of every request."""
    num_drafts = draw(st.integers(0, 4))
    decode = st.tuples(st.integers(1, 12), st.integers(1, 1 + num_drafts))
    prefill = st.tuples(st.integers(0, 9), st.integers(1, 12))
    decodes = draw(st.lists(decode, min_size=1, max_size=4))
    return num_drafts, decodes, draw(st.lists(prefill, max_size=2))


def make_caches(num_requests, rows_per_request):
    return PlainCaches(
        CONFIG,
        torch.float64,
        num_blocks=num_requests * BLOCKS,
        block_size=BLOCK_SIZE,
        num_rows=num_requests * rows_per_request,
    )


def start(caches, tokens, index, row, num_tokens):
    """A request whose first tokens are computed, in KV blocks of its own."""
    sequence = Sequence(tokens, row, list(range(index * BLOCKS, (index + 1) * BLOCKS)))
    caches.live_states.zero_([row])
    if num_tokens:
        run_step(MODEL, caches, [], [Work(sequence, num_tokens)])
    return sequence


def one_by_one(tokens, num_before, num_tokens):
    """Logits and live states after each of some tokens, by decode steps of a request alone."""
    caches = make_caches(1, 1)
    sequence = start(caches, tokens, 0, 0, num_before)
    logits, states = [], []
    for _ in range(num_tokens):
        logits.append(run_step(MODEL, caches, [Work(sequence, 1)], [])[0])
        states.append([t[:, 0].clone() for t in caches.live_states.tensors.values()])
    return logits, states


def check_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@given(steps(), st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_drafts_are_computed_as_if_one_by_one(step, looser, seed):
    num_drafts, decodes, prefills = step
    generator = torch.Generator().manual_seed(seed)
    spans = [*decodes, *prefills]
    prompts = [torch.randint(32, (24,), generator=generator).tolist() for _ in spans]
    ring = num_drafts + 2
    caches = make_caches(len(spans), ring)
    rows = torch.randperm(len(spans) * ring, generator=generator).view(-1, ring).tolist()
    works = []
    for index, (num_before, num_tokens) in enumerate(spans):
        sequence = start(caches, prompts[index], index, rows[index][0], num_before)
        written = rows[index][1:] if index < len(decodes) else []
        works.append(Work(sequence, num_tokens, written_rows=written))
    live = list(caches.live_states.tensors.values())
    before = [tensor.clone() for tensor in live]

    metadata = build_metadata(CONFIG, caches, works[: len(decodes)], works[len(decodes) :])
    # The host may know no more of a sequence's length than a bound.
    metadata = dataclasses.replace(metadata, max_seq_len=metadata.max_seq_len + looser)
    logits = list(MODEL.forward(metadata, caches))

    for index, (num_before, num_tokens) in enumerate(spans):
        expected_logits, expected_states = one_by_one(prompts[index], num_before, num_tokens)
        if index >= len(decodes):
            check_close(logits.pop(0), expected_logits[-1])
            continue
        for j in range(num_tokens):
            check_close(logits.pop(0), expected_logits[j])
            for tensor, expected in zip(live, expected_states[j], strict=True):
                check_close(tensor[:, rows[index][1 + j]], expected)
        for tensor, old in zip(live, before, strict=True):
            kept = rows[index][0]
            assert torch.equal(tensor[:, kept].view(torch.uint8), old[:, kept].view(torch.uint8))
    assert logits == []


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_the_next_step_begins_at_any_of_the_states(num_drafts, accepted, seed):
    """Rejected drafts leave no trace: their keys and states are written over, or never read."""
    accepted = min(accepted, num_drafts)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(32, (20,), generator=generator).tolist()
    known = 9 + accepted + 1
    wrong = [(token + 1) % 32 for token in tokens[known:]]
    caches = make_caches(1, num_drafts + 2)
    sequence = start(caches, [*tokens[:known], *wrong], 0, 0, 9)
    run_step(
        MODEL,
        caches,
        [Work(sequence, 1 + num_drafts, written_rows=[*range(1, num_drafts + 2)])],
        [],
    )

    sequence.tokens, sequence.num_computed, sequence.row = tokens, known, 1 + accepted
    free = [row for row in range(num_drafts + 2) if row != sequence.row]
    for tensor in caches.live_states.tensors.values():
        tensor[:, free] = torch.nan
    logits = run_step(MODEL, caches, [Work(sequence, 1 + num_drafts, written_rows=free)], [])
    expected, _ = one_by_one(tokens, known, 1 + num_drafts)
    check_close(logits, torch.stack(expected))
