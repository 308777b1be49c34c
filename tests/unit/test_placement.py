"""Checkpoint positions of the placements."""

import pytest

from mamba_cache.cache import EveryNthBlock, LastBlock, MegatronPlacement, PlacementFacts
from mamba_cache.errors import InvalidArgumentError

BLOCK = 256


def facts(prompt, matched=0):
    return PlacementFacts(prompt, BLOCK, matched, -(-prompt // BLOCK))


@pytest.mark.parametrize(
    ("placement", "prompt", "expected"),
    [
        (MegatronPlacement(), facts(1100, matched=1), [256, 1024, 1024]),
        (MegatronPlacement(), facts(1024, matched=2), [512, 1024, 768]),
        (LastBlock(), facts(1100, matched=1), [1024]),
        (LastBlock(), facts(100), [0]),
        (EveryNthBlock(2), facts(1500), [512, 1024]),
        (EveryNthBlock(2), facts(1024), [512, 1024]),
        (EveryNthBlock(2), facts(511), []),
        (EveryNthBlock(2), facts(0), []),
    ],
)
def test_positions(placement, prompt, expected):
    assert list(placement.positions(prompt)) == expected


@pytest.mark.parametrize("n", [0, -1, 1.0, True])
def test_n_is_a_positive_count(n):
    with pytest.raises(InvalidArgumentError, match="n must be an int >= 1"):
        EveryNthBlock(n)
