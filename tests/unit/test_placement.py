"""Where checkpoints lie."""

from types import SimpleNamespace

import numpy as np
import pytest
from slot_rig import make_allocator, make_context

from mamba_cache.cache import EveryNthBlock, LastBlock, MegatronPlacement, PlacementFacts
from mamba_cache.errors import InvalidArgumentError

BLOCK = 256
BLOCK_IDS = [100, 101, 102, 103, 104, 105, 106, 107]


def facts(prompt, matched=0):
    return PlacementFacts(prompt, BLOCK, matched, -(-prompt // BLOCK))


def plan(prompt, placement):
    """What slots record for a prompt: offsets, blocks, and how many are left out.

    tests/conformance/test_slot_states.py compares chunks of any kind with the rules.
    """
    context = make_context(
        block_size_tokens=BLOCK,
        mamba_chunk_size=128,
        max_mamba_intermediate_states_per_step=9,
        request_to_kv_block_ids=np.array([BLOCK_IDS]),
    )
    slots = make_allocator(context=context, placement=placement)
    request = SimpleNamespace(prompt_tokens=range(prompt), finished_chunk_token_count=0)
    slots.compute_and_store_offsets(request, 0, 0, prompt, 0, [], -(-prompt // BLOCK))
    count = int(slots._intermediate_counts_cpu[0])
    offsets = slots._intermediate_offsets_cpu[0, :count].tolist()
    block_ids = slots._intermediate_block_ids_cpu[0, :count].tolist()
    return offsets, block_ids, slots.skipped_checkpoints_total


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


def test_a_position_inside_a_block_is_planned_as_its_beginning():
    """Its state was found as that of the block before."""
    inside = SimpleNamespace(positions=lambda facts: [BLOCK + 128, 2 * BLOCK - 1])
    assert plan(1100, inside) == ([BLOCK], [100], 0)


def test_of_more_than_three_the_last_are_kept_and_the_others_counted():
    offsets = [5 * BLOCK, 6 * BLOCK, 7 * BLOCK]
    assert plan(8 * BLOCK - 1, EveryNthBlock(1)) == (offsets, [104, 105, 106], 4)
