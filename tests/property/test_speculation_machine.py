"""Steps with drafts under every order of calls."""

from example_counts import examples
from speculation_machine import SpeculationMachine

TestSpeculationMachine = SpeculationMachine.TestCase
TestSpeculationMachine.settings = examples(100)


class StepsAheadMachine(SpeculationMachine):
    """Without drafts: the next step begins before the last step's tokens have arrived."""

    num_drafts = 0


TestStepsAheadMachine = StepsAheadMachine.TestCase
TestStepsAheadMachine.settings = examples(100)
