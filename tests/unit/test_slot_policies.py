"""Eviction order of slots."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mamba_cache.cache import LruSlotPolicy, RefZeroSlotPolicy
from mamba_cache.cache.policies import as_host_array, policy_named
from mamba_cache.errors import InvalidArgumentError


def test_lru_agrees_with_sorting_for_any_number(rng):
    slots = np.arange(200)
    view = SimpleNamespace(block_timestamps=rng.integers(-5, 40, 200))
    blocks = rng.permutation(200).astype(np.int32)
    # As floats, the largest numbers are equal.
    view.block_timestamps[:4] = np.iinfo(np.int64).max - np.array([0, 1, 0, 1])
    expected = sorted(slots.tolist(), key=lambda s: (view.block_timestamps[blocks[s]], s))
    for count in (1, 2, 15, 16, 17, 50, 199, 200, 300):
        chosen = LruSlotPolicy().choose(count, slots, blocks, view)
        assert chosen == expected[:count]
        assert all(type(slot) is int for slot in chosen)
        assert RefZeroSlotPolicy().choose(count, slots, blocks, None) == [*range(min(count, 200))]


@pytest.mark.parametrize("make", [torch.tensor, np.array, list])
def test_an_embedders_array_is_read_as_it_is_now(make):
    given = make([1, 2])
    assert as_host_array(given).tolist() == [1, 2]
    given[0] = 9
    assert as_host_array(given).tolist() == [9, 2]


class Foreign(str):
    """An engine's own enum member, compared by its value."""

    value = "ref_zero"


def test_a_policy_is_named_by_value():
    assert type(policy_named(Foreign("PrefixCachingEvictionPolicy.REF_ZERO"))) is RefZeroSlotPolicy


@pytest.mark.parametrize("name", ["fifo", None, 3])
def test_unknown_names_are_refused(name):
    with pytest.raises(InvalidArgumentError, match=r"one of \['lru', 'ref_zero'\], got"):
        policy_named(name)
