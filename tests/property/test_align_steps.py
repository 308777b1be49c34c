"""States in block tables over drawn sequences of steps: every path equals the plain rules."""

from functools import partial

import pytest
import torch
from align_rig import HostWorld, ResidentWorld, SlotWorld, check_worlds
from align_states import Group, Model, models
from hypothesis import given
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)
ON_DEVICE = partial(HostWorld, decides_on_device=True)
WORLDS = [HostWorld, ON_DEVICE, partial(ON_DEVICE, by_kind=True), ResidentWorld, SlotWorld]


@given(models(64), SEEDS, st.lists(SEEDS, min_size=1, max_size=6))
def test_plain_paths_equal_the_rules(model, seed, step_seeds):
    check_worlds(model, seed, step_seeds, WORLDS)


WIDE = Group(1), Group(1, 16, torch.float64, (4, 16), gap=2)
NARROW = (Group(1, 3, torch.uint8, (2, 3, 5), torch.float16, gap=1),)


@pytest.mark.parametrize(
    ("groups", "is_ds", "block_size", "num_drafts", "world"),
    [
        (WIDE, False, 5, 4, ResidentWorld),
        (WIDE, True, 64, 0, SlotWorld),
        (NARROW, True, 4, 3, ResidentWorld),
        (NARROW, False, 16, 2, SlotWorld),
    ],
    ids=["wide SD", "wide DS", "narrow DS", "narrow SD"],
)
def test_kernels_equal_the_rules(groups, is_ds, block_size, num_drafts, world, seed):
    """Through Triton's interpreter, over long sequences of steps."""
    model = Model(block_size, num_drafts, 3, is_ds, groups, max_requests=3)
    worlds = HostWorld, partial(ON_DEVICE, by_kind=True), world
    worlds = [partial(world, backend="triton") for world in worlds]
    check_worlds(model, seed, range(seed, seed + 6), worlds)
