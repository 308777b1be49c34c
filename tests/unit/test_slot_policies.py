"""Which slots go first."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fingerprints import frozen

from mamba_cache.cache import ConsumedSlotPolicy, LruSlotPolicy, RefZeroSlotPolicy, ScoreSlotPolicy
from mamba_cache.cache.policies import as_host_array, policy_named
from mamba_cache.errors import InvalidArgumentError

SLOTS = np.array([1, 3, 4, 6])
BLOCKS = np.array([9, 2, 7, 5], np.int32)


def kv_blocks(**times):
    """KV blocks used at the given times, which are listed by slot: ``s1=5``."""
    stamps = np.full(10, -100)
    for slot, time in times.items():
        stamps[BLOCKS[SLOTS.tolist().index(int(slot[1:]))]] = time
    return SimpleNamespace(block_timestamps=stamps)


def test_lru_agrees_with_sorting_for_any_number(rng):
    slots = np.arange(200)
    view = SimpleNamespace(block_timestamps=rng.integers(-5, 40, 200))
    blocks = rng.permutation(200).astype(np.int32)
    # No float tells the largest apart.
    view.block_timestamps[:4] = np.iinfo(np.int64).max - np.array([0, 1, 0, 1])
    expected = sorted(slots.tolist(), key=lambda s: (view.block_timestamps[blocks[s]], s))
    for count in (1, 2, 15, 16, 17, 50, 199, 200, 300):
        chosen = LruSlotPolicy().choose(count, slots, blocks, view)
        assert chosen == expected[:count]
        assert all(type(slot) is int for slot in chosen)
        assert RefZeroSlotPolicy().choose(count, slots, blocks, None) == [*range(min(count, 200))]


def test_consumed_takes_what_was_longest_neither_stored_nor_consumed():
    policy = ConsumedSlotPolicy()
    policy.reset(8)
    for slot in (6, 4, 3, 1):
        policy.on_stored([slot], [1])
    assert policy.choose(4, SLOTS, BLOCKS, None) == [6, 4, 3, 1]
    policy.on_consumed([6])
    assert policy.choose(4, SLOTS, BLOCKS, None) == [4, 3, 1, 6]
    assert policy.choose(4, SLOTS, BLOCKS, None) == [4, 3, 1, 6], "choosing is no use"
    policy.on_stored([], [])
    policy.on_stored([4], [1])
    assert policy.choose(2, SLOTS, BLOCKS, None) == [3, 1]


def scored(**saved_tokens):
    """A policy that heard of states stored one after the other, as in ``s1=256``."""
    policy = ScoreSlotPolicy()
    policy.reset(8)
    for slot, tokens in saved_tokens.items():
        policy.on_stored([int(slot[1:])], [tokens])
    return policy


def test_score_agrees_with_fractions_of_any_size(rng):
    policy = ScoreSlotPolicy()
    policy.reset(300)
    saved, last_use = {}, {}
    for now in range(1, 401):
        slot = int(rng.integers(300))
        last_use[slot] = now
        saved[slot] = int(rng.choice([0, 1, 512, 2**31 - 1, rng.integers(2**31)]))
        policy.on_stored([slot], [saved[slot]])
    slots = np.array(sorted(saved))
    expected = sorted(slots.tolist(), key=lambda s: (Fraction(saved[s], 401 - last_use[s]), s))
    for count in (1, 16, 17, 400):
        assert policy.choose(count, slots, slots.astype(np.int32), None) == expected[:count]


def test_score_does_not_age_when_nothing_happens():
    policy = scored(s6=300, s1=200)
    before = frozen(policy)
    policy.on_stored([], [])
    policy.on_consumed([])
    assert frozen(policy) == before
    policy.reset(8)
    fresh = ScoreSlotPolicy()
    fresh.reset(8)
    assert frozen(policy) == frozen(fresh)


@pytest.mark.parametrize("given", [torch.tensor([1, 2]), np.array([1, 2]), [1, 2]], ids=repr)
def test_an_embedders_array_is_read_as_it_is_now(given):
    assert as_host_array(given).tolist() == [1, 2]
    given[0] = 9
    assert as_host_array(given).tolist() == [9, 2]


class Foreign(str):
    """An engine's own enum member: its value is what counts."""

    value = "ref_zero"


def test_a_policy_is_named_by_value():
    assert type(policy_named(Foreign("PrefixCachingEvictionPolicy.REF_ZERO"))) is RefZeroSlotPolicy


@pytest.mark.parametrize("name", ["fifo", None, 3])
def test_unknown_names_are_refused(name):
    with pytest.raises(InvalidArgumentError, match=r"one of \['lru', 'ref_zero'\], got"):
        policy_named(name)
