"""States in block tables over drawn sequences of steps: every path leaves what the rules leave."""

from functools import partial

from align_rig import HostWorld, ResidentWorld, check_worlds
from align_states import models
from hypothesis import given
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)


@given(models(64), SEEDS, st.lists(SEEDS, min_size=1, max_size=8))
def test_plain_paths_leave_what_the_rules_leave(model, seed, step_seeds):
    on_host, on_device = HostWorld, partial(HostWorld, decides_on_device=True)
    check_worlds(model, seed, step_seeds, [on_host, on_device, ResidentWorld])


@given(models(3, block_sizes=(4, 5), min_drafts=1), SEEDS, st.lists(SEEDS, min_size=1, max_size=3))
def test_kernels_leave_what_the_rules_leave(model, seed, step_seeds):
    """Through Triton's interpreter."""
    on_device = partial(HostWorld, backend="triton", decides_on_device=True)
    check_worlds(model, seed, step_seeds, [on_device, partial(ResidentWorld, backend="triton")])
