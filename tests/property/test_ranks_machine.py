"""Several ranks of one model, whose tiers hold other things, under every order of calls."""

from contextlib import suppress

import pytest
from example_counts import examples
from fresh_examples import all_drawn
from ranks_machine import RanksMachine


class ThreeRanksMachine(RanksMachine):
    num_ranks = 3


TestRanksMachine = all_drawn(RanksMachine.TestCase)
TestRanksMachine.settings = examples(20)
TestThreeRanksMachine = all_drawn(ThreeRanksMachine.TestCase)
TestThreeRanksMachine.settings = examples(8)

PROMPTS = [(24, 0), (32, 1), (40, 0)]
TROUBLES = {
    "a load fails": lambda ranks: ranks.trouble_on_one_rank(PROMPTS, "a load fails", 0),
    "a bit": lambda ranks: ranks.trouble_on_one_rank(PROMPTS, "a bit", 0),
    "a restart": lambda ranks: ranks.round_trip(PROMPTS, [], None, "restart", 9),
}


def run(trouble):
    """Calls of the machine that bring its ranks into one trouble, with all that it checks."""
    ranks = RanksMachine()
    try:
        ranks.start(
            policy="lru",
            save_decode_states=False,
            max_checkpoints=None,
            longest=128,
            placement=None,
            slot_policy=None,
            prompts=PROMPTS,
        )
        ranks.look_at(1)
        TROUBLES[trouble](ranks)
        ranks.ranks_stand_alike()
        ranks.books_agree()
    except AssertionError:
        with suppress(AssertionError):
            ranks.teardown()
        raise
    ranks.teardown()


@pytest.mark.parametrize("trouble", TROUBLES)
def test_ranks_that_agree_get_through_trouble(trouble):
    run(trouble)
