"""Where checkpoints lie."""

from types import SimpleNamespace

import pytest

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.slots import EveryNthBlock, LastBlock, MegatronPlacement, PlacementFacts
from mamba_cache.slots.megatron_scratch import plan_checkpoints
from mamba_cache.slots.placement import checkpoint_offsets

BLOCK = 256
BLOCK_IDS = [100, 101, 102, 103, 104, 105, 106, 107]


def facts(prompt, matched=0):
    return PlacementFacts(prompt, BLOCK, matched, -(-prompt // BLOCK))


def plan(prompt, *, finished=0, skip=0, length=None, matched=0, placement=None, alignment=128):
    return plan_checkpoints(
        MegatronPlacement() if placement is None else placement,
        SimpleNamespace(prompt_tokens=range(prompt), finished_chunk_token_count=finished),
        skip_tokens=skip,
        prefill_chunk_length=prompt - finished if length is None else length,
        num_matched_blocks=matched,
        num_required_blocks=-(-prompt // BLOCK),
        block_ids=BLOCK_IDS,
        block_size_tokens=BLOCK,
        alignment=alignment,
    )


def test_megatron_places_three():
    assert list(MegatronPlacement().positions(facts(1100, matched=1))) == [256, 1024, 1024]
    assert list(MegatronPlacement().positions(facts(1024, matched=2))) == [512, 1024, 768]


def test_last_block_places_one():
    assert list(LastBlock().positions(facts(1100, matched=1))) == [1024]
    assert list(LastBlock().positions(facts(100))) == [0]


@pytest.mark.parametrize(
    ("prompt", "expected"), [(1500, [512, 1024]), (1024, [512, 1024]), (511, []), (0, [])]
)
def test_every_nth_block(prompt, expected):
    assert list(EveryNthBlock(2).positions(facts(prompt))) == expected


@pytest.mark.parametrize("n", [0, -1, 1.0, True])
def test_n_is_a_positive_count(n):
    with pytest.raises(InvalidArgumentError, match="n must be an int >= 1"):
        EveryNthBlock(n)


def test_offsets_are_sorted_without_duplicates():
    offsets = checkpoint_offsets([768, 256, 768, 512], chunk_start=0, num_tokens=1000, alignment=1)
    assert offsets == [256, 512, 768]


def test_offsets_are_strictly_inside_the_computed_tokens():
    offsets = checkpoint_offsets([0, 256, 512, 768], chunk_start=256, num_tokens=512, alignment=1)
    assert offsets == [256]


def test_offsets_lie_on_the_kernels_chunks():
    offsets = checkpoint_offsets([64, 128, 192, 256], chunk_start=0, num_tokens=999, alignment=128)
    assert offsets == [128, 256]
    # From a start off the grid the kernel has no state at a block's end: it is not asked for one.
    assert checkpoint_offsets([512], chunk_start=300, num_tokens=600, alignment=128) == []


def test_a_plan_names_the_block_that_each_checkpoint_ends():
    made = plan(1100, matched=1)
    assert (made.offsets, made.block_ids) == ([256, 1024], [100, 103])
    assert (made.eos_block_id, made.num_skipped) == (-1, 0)


def test_skipped_tokens_shift_the_offsets_but_not_the_blocks():
    made = plan(1100, matched=2, skip=256)
    assert (made.offsets, made.block_ids) == ([256, 768], [101, 103])


def test_a_later_chunk_places_what_lies_inside_it():
    first = plan(1100, matched=1, length=512)
    assert (first.offsets, first.block_ids) == ([256], [100])
    later = plan(1100, matched=1, finished=512)
    assert (later.offsets, later.block_ids) == ([512], [103])


def test_a_prompt_of_whole_blocks_ends_in_an_eos_checkpoint():
    made = plan(1024)
    assert made.eos_block_id == 103
    assert (made.offsets, made.block_ids) == ([768], [102])


def test_the_eos_checkpoint_belongs_to_the_last_chunk_alone():
    assert plan(1024, length=512).eos_block_id == -1
    assert plan(1024, finished=512).eos_block_id == 103


@pytest.mark.parametrize("prompt", [0, 100, 1025])
def test_other_prompts_have_no_eos_checkpoint(prompt):
    assert plan(prompt).eos_block_id == -1


def test_a_prompt_within_one_block_has_no_checkpoint():
    assert plan(200).offsets == []


def test_of_more_than_three_the_last_are_kept_and_the_others_counted():
    made = plan(8 * BLOCK - 1, placement=EveryNthBlock(1))
    assert made.offsets == [5 * BLOCK, 6 * BLOCK, 7 * BLOCK]
    assert made.block_ids == [104, 105, 106]
    assert made.num_skipped == 4
