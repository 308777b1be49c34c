"""Several ranks of one model, whose tiers hold other things, under every order of calls."""

from example_counts import few_examples
from fresh_examples import all_drawn
from ranks_machine import RanksMachine


class ThreeRanksMachine(RanksMachine):
    num_ranks = 3


TestRanksMachine = all_drawn(RanksMachine.TestCase)
TestRanksMachine.settings = few_examples(40)
TestThreeRanksMachine = all_drawn(ThreeRanksMachine.TestCase)
TestThreeRanksMachine.settings = few_examples(10)
