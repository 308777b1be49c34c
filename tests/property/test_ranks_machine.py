"""Several ranks of one model, whose tiers hold other things, under every order of calls."""

from unittest import mock

import pytest
from example_counts import few_examples
from fresh_examples import all_drawn, only_drawn
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from ranks_machine import RanksMachine

from mamba_cache.context import Prefetch
from mamba_cache.context.tiering import Tiering


class ThreeRanksMachine(RanksMachine):
    num_ranks = 3


TestRanksMachine = all_drawn(RanksMachine.TestCase)
TestRanksMachine.settings = few_examples(20)
TestThreeRanksMachine = all_drawn(ThreeRanksMachine.TestCase)
TestThreeRanksMachine.settings = few_examples(8)

ALONE = {
    "where they resume": (RanksMachine, "agrees", False),
    "what became of their loads": (Tiering, "_on_any_rank", lambda self, flags: list(flags)),
    "which prefetches are done": (Prefetch, "state", Prefetch.own_state),
}


@pytest.mark.parametrize("what", ALONE)
def test_ranks_that_decide_alone_diverge(what):
    """The machine notices, so what it does to tiers is enough to make ranks differ."""
    once = settings(
        max_examples=100,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )
    owner, name, broken = ALONE[what]
    with mock.patch.object(owner, name, broken), only_drawn(), pytest.raises(AssertionError):
        run_state_machine_as_test(RanksMachine, settings=once)
