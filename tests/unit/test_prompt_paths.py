"""What a policy is shown of prompts whose states lie inside blocks as well."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.blocks import BlockHashChain, BlockHasher
from mamba_cache.context.paths import PromptPaths
from mamba_cache.slots import AdaptiveSlotPolicy, StateProposal

BLOCK = 256
HASHER = BlockHasher(secret=b"fixed")
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=700)


def chain_of(tokens, **keys):
    chain = BlockHashChain(BLOCK, hasher=HASHER, **keys)
    chain.append(tokens)
    return chain


def path_of(paths, tokens, **keys):
    return paths.hash_ids(chain_of(tokens, **keys), np.array(tokens, np.int32))


@given(head=TOKENS, one=TOKENS, other=TOKENS)
def test_ids_are_equal_just_as_far_as_prompts_are(head, one, other):
    paths = PromptPaths(BLOCK)
    unit = paths.unit_tokens
    first, second = head + one, head + other
    ids = path_of(paths, first), path_of(paths, second)
    for tokens, found in zip((first, second), ids, strict=True):
        assert len(found) == max(1, len(tokens) // unit) == paths.depth(len(tokens))
        assert all(0 < each < 2**63 for each in found)
        ends = found[BLOCK // unit - 1 :: BLOCK // unit]
        assert ends == [*chain_of(tokens).hashes]
    if min(map(len, (first, second))) >= unit:
        for depth, pair in enumerate(zip(*ids, strict=False), 1):
            end = depth * unit
            assert (pair[0] == pair[1]) == (first[:end] == second[:end])


def test_what_is_shorter_than_a_unit_has_an_id_of_its_own():
    paths = PromptPaths(BLOCK)
    assert paths.unit_tokens == 4
    found = [path_of(paths, tokens) for tokens in ([1], [1, 1], [1, 1, 1, 1])]
    assert [len(ids) for ids in found] == [1, 1, 1]
    assert len({ids[0] for ids in found}) == 3
    assert paths.hash_ids(chain_of([1]), np.zeros(0, np.int32)) == []


def test_salts_and_adapters_have_ids_of_their_own():
    paths, tokens = PromptPaths(BLOCK), [5] * 40
    plain = path_of(paths, tokens)
    for keys in ({"cache_salt": "a"}, {"lora_id": "b"}):
        assert not {*plain} & {*path_of(paths, tokens, **keys)}


@pytest.mark.parametrize(("block", "unit"), [(8, 1), (64, 1), (256, 4), (100, 1), (384, 6)])
def test_blocks_are_whole_units(block, unit):
    assert PromptPaths(block).unit_tokens == unit
    assert block % unit == 0


def test_ids_stay_what_they_are_whatever_was_asked_before():
    tokens = list(range(3000))
    whole = path_of(PromptPaths(BLOCK), tokens)
    paths = PromptPaths(BLOCK)
    assert path_of(paths, tokens[:8]) == whole[:2]
    assert path_of(paths, tokens) == whole


def test_what_is_new_counts_in_blocks():
    paths = PromptPaths(BLOCK)
    ids = path_of(paths, [1] * 1000)
    facts = paths.facts(ids, 1000, 300, 999, will_continue=True, source="x")
    assert len(facts.hash_ids) - facts.num_matched_blocks == 2
    assert (facts.num_usable_blocks, facts.block_size_tokens) == (249, 4)
    assert (facts.will_continue, facts.source) == (True, "x")
    short = paths.facts([7], 2, 0, 1, will_continue=None, source=None)
    assert (short.num_matched_blocks, short.num_usable_blocks) == (1, 0)


def test_a_prompt_that_goes_on_inside_a_block_uses_the_state_there():
    """Of block boundaries alone the policy saw that nothing was ever asked for again."""
    paths, policy = PromptPaths(BLOCK), AdaptiveSlotPolicy()
    policy.reset(4)

    def ask(tokens):
        ids = path_of(paths, tokens)
        return policy.on_request(
            paths.facts(ids, len(tokens), 0, len(tokens), will_continue=None, source=None)
        )

    told = [3] * 300
    prompt = ask(told)
    proposal = StateProposal(prompt, paths.depth(len(told)))
    answered = told + [4] * 50
    answer = paths.propose_answer(prompt, path_of(paths, answered), is_asked=False)
    assert answer.is_asked is False
    assert paths.propose_answer(prompt, path_of(paths, answered), is_asked=True).is_asked is True
    plan = policy.admit([proposal, answer], 2, np.empty(0, np.int64))
    assert plan == ([True, True], [])
    policy.on_reserved([0, 1])
    policy.on_published([0, 1], [11, 12], [1, 1])  # hash ids of parts, which no path has
    policy.check_invariants([0, 1])
    tree, nodes = policy._tree, policy._candidates
    before = tree._last_use_at[nodes[0]], tree._last_use_at[nodes[1]]
    assert ask(answered + [5] * 9).turn == 1
    assert (tree._last_use_at[nodes[0]], tree._last_use_at[nodes[1]]) == (before[0], 2)
    ask(told + [6] * 9)
    assert tree._last_use_at[nodes[0]] == 3
    assert policy.choose(1, np.arange(2), np.zeros(2, np.int32), SimpleNamespace()) != []
    policy.check_invariants([0, 1])
