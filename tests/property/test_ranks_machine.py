"""Several ranks of one model, with different entries in their tiers, under every order of calls."""

from example_counts import examples
from fresh_examples import all_drawn
from ranks_machine import RanksMachine


class ThreeRanksMachine(RanksMachine):
    num_ranks = 3


TestRanksMachine = all_drawn(RanksMachine.TestCase)
TestRanksMachine.settings = examples(20)
TestThreeRanksMachine = all_drawn(ThreeRanksMachine.TestCase)
TestThreeRanksMachine.settings = examples(8)
